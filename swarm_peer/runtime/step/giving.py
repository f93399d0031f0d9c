"""Gives the contributions of a seat that leaves to stage-mates, and takes those of others.

A contribution has a name, and its author signs it. So it may be given to several, in chunks, and each call may come
again: a cut takes each name once (docs/protocol.md).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarm_peer.codecs.base import is_within
from swarm_peer.codecs.parts import LARGEST_MEAN
from swarm_peer.errors import Busy, CallError, InvalidMessage, NotServing
from swarm_peer.protocol.log import MAX_GUESTS, Contribution, HandedOver, Name
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.statements import Signed
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.agreement import Agreement
from swarm_peer.runtime.network.frame_stream import SLOWEST_BYTES_PER_S
from swarm_peer.runtime.network.transport import Handler, Reply, Transport
from swarm_peer.runtime.step.driver import RoundDriver
from swarm_peer.wire.codecs import bytes_of
from swarm_peer.wire.messages import Body, GiveCall

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 * 2**20
CALL_TIMEOUT_S = 15.0


@dataclass
class _Arriving:
    """A contribution that is arriving."""

    given: Signed[HandedOver]
    data: torch.Tensor
    offsets: set[int] = field(default_factory=set)


class Giving:
    """One seat's way of giving and taking contributions. Belongs to the event loop's thread.

    Args:
        shapes: of a contribution's tensors

    Attributes:
        num_bytes: of a contribution
    """

    def __init__(
        self,
        *,
        context: PeerContext,
        agreement: Agreement,
        transport: Transport,
        driver: RoundDriver,
        stage: int,
        shapes: Sequence[torch.Size],
    ):
        self._context = context
        self._agreement = agreement
        self._transport = transport
        self._driver = driver
        self._stage = stage
        self._shapes = list(shapes)
        averaging = context.resolved.manifest.averaging
        self._rounds_ahead = averaging.rounds_ahead + averaging.steps_per_average
        self.num_bytes = 4 * sum(shape.numel() for shape in shapes)
        # Statements of the contributions that this seat holds for others, so that it can give them on.
        self._signed: dict[Name, Signed[HandedOver]] = {}
        # By giver: it gives one after the other.
        self._arriving: dict[str, _Arriving] = {}

    @property
    def calls(self) -> dict[type[Body], Handler]:
        """The calls that this part answers."""
        return {GiveCall: self.handle}

    # --- the giving side

    async def give(
        self, contributions: Sequence[Contribution], mates: Sequence[str], enough: int = 2
    ) -> list[Contribution]:
        """Give contributions, whose gradients the driver holds, to some stage-mates.

        Args:
            mates: ids of stage-mates, who are asked one after the other
            enough: how many of them shall have each

        Returns:
            the contributions that fewer have taken
        """
        # The driver forgets them when their round is over, which may be while they are given.
        means = {each.name: self._driver.gradients.get(each.name)[0] for each in contributions}
        missing = dict.fromkeys(contributions, enough)
        for mate in mates:
            for contribution in [each for each, more in missing.items() if more > 0]:
                try:
                    await self._give_one(contribution, means[contribution.name], mate)
                except CallError as error:
                    log.warning("contribution_not_taken peer=%s reason=%s: %s", mate, error.code, error)
                    if not isinstance(error, NotServing):
                        break  # else its round is over there, and those of later rounds may not be
                else:
                    missing[contribution] -= 1
        return [each for each, more in missing.items() if more > 0]

    async def _give_one(self, contribution: Contribution, means: Sequence[Tensor], mate: str) -> None:
        data = await self._context.threads.run(_flat, means)
        if contribution.name not in self._signed:
            me, epoch = self._agreement.core.membership.me, self._agreement.core.epoch
            digest = await self._context.threads.run(_digest, data)
            self._signed[contribution.name] = self._agreement.statements.sign(
                HandedOver(me, epoch.id, contribution, digest)
            )
        statement = memoryview(self._agreement.statements.encode(self._signed[contribution.name]))
        for offset in range(0, len(data), CHUNK_BYTES):
            call = GiveCall(manifest=self._context.resolved.hash, stage=self._stage, offset=offset, num_bytes=len(data))
            chunk = data[offset : offset + CHUNK_BYTES]
            timeout_s = CALL_TIMEOUT_S + len(chunk) / SLOWEST_BYTES_PER_S
            await self._transport.call(mate, call, (statement, chunk), timeout_s=timeout_s)

    # --- the taking side

    async def handle(self, caller: str, call: GiveCall, tensors: Sequence[memoryview]) -> Reply:
        """Take a chunk of a contribution. The last one makes it a guest of this seat.

        Raises:
            InvalidMessage: it does not fit this stage, or is not what its author has signed
            NotServing: the caller is no stage-mate, or the round is over
            Busy: this seat holds as many as it may
        """
        member = self._driver.member
        if member is None or caller not in self._mates():
            raise NotServing("contributions go from stage-mate to stage-mate")
        if len(tensors) != 2 or call.num_bytes != self.num_bytes or len(tensors[1]) > CHUNK_BYTES:
            raise InvalidMessage(f"a contribution of {call.num_bytes} bytes in {len(tensors)} tensors")
        given = self._agreement.statements.decode(Signed[HandedOver], bytes(tensors[0]))
        contribution = given.body.contribution
        name = contribution.name
        if name.seat != given.body.author or contribution.weight < 0:
            raise InvalidMessage("a contribution that is not its author's")
        epoch = self._agreement.core.membership.epoch_of(given.body.epoch)
        if epoch is None or name.seat not in epoch.roster(self._stage):
            raise NotServing("a contribution of somebody who had no place in the stage, as far as is known here")
        if member.work.decided_in(name.round) != name.round:
            raise InvalidMessage(f"a contribution of round {name.round}, whose entry holds none")
        if _is_held(member, given.body):
            return Reply()
        arriving = self._arrive(caller, given)
        end = call.offset + len(tensors[1])
        if call.offset % CHUNK_BYTES or end != min(call.offset + CHUNK_BYTES, self.num_bytes):
            raise InvalidMessage(f"bytes {call.offset} to {end} are no chunk of {self.num_bytes}")
        arriving.data[call.offset : end] = torch.frombuffer(bytearray(tensors[1]), dtype=torch.uint8)
        arriving.offsets.add(call.offset)
        if arriving.offsets >= set(range(0, self.num_bytes, CHUNK_BYTES)):
            await self._take(self._arriving.pop(caller))
        return Reply()

    async def run(self) -> None:
        """Drop what no more of will arrive, until cancelled."""
        while True:
            await self._agreement.changed.wait_for(lambda: self._arriving.keys() != self._still_arriving())
            self._arriving = {giver: self._arriving[giver] for giver in self._still_arriving()}

    def _still_arriving(self) -> set[str]:
        """The givers that are still there, and whose contributions are of rounds that are not over."""
        if not self._arriving or self._driver.member is None:
            return set()
        mates, next_round = self._mates(), self._next_round()
        rounds = {giver: each.given.body.contribution.name.round for giver, each in self._arriving.items()}
        return {giver for giver, number in rounds.items() if giver in mates and number >= next_round}

    def _mates(self) -> frozenset[str]:
        return frozenset(seat.peer for seat in self._agreement.core.epoch.roster(self._stage))

    def _arrive(self, caller: str, given: Signed[HandedOver]) -> _Arriving:
        name, next_round = given.body.contribution.name, self._next_round()
        if not next_round <= name.round <= next_round + self._rounds_ahead:
            raise NotServing(f"round {name.round} is over here, or far from beginning")
        self._signed = {each: signed for each, signed in self._signed.items() if each.round >= next_round}
        arriving = self._arriving.get(caller)
        if arriving is None or arriving.given != given:
            held = self._driver.gradients.names - {each for each in self._driver.gradients.names if self._is_own(each)}
            others = self._arriving.keys() - {caller}
            if len(others) + len(held) >= MAX_GUESTS:
                raise Busy(f"{len(held)} contributions of others are held, and {len(others)} arrive")
            arriving = _Arriving(given, torch.empty(self.num_bytes, dtype=torch.uint8))
            self._arriving[caller] = arriving
        return arriving

    def _next_round(self) -> int:
        member = self._driver.member
        return member.log.next_round if member is not None else 0

    def _is_own(self, name: Name) -> bool:
        return name.seat == self._agreement.core.membership.me

    async def _take(self, arrived: _Arriving) -> None:
        body = arrived.given.body
        means = await self._context.threads.run(self._checked, arrived)
        member = self._driver.member
        if member is not None and _is_held(member, body):
            return  # another has given it meanwhile
        if member is None or not member.take_guest(arrived.given):
            raise NotServing(f"round {body.contribution.name.round} is over here")
        # At once: the core may name it, and the driver holds what the core can name.
        self._driver.gradients.put(body.contribution.name, means, body.contribution.weight)
        self._signed[body.contribution.name] = arrived.given
        self._agreement.look()

    def _checked(self, arrived: _Arriving) -> list[Tensor]:
        if _digest(bytes_of(arrived.data)) != arrived.given.body.digest:
            raise InvalidMessage("a contribution that its author has not signed")
        values = arrived.data.view(torch.float32)
        if not is_within(values, LARGEST_MEAN):
            raise InvalidMessage("a contribution that is not finite, or too large to be averaged")
        parts = torch.split(values, [shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def _is_held(member: Member, given: HandedOver) -> bool:
    """Whether a member has this contribution as its guest.

    Raises:
        InvalidMessage: it has another one of this name
    """
    name = given.contribution.name
    if name not in member.work.guests:
        return False
    held = member.work.given[name].body
    if (held.contribution, held.digest) != (given.contribution, given.digest):
        raise InvalidMessage(f"another contribution of round {name.round} than its author has given before")
    return True


def _flat(means: Sequence[Tensor]) -> memoryview:
    return bytes_of(torch.cat([mean.reshape(-1) for mean in means]))


def _digest(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
