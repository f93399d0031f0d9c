"""What must hold where replicas update their weights alone, and average their differences now and then.

Which microbatches a replica's difference holds is followed from round to round, until it is brought to an average,
given to a stage-mate or lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from invariants import TOLERANCE, Invariants, has_gone_back, held_in, trainer_of
from loop import HOST
from records import Place, same_weights
from wrapping import around, before

from swarm_peer.model.round_strategy import STRATEGY_PREFIX
from swarm_peer.protocol.epochs import Restart
from swarm_peer.protocol.log import Contribution, Cut, Entry
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.work import Work
from swarm_peer.runtime.step.driver import RoundDriver
from swarm_peer.runtime.step.driver_parts import SeatWeights
from swarm_peer.runtime.step.workplace import StageWorkplace


class PeriodicInvariants(Invariants):
    """Watches a tube whose run averages periodically."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        # The microbatches of rounds that a seat has ended, and of those that are committed without an average.
        self._ended: WeakKeyDictionary[Work, dict[int, tuple[bytes, ...]]] = WeakKeyDictionary()
        self._carried: dict[int, tuple[Any, list[bytes]]] = {}  # by the id of what the seat carries on, and with that

    @contextmanager
    def watching(self) -> Iterator[None]:
        with super().watching(), ExitStack() as stack:
            stack.enter_context(before(Work, "end_round", self._ending))
            stack.enter_context(around(RoundDriver, "leave", self._leaving))
            yield

    # --- what a difference holds

    def _carried_by(self, work: Work) -> list[bytes]:
        return self._carried.setdefault(id(work._carried), (work._carried, []))[1]

    async def _held(self, call: Any, driver: RoundDriver, member: Member, number: int) -> None:
        own, known = member.work.own(number), driver.gradients.names
        carried = tuple(self._carried_by(member.work))  # others may end the period without this seat meanwhile
        await call(member, number)
        if own is None or own.name in known or has_gone_back(member, number):
            return
        ids = held_in(driver, number)
        self._ended.setdefault(member.work, {})[number] = ids
        if own.name in driver.gradients.names:
            self._note_work(member.stage, own, tuple(sorted((*carried, *ids))), driver)

    def _ending(self, work: Work, cut: Cut) -> None:
        present = work.open.get(cut.round)
        if not cut.averages and present is not None and present.is_drained:
            self._carried_by(work).extend(self._ended.get(work, {}).pop(cut.round, ()))

    async def _leaving(self, call: Any, driver: RoundDriver) -> list[Contribution]:
        """Who leaves in the middle of a period gives the difference that it has."""
        member = driver.member
        held: list[Contribution] = await call()
        for own in held if member is not None else ():
            assert member is not None
            is_mine = own.name.seat == member.me and not has_gone_back(member, own.name.round)
            if is_mine and (member.stage, own) not in self.records.works:
                ended = (ids for number, ids in self._ended.get(member.work, {}).items() if number in member.work.open)
                ids = (*self._carried_by(member.work), *(each for of_round in ended for each in of_round))
                self._note_work(member.stage, own, tuple(sorted(ids)), driver)
        return held

    # --- what must hold

    def _opened(self, workplace: StageWorkplace, number: int, standing: SeatWeights) -> None:
        """After an average, a replica goes on from the outer weights, and not from its own."""
        super()._opened(workplace, number, standing)
        stage, trainer = workplace._core.stage, trainer_of(workplace)
        entry = self.records.entries.get((stage, standing.entry))
        outer: list[torch.Tensor] = trainer.strategy._outer  # type: ignore[attr-defined]
        is_first = rounds_of_workplace(workplace).step.round_number != number
        is_outer = all(map(torch.equal, trainer.trained.values(), outer))
        if entry is not None and entry.cut.averages and is_first and not is_outer:
            self.tube.violation(f"{HOST.get()} begins round {number} with weights that are not the average's")

    def _check_update(self, place: Place, entry: Entry, restart: Restart) -> None:
        """The outer step is that of torch, with the mean of the members' differences over their samples."""
        stage, after_it = place[0], self.shared(self.records.weights[place])
        before_it = self.shared(self.records.weights[stage, entry.cut.parent])
        self.records.checked += 1
        if not entry.cut.averages:
            if not same_weights(before_it, after_it):
                self.tube.violation(f"{self._said(place)} has no average, and changes the outer weights")
            return
        means = self.records.mean(stage, entry, self._zeros(stage))
        averaging = self._resolved.manifest.averaging
        rate, decay = averaging.outer_learning_rate, averaging.outer_momentum
        for index, name in enumerate(self._reference[stage].trained):
            outer = torch.nn.Parameter(before_it[name].clone())
            momentum = before_it[f"{STRATEGY_PREFIX}momentum/{index:05d}"].clone()
            optimizer = torch.optim.SGD([outer], lr=rate, momentum=decay, nesterov=True)
            optimizer.state[outer] = {"momentum_buffer": momentum}
            if any(bool(mean.any()) for mean in means):
                outer.grad = means[index]
                optimizer.step()
            error = float((outer.detach() - after_it[name]).abs().max())
            if not error <= TOLERANCE:
                self.tube.violation(f"the outer step of {self._said(place)} is wrong by {error:.2g}: {name}")
                return


def rounds_of_workplace(workplace: StageWorkplace) -> Any:
    """The rounds of the replica that a workplace is of."""
    return workplace._core.rounds
