"""This coordinator among the others of its run: finds out whether it is the one that acts, and publishes assignments.

The rule is swarm_peer/policy/leadership.py. The run key signs a warrant for each term; a coordinator signs its records
of that term with an identity of its own, so that two coordinators do not overwrite each other in the DHT.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio

from swarm_peer.errors import CallError
from swarm_peer.policy.leadership import BEATS_PER_LEASE, Leadership, Role, Term
from swarm_peer.runtime.context import Clock
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.records import MAX_ASSIGNMENTS, Assignment, CoordinationRecord, Warrant, coordination_key, seal

log = logging.getLogger(__name__)

LOOK_S = 1.0
# A coordinator that has not looked for a whole beat is taken for halted, so short leases need more frequent looks.
LOOKS_PER_BEAT = 2
# Kept for a day, so that terms are still numbered on after a night without a coordinator.
LIFETIME_S = 24 * 3600.0


class Coordination:
    """Takes part in the leadership of one run. Belongs to the event loop's thread.

    Args:
        run_key: signs warrants
        lease_s: how long the coordinator that acts may be silent
        waits: leave the first term to another coordinator
        clock: its time since 1970 numbers terms, and may be wrong

    Attributes:
        newest: the newest term with the last record of its coordinator, be it this one or another
        inherited: assignments that were under way when this coordinator's term began
    """

    def __init__(
        self,
        dht: SwarmDHT,
        run_key: Identity,
        *,
        lease_s: float,
        waits: bool,
        clock: Clock,
    ):
        self._dht = dht
        self._run_key = run_key
        self._lease_s = lease_s
        self._clock = clock
        self._look_s = min(LOOK_S, lease_s / BEATS_PER_LEASE / LOOKS_PER_BEAT)
        self._looked_s = clock.monotonic_s()
        self._leadership = Leadership(me=dht.identity.peer_id, lease_s=lease_s, now_s=self._looked_s, waits=waits)
        self._role = Role(None, False, None, "")
        self._assignments: tuple[Assignment, ...] = ()
        self._reason = ""
        self._beat = 0
        self._warrant: tuple[Term, bytes] | None = None
        self.newest: tuple[Term, CoordinationRecord] | None = None
        self.inherited: tuple[Assignment, ...] = ()

    @property
    def term(self) -> Term | None:
        """The newest term, this one's own or another's."""
        return self._role.term

    @property
    def acts(self) -> bool:
        """Whether this coordinator is the one that acts, by a look that is not old: it may have been halted since."""
        return self._role.acts and self._clock.monotonic_s() - self._looked_s < self._lease_s / BEATS_PER_LEASE

    async def run(self) -> None:
        """Find out which coordinator acts, and show that this one lives while it does; for ever."""
        unknown = ""  # why the last look has failed
        while True:
            try:
                await self._look()
                unknown = ""
            except CallError as error:
                if str(error) != unknown:
                    log.warning("coordination_unknown reason=%s", error)
                unknown = str(error)
            await anyio.sleep(self._look_s)

    async def assign(self, assignments: Sequence[Assignment], reason: str) -> None:
        """Publish all assignments that are under way. The last decision's reason may wait for the next beat."""
        self._reason = reason[:300]
        newest_last = tuple(assignments[-MAX_ASSIGNMENTS:])
        if newest_last != self._assignments:
            self._assignments = newest_last
            await self._publish()

    async def _look(self) -> None:
        """Look once.

        Raises:
            CallError: no answer, which does not mean that no coordinator acts
        """
        try:
            records = await self._fetch()
        except CallError:
            self._leadership.was_cut_off(self._clock.monotonic_s())
            raise
        now_s = self._clock.monotonic_s()
        beats = {term: record.beat for term, record in records.items()}
        role = self._leadership.look(beats, now_s, int(self._clock.unix_s()))
        if (role.acts, role.term) != (self._role.acts, self._role.term):
            term = 0 if role.term is None else role.term.number
            log.info("coordination acts=%s term=%d reason=%s", role.acts, term, role.reason or "its term is the newest")
        if role.beat == 0:  # of a new term
            self.inherited = () if self.newest is None else self.newest[1].assignments
            self._assignments, self._reason = (), ""
        self._role, self._looked_s = role, now_s
        if role.term is not None and role.term in records:
            self.newest = role.term, records[role.term]
        if role.beat is not None:
            self._beat = role.beat
            await self._publish()

    async def _fetch(self) -> dict[Term, CoordinationRecord]:
        """The records of all coordinators. Raises CallError if nobody answers."""
        num_answers = self._dht.num_answers
        records = await self._dht.fetch_coordination(self._run_key.peer_id)
        newest = max(records, default=None)
        if self._dht.num_answers == num_answers and newest is not None and not self._is_mine(newest):
            # This node is cut off, and finds what it heard last: that says nothing of the coordinator that acts.
            raise CallError("no other node of the DHT answers")
        return records

    def _is_mine(self, term: Term) -> bool:
        return term.coordinator == self._dht.identity.peer_id

    async def _publish(self) -> None:
        term, run_id = self._role.term, self._run_key.peer_id
        if term is None or not self._is_mine(term):
            return  # it is over
        if self._warrant is None or self._warrant[0] != term:
            self._warrant = term, seal(Warrant(coordinator=term.coordinator, term=term.number), run_id, self._run_key)
        record = CoordinationRecord(
            warrant=self._warrant[1], beat=self._beat, assignments=self._assignments, reason=self._reason
        )
        await self._dht.store(coordination_key(run_id), record, run_id, LIFETIME_S)
