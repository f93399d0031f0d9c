"""Measures the link to a member of a run, and how far its clock is off; and answers others that do so.

A member spends few bytes on that (policy/probe_budget.py), and none of its device's time.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm_peer.errors import Busy, CallError, CallTimeout, InvalidMessage, PeerUnreachable
from swarm_peer.policy.diagnosis.run_findings import MemberWay
from swarm_peer.policy.probe_budget import ProbeBudget
from swarm_peer.runtime.context import Clock
from swarm_peer.runtime.network.transport import Handler, Reply, Transport, check_body
from swarm_peer.wire.messages import MAX_PROBE_BYTES, Body, ProbeCall, ProbeReply

# To dial a member, and for each call without bytes.
CALL_TIMEOUT_S = 10.0
# For the bytes of one measurement: at 140 kB/s all of them arrive in time.
LINK_TIMEOUT_S = 30.0
# Calls without bytes; the quickest one tells the round trip and the clock.
NUM_PINGS = 4
# First so few bytes, and the rest only if these were quick.
FIRST_BYTES = 2**18
QUICK_S = 1.0
# No time that passes is shorter than a clock tells.
CLOCK_TICK_S = 1e-4


class ProbeGiver:
    """Answers probes. Belongs to the event loop's thread."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._budget = ProbeBudget()

    @property
    def calls(self) -> dict[type[Body], Handler]:
        """The calls that this part answers."""
        return {ProbeCall: self.handle}

    async def handle(self, caller: str, call: ProbeCall, tensors: Sequence[memoryview]) -> Reply:
        """Tell the time, and send as many bytes as the caller asks for.

        Raises:
            Busy: it, or all callers together, have had enough within the last minute
        """
        num_bytes = call.num_bytes + sum(tensor.nbytes for tensor in tensors)
        if num_bytes and not self._budget.take(self._clock.monotonic_s(), caller, num_bytes):
            raise Busy("this peer has measured enough links within the last minute")
        sent = (memoryview(bytes(call.num_bytes)),) if call.num_bytes else ()
        return Reply(ProbeReply(unix_s=self._clock.unix_s()).model_dump(), sent)


class Prober:
    """Measures links to members. Belongs to the event loop's thread."""

    def __init__(self, *, transport: Transport, manifest_hash: str, clock: Clock):
        self._transport = transport
        self._hash = manifest_hash
        self._clock = clock

    async def measure(self, peer_id: str, *, is_direct: bool) -> MemberWay:
        """Measure all of the way to one member. It holds None for what cannot be measured.

        Args:
            is_direct: whether the member answers at an address of its own
        """
        clock_off_s, round_trip_s = None, None
        try:
            await self._call(peer_id, timeout_s=CALL_TIMEOUT_S)  # dials, too
            for _ in range(NUM_PINGS):
                passed_s, off_s = await self._call(peer_id, timeout_s=CALL_TIMEOUT_S)
                if round_trip_s is None or passed_s < round_trip_s:
                    round_trip_s, clock_off_s = passed_s, off_s
            up = await self._bytes_per_s(peer_id, round_trip_s or 0.0, is_up=True)
            down = await self._bytes_per_s(peer_id, round_trip_s or 0.0, is_up=False)
        except (PeerUnreachable, CallTimeout) as error:
            if round_trip_s is None:
                return MemberWay(peer_id=peer_id, is_direct=is_direct, is_reached=False, reason=str(error))
            up = down = 0.0  # it answers, and takes for ever for a little more
        except CallError as error:  # it is busy, or of another version
            return MemberWay(
                peer_id=peer_id,
                is_direct=is_direct,
                is_reached=True,
                round_trip_s=round_trip_s,
                clock_off_s=clock_off_s,
                reason=str(error),
            )
        return MemberWay(
            peer_id=peer_id,
            is_direct=is_direct,
            is_reached=True,
            round_trip_s=round_trip_s,
            clock_off_s=clock_off_s,
            up_bytes_per_s=up,
            down_bytes_per_s=down,
        )

    async def _bytes_per_s(self, peer_id: str, round_trip_s: float, *, is_up: bool) -> float:
        """How fast bytes pass the link in one direction: too low as a rule, since TCP begins slowly.

        Where round trips vary, it may be up to twice too high: one that took longer than the bytes would leave no time.
        """
        rate = 0.0
        for num_bytes in (FIRST_BYTES, MAX_PROBE_BYTES - FIRST_BYTES):
            sent, asked = (num_bytes, 0) if is_up else (0, num_bytes)
            passed_s, _ = await self._call(peer_id, timeout_s=LINK_TIMEOUT_S, num_bytes=asked, num_sent=sent)
            carrying_s = passed_s - min(round_trip_s, passed_s / 2)
            rate = max(rate, num_bytes / max(carrying_s, CLOCK_TICK_S))
            if passed_s > QUICK_S:
                break
        return rate

    async def _call(
        self, peer_id: str, *, timeout_s: float, num_bytes: int = 0, num_sent: int = 0
    ) -> tuple[float, float]:
        """Call a member. Returns how long that took, and how far its clock is ahead of this machine's, in seconds."""
        call = ProbeCall(manifest=self._hash, num_bytes=num_bytes)
        tensors = (memoryview(bytes(num_sent)),) if num_sent else ()
        begun_s, asked_s = self._clock.monotonic_s(), self._clock.unix_s()
        reply = await self._transport.call(peer_id, call, tensors, timeout_s=timeout_s)
        passed_s = self._clock.monotonic_s() - begun_s
        if sum(tensor.nbytes for tensor in reply.tensors) != num_bytes:
            raise InvalidMessage(f"not the {num_bytes} bytes that were asked for")
        return passed_s, check_body(ProbeReply, reply.body).unix_s - (asked_s + passed_s / 2)
