"""A toy of a mode of averaging: the weights are updated at the end of every second round, with the mean of both."""

import os

import torch

from swarm_peer.model.round_strategy import RoundStrategy
from swarm_peer.model.strategies import STRATEGIES

# Set in the environment of processes that shall train so.
VARIABLE = "EVERY_SECOND_ROUND"


class EverySecondRound(RoundStrategy):
    """Keeps the gradient of each first round for the second."""

    kept_values = 1

    def __init__(self, trainee):
        super().__init__(trainee)
        self.num_kept = 0
        self.kept = [torch.zeros(parameter.shape) for parameter in trainee.trained.values()]

    def end_round(self, averages):
        if not self.num_kept:
            self.num_kept, self.kept = 1, [gradient.clone() for gradient in averages]
            return self.trainee.update(averages, keeps_weights=True)
        means = [(kept + gradient) / 2 for kept, gradient in zip(self.kept, averages, strict=True)]
        self.num_kept, self.kept = 0, [torch.zeros_like(kept) for kept in self.kept]
        return self.trainee.update(means)

    def state(self):
        kept = {f"kept/{number:05d}": gradient for number, gradient in enumerate(self.kept)}
        return {"num_kept": torch.tensor(float(self.num_kept))} | kept

    def load_state(self, entries):
        self.num_kept = int(entries["num_kept"])
        self.kept = [entries[f"kept/{number:05d}"] for number in range(len(self.kept))]


def install_if_wanted():
    """Have this process train so, if its environment says so."""
    if os.environ.get(VARIABLE):
        STRATEGIES["synchronous"] = EverySecondRound
