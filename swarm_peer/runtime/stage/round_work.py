"""The protocol's part in the microbatches of one stage: the heads that they are computed from, and which of them count.

Every microbatch carries the heads of the stages that it has passed, and each reply those of the stages behind. So each
seat knows what a microbatch was computed from before it adds the gradient (docs/protocol.md, 'Samples').
"""

from __future__ import annotations

from swarm_peer.errors import InvalidMessage, RoundClosed
from swarm_peer.protocol.log import Base, Receipt
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.statements import Seat, Signed
from swarm_peer.runtime.network.agreement import Agreement


class RoundWork:
    """One seat's work in one stage, as its executor sees it. Belongs to the event loop's thread, but for `lose`."""

    def __init__(self, *, agreement: Agreement, stage: int):
        self._agreement = agreement
        self._stage = stage

    def _member(self, number: int) -> Member:
        member = self._agreement.core.members.get(self._stage)
        if member is None:
            raise RoundClosed("this peer has no place in the stage", number)
        return member

    def head(self, number: int) -> str:
        """The head of this stage that a round is computed from.

        Raises:
            RoundClosed: this seat is not in that round
        """
        member = self._member(number)
        if (found := member.known_base(number)) is None:
            raise RoundClosed(f"round {number} is not open here", member.log.next_round)
        return found

    def admit(self, number: int, base: Base) -> None:
        """Make sure that a gradient which was computed from these heads may be added.

        Raises:
            RoundClosed: the round goes on from others here, or is over
        """
        member = self._member(number)
        if not member.work.admits(number, base):
            raise RoundClosed(f"round {number} is not computed from these heads here", member.log.next_round)

    def count(self, number: int, base: Base, weight: int, num_samples: int, caller: str) -> Signed[Receipt] | None:
        """Note that a gradient was added, at other stages than 0.

        Args:
            weight: of its samples
            caller: id of the peer that has sent the microbatch

        Returns:
            at stage 1, what this seat signs for the caller

        Raises:
            RoundClosed: it is void by now
        """
        member = self._member(number)
        seat = self._seat_of(caller) if self._stage == 1 else None
        if not member.work.computed(number, base, weight=weight, caller=seat, num_samples=num_samples):
            raise RoundClosed(f"what was computed in round {number} is void", member.log.next_round)
        return member.receipt_for(seat, number, self._agreement.core.epoch) if seat is not None else None

    def _seat_of(self, caller: str) -> Seat | None:
        roster = self._agreement.core.epoch.roster(0)
        return next((seat for seat in roster if seat.peer == caller), None)

    def lose(self, number: int) -> None:
        """Note that the device has lost all that it had computed in a round. Any thread may call it."""
        member = self._agreement.core.members.get(self._stage)
        if member is not None and (present := member.work.open.get(number)) is not None:
            present.is_void = True

    # --- receipts, on their way

    def encode_receipt(self, receipt: Signed[Receipt] | None) -> bytes:
        """A receipt as bytes; none of none."""
        return b"" if receipt is None else self._agreement.statements.encode(receipt)

    def decode_receipt(self, data: bytes, author: str) -> Signed[Receipt] | None:
        """The receipt that a peer of stage 1 has sent with its reply.

        Raises:
            InvalidMessage: it is none of that peer
        """
        if not data:
            return None
        found = self._agreement.statements.decode(Signed[Receipt], data)
        if found.body.author.peer != author:
            raise InvalidMessage(f"a receipt of {found.body.author.peer[:60]} from {author}")
        return found
