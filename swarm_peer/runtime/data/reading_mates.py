"""Knows which stage-mates may be reading data, so that their leases are respected."""

from __future__ import annotations

from collections.abc import Callable

from swarm_peer.policy.data.sample_ledger import SampleLedger
from swarm_peer.policy.view import PeerState, SwarmView
from swarm_peer.runtime.context import Clock

# In lifetimes of an announcement: the leases of a peer that vanished without a goodbye are respected for this long. It
# may be alive, and only out of reach of this peer.
PATIENCE = 2
# Stage-mates that must say that a pass is over before it is believed, if there are so many.
PASS_WITNESSES = 2


class ReadingMates:
    """The peers of stage 0 beside this one. Belongs to the event loop's thread."""

    def __init__(self, *, me: str, clock: Clock, announcement_s: float, view: Callable[[], SwarmView]):
        """Make a list without stage-mates.

        Args:
            announcement_s: lifetime of an announcement
        """
        self._me = me
        self._clock = clock
        self._patience_s = PATIENCE * announcement_s
        self._view = view
        self._seen: dict[str, float] = {}  # when each was last known to be present
        self._passes: dict[str, int] = {}  # the pass over the data that each last said it is in

    def welcome(self, peer_id: str) -> None:
        """Note a stage-mate that has called this peer. Its announcement may not have been seen yet."""
        self._seen[peer_id] = self._clock.monotonic_s()

    def forget(self, peer_id: str) -> None:
        """Forget a stage-mate that has said goodbye."""
        self._seen.pop(peer_id, None)

    def present(self) -> list[str]:
        """The stage-mates in view that may be reading."""
        reading = (PeerState.SERVING, PeerState.DRAINING)
        peers = [peer.peer_id for peer in self._view().in_stage(0) if peer.state in reading]
        return [peer_id for peer_id in peers if peer_id != self._me]

    def live(self) -> set[str]:
        """The peers whose leases are respected: this one, and the stage-mates that were seen a short time ago."""
        oldest = self._clock.monotonic_s() - self._patience_s
        return {self._me, *self.present(), *(peer_id for peer_id, at in self._seen.items() if at >= oldest)}

    def note_present(self) -> None:
        """Remember which stage-mates are in view now, and forget those last seen too long ago."""
        now = self._clock.monotonic_s()
        self._seen.update((peer_id, now) for peer_id in self.present())
        self._seen = {peer_id: at for peer_id, at in self._seen.items() if now - at <= self._patience_s}

    def note_pass(self, peer_id: str, current_pass: int, ledger: SampleLedger) -> None:
        """Note the pass that a stage-mate is in. It may have heard earlier than this peer that a pass is over.

        If there are several stage-mates, PASS_WITNESSES of them must be ahead before the ledger begins the next pass.
        """
        self._passes[peer_id] = current_pass
        mates = self.present()
        ahead = [mate for mate in mates if self._passes.get(mate, 0) > ledger.current_pass]
        if ahead and len(ahead) >= min(PASS_WITNESSES, len(mates)):
            ledger.begin_pass(ledger.current_pass + 1)  # this peer cannot have missed the end of more than one
            self._passes = {mate: self._passes[mate] for mate in ahead}

    def lacks_witnesses(self, ledger: SampleLedger) -> bool:
        """Whether a stage-mate has said that the ledger's pass is over, and too few others have."""
        return any(self._passes.get(mate, 0) > ledger.current_pass for mate in self.present())

    def forget_passes(self) -> None:
        """Forget the passes that stage-mates are in: the ledger is another one."""
        self._passes.clear()
