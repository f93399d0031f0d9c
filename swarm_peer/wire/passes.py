"""Invites, tickets and passes: how a peer proves to anybody, offline, that it may take part in a run.

The run key signs tickets. A ticket names a key, and whoever holds that key signs passes for peers. So a pass is a chain
of two signatures, run key -> ticket -> peer id, which each node checks by itself, also when no coordinator lives.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgpack
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field

from swarm_peer.errors import InvalidMessage, UserError
from swarm_peer.wire.fields import Seconds
from swarm_peer.wire.identity import Identity, id_of_key, is_peer_id, key_of_id
from swarm_peer.wire.packing import unpack
from swarm_peer.wire.records import MAX_STORED_BYTES, Record, seal, unseal
from swarm_peer.wire.short_addresses import pack_addresses, unpack_addresses

# A pass is some 500 bytes, and the label is the only part of any length.
MAX_PASS_BYTES = 1024
# Most revoked tickets, and peers, that fit MAX_STORED_BYTES.
MAX_TICKETS_REVOKED = 120
INVITE_PREFIX = "swarm-invite-"
# Long invites would be addresses without end; a terminal takes 4096 characters in one line.
MAX_INVITE_CHARS = 4000
# Of one invite, the first ones. A newcomer tries all of them before it dials any.
MAX_INVITE_ADDRESSES = 16

PeerId = Annotated[str, Field(max_length=64)]


class TicketRecord(Record):
    """The holder of `key` may let peers into the run. Signed with the run key.

    Attributes:
        key: the ticket's public key, as a peer id
        label: whom the operator gave it to
        expires: Unix seconds
        at_once: how many peers may be in the run by this ticket at the same time, as each node sees it
    """

    kind = "ticket"
    key: PeerId
    label: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._@+-]+$")
    expires: Seconds
    at_once: int = Field(ge=1, lt=2**20)


class PassRecord(Record):
    """The peer is let into the run. Signed with the key of a ticket."""

    kind = "pass"
    peer: PeerId


class Revocations(Record):
    """All tickets and peers that are not let in any more. Signed with the run key.

    Attributes:
        serial: grows with each change
        tickets: their keys
    """

    kind = "revocations"
    serial: int = Field(ge=0, lt=2**40)
    tickets: tuple[PeerId, ...] = Field(max_length=MAX_TICKETS_REVOKED)
    peers: tuple[PeerId, ...] = Field(max_length=MAX_TICKETS_REVOKED)


@dataclass(frozen=True, slots=True)
class Revoked:
    """All that several lists revoke.

    Attributes:
        serial: of the newest of them; 0 if there is none
    """

    serial: int
    tickets: frozenset[str]
    peers: frozenset[str]


class RevocationsRecord(Record):
    """Tells the newest list of revocations to whoever looks; stored under the run's id.

    Attributes:
        revocations: their envelope (wire/passes.py), which travels on from peer to peer
    """

    kind = "told_revocations"
    revocations: bytes = Field(max_length=MAX_STORED_BYTES)


def revocations_key(run_id: str) -> str:
    """DHT key of the run's RevocationsRecord."""
    return f"swarm/{run_id}/revocations"


@dataclass(frozen=True, slots=True)
class OpenedPass:
    """A pass whose signatures are right. Whether it has expired or was revoked is another question."""

    peer_id: str
    ticket: TicketRecord


def open_pass(data: object, run_id: str) -> OpenedPass:
    """Check the two signatures of a pass.

    Raises:
        InvalidMessage: it is no pass of this run; the message says why
    """
    if not isinstance(data, bytes) or len(data) > MAX_PASS_BYTES:
        raise InvalidMessage(f"pass: not {MAX_PASS_BYTES} bytes at most")
    match unpack(data, "pass"):
        case [bytes() as ticket_envelope, bytes() as pass_envelope]:
            ticket = unseal(TicketRecord, ticket_envelope, run_id, run_id)
            record = unseal(PassRecord, pass_envelope, run_id, ticket.key)
            return OpenedPass(record.peer, ticket)
        case _:
            raise InvalidMessage("pass: not [ticket, pass]")


@dataclass(frozen=True)
class Invite:
    """All that a newcomer needs, in one string: where the run is, and a ticket with its key.

    Attributes:
        addresses: of peers of the run
        ticket: the envelope of the ticket
        key: the ticket's private key, a secret: it lets its holder into the run
    """

    run_id: str
    addresses: tuple[str, ...]
    ticket: bytes
    key: Identity

    @classmethod
    def issue(cls, run_key: Identity, addresses: Sequence[str], *, label: str, expires: int, at_once: int) -> Invite:
        """Make a new ticket, and an invite of it.

        Raises:
            ValueError: the label is empty, too long, or has characters other than letters, digits and . _ @ + -
        """
        key = Identity.generate()
        ticket = TicketRecord(key=key.peer_id, label=label, expires=expires, at_once=at_once)
        return cls(run_key.peer_id, tuple(addresses), seal(ticket, run_key.peer_id, run_key), key)

    def pass_for(self, peer_id: str) -> bytes:
        """Sign a pass for a peer."""
        return bytes(msgpack.packb([self.ticket, seal(PassRecord(peer=peer_id), self.run_id, self.key)]))

    def opened_ticket(self) -> TicketRecord:
        """The ticket itself.

        Raises:
            InvalidMessage: the run key has not signed it
        """
        return unseal(TicketRecord, self.ticket, self.run_id, self.run_id)

    def text(self) -> str:
        """The string to pass on."""
        addresses = pack_addresses(self.addresses[:MAX_INVITE_ADDRESSES], self.run_id)
        fields = [key_of_id(self.run_id), addresses, self.ticket, self.key.private_bytes()]
        return INVITE_PREFIX + base64.urlsafe_b64encode(msgpack.packb(fields)).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Invite:
        """Read an invite that `text` wrote.

        Raises:
            UserError: it is no invite, or a part of one; the message does not repeat it, since it may be a secret
        """
        damaged = UserError("this invite is damaged: copy it anew, the whole line, from whoever gave it to you")
        encoded = text.removeprefix(INVITE_PREFIX)
        if len(text) > MAX_INVITE_CHARS or encoded == text:
            raise damaged
        try:
            fields = unpack(base64.b64decode(encoded + "=" * (-len(encoded) % 4), b"-_", validate=True), "invite")
            invite = cls._of_fields(fields)
            if invite.opened_ticket().key != invite.key.peer_id:
                raise damaged
        except (ValueError, InvalidMessage):
            raise damaged from None
        return invite

    @classmethod
    def _of_fields(cls, fields: object) -> Invite:
        """The invite of what `text` packs. An older one has its run's id, and its addresses, as texts."""
        match fields:
            case [str() | bytes() as run, tuple() as packed, bytes() as ticket, bytes() as key] if len(key) == 32:
                run_id = run if isinstance(run, str) else id_of_key(run)
                if not is_peer_id(run_id):
                    raise InvalidMessage("an invite: its run has no key")
                addresses = unpack_addresses(packed[:MAX_INVITE_ADDRESSES], run_id)
                return cls(run_id, addresses, ticket, Identity(Ed25519PrivateKey.from_private_bytes(key)))
            case _:
                raise InvalidMessage("an invite: not [run, addresses, ticket, key]")
