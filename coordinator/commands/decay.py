"""The command `decay`. It asks no network: the coordinator that serves the run from the same folder says the word."""

from __future__ import annotations

from typing import Annotated

from coordinator.commands.shared_options import Count, Positive, RunFolder
from swarm_peer.errors import UserError
from swarm_peer.peer_options import RUN


def decay(run: RunFolder = None, /, *, steps: Annotated[Count, RUN, Positive]) -> None:
    """Have the learning rate of a live run decay in a little while, and the run end after that.

    It is for runs whose schedule.name is wsd, on the machine of the coordinator.

    Args:
        steps: Optimizer steps of the decay.
    """
    from coordinator.run.found_runs import ending_of, folder_of_run

    folder = folder_of_run(run)
    if ending := ending_of(folder):
        raise UserError(ending)

    from coordinator.run.asked_decay import ask_for_decay

    print(ask_for_decay(folder, steps))
