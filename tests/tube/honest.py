"""What must hold for the honest members of a swarm in which one lies.

All of invariants.py, as honest hosts see it; and besides: the run does not go back, no round ends before its batch was
computed, and nobody is put out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hosts import Host
from invariants import Invariants
from loop import HOST
from records import Place
from wrapping import around

from swarm_peer.protocol.core import Core
from swarm_peer.protocol.epochs import Restart
from swarm_peer.protocol.log import Committed, Entry
from swarm_peer.protocol.member import Member
from swarm_peer.runtime.stage.executor import StageExecutor
from swarm_peer.runtime.state.index import StageState
from swarm_peer.runtime.state.named_snapshots import NamedSnapshots, NamedState
from swarm_peer.runtime.step.driver import RoundDriver
from swarm_peer.runtime.step.driver_parts import SeatWeights
from swarm_peer.runtime.step.workplace import StageWorkplace


class HonestInvariants(Invariants):
    """Watches a tube in which one member lies."""

    # What a liar has computed is not in the entries where it contradicts them; and it may launch more than its share.
    sizes = 0.5, 3.0

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._computed_in: dict[int, set[bytes]] = {}  # microbatches that seats of stage 1 have computed, by round

    @contextmanager
    def watching(self) -> Iterator[None]:
        with super().watching(), around(Core, "_follow_epoch", self._following):
            yield

    def _lies(self) -> bool:
        return HOST.get() in self.tube.world.liars

    # --- what liars see is no matter

    def _appending(self, member: Member, committed: Committed) -> None:
        if not self._lies():
            super()._appending(member, committed)

    def _opened(self, workplace: StageWorkplace, number: int, standing: SeatWeights) -> None:
        if not self._lies():
            super()._opened(workplace, number, standing)

    async def _applied(self, call: Any, driver: RoundDriver) -> None:
        await (call() if self._lies() else super()._applied(call, driver))

    async def _kept(self, call: Any, store: NamedSnapshots, named: NamedState) -> None:
        is_unknown = self._lies() or self._is_of_the_last(named.name.stage, named.state.history_hash)
        await (call(named) if is_unknown else super()._kept(call, store, named))

    def _check_kept(self, stage: int, state: StageState, what: str) -> None:
        if not self._is_of_the_last(stage, state.history_hash):
            super()._check_kept(stage, state, what)

    def _is_of_the_last(self, *place: Any) -> bool:
        """Whether the liar alone has had these weights: as all leave, it may be the last of its stage."""
        return self.tube.is_over and place not in self.records.weights

    # --- what must hold besides

    def _following(self, call: Any, core: Core) -> None:
        """No honest member loses its place, unless a fault has struck it or it leaves."""
        before, host = set(core.members), HOST.get()
        call()
        is_there = isinstance(host, Host) and not (host.ended.is_set() or self._lies() or self.tube.is_over)
        if (lost := before - set(core.members)) and is_there and not self.tube.may_fail(host):
            self.tube.violation(f"{host} is put out of stages {sorted(lost)}")

    def _note_restart(self, stage: int, restart: Restart) -> None:
        super()._note_restart(stage, restart)
        if restart.first_round:
            self.tube.violation(f"the run goes back to {restart}")

    def _check_update(self, place: Place, entry: Entry, restart: Restart) -> None:
        if not any(self._is_of_the_last(*base) for base in enumerate(entry.cut.base)):
            super()._check_update(place, entry, restart)

    def _computed_one(self, executor: StageExecutor, entered: Any, microbatch: Any, *args: Any) -> None:
        super()._computed_one(executor, entered, microbatch, *args)
        if executor._trainer.spec.index == 1 and microbatch.id in entered.counted:
            self._computed_in.setdefault(entered.number, set()).add(microbatch.id)

    def _check_entry(self, stage: int, entry: Entry) -> None:
        super()._check_entry(stage, entry)
        names = {host.peer_id: host.name.partition("'")[0] for host in self.tube.world.hosts}
        held: dict[str, int] = {}
        for each in entry.cut.brings:
            if (stage, each) in self.records.works:
                name = names.get(each.name.seat.peer, "?")
                held[name] = held.get(name, 0) + self.records.size(self.records.works[stage, each].ids)
        self.entries.append((self.tube.world.loop.time(), stage, held))
        batch = self.manifest.training.global_batch_size
        unearned = 0 if self.tube.liar is None else self.tube.liar.unearned
        if unearned and self.tube.is_over:
            unearned = batch  # as all leave, stage 1 has fewer than three tickets, and then each vouches for itself
        computed = self.records.size(self._computed_in.get(entry.cut.round, ()))
        if stage == 0 and computed < batch - unearned:
            self.tube.violation(f"round {entry.cut.round} ends after {computed} samples")
