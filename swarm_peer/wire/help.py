"""Messages by which nodes that cannot dial each other ask a third one for help."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from swarm_peer.errors import InvalidMessage, PeerUnreachable
from swarm_peer.wire.identity import is_peer_id
from swarm_peer.wire.passes import MAX_PASS_BYTES

# Addresses of one node that another is told of.
MAX_ADDRESSES = 12
MAX_ADDRESS_CHARS = 128


@dataclass(frozen=True, slots=True)
class HelpRequest:
    """A node asks a helper to be connected to another one; or a helper asks that other one, on.

    Attributes:
        shown: the pass of whoever sends this
        is_relay: whether to carry a connection; else both are to dial each other
        other: the node to be reached; or, for that node, the one that asks
        other_shown: that node's pass, if it asks
        addresses: where it may be dialled
        bytes_per_s: that a carried connection has, as the helper says
    """

    shown: bytes
    is_relay: bool
    other: str
    other_shown: bytes = b""
    addresses: tuple[str, ...] = ()
    bytes_per_s: int = 0

    @classmethod
    def parse(cls, values: object) -> HelpRequest:
        """Check what has arrived.

        Raises:
            InvalidMessage: it is no request
        """
        match values:
            case [
                bytes() as shown,
                bool() as relay,
                str() as other,
                bytes() as its,
                tuple() as at,
                int() as rate,
            ]:
                if is_peer_id(other) and max(len(shown), len(its)) <= MAX_PASS_BYTES and _is_rate(rate):
                    return cls(shown, relay, other, its, checked_addresses(at), rate)
        raise InvalidMessage("help: not [pass, relay, node, its pass, addresses, bytes/s]")

    def values(self) -> list[Any]:
        """As `parse` reads it."""
        return [self.shown, self.is_relay, self.other, self.other_shown, list(self.addresses), self.bytes_per_s]


@dataclass(frozen=True, slots=True)
class HelpAnswer:
    """A node's answer to a request.

    Attributes:
        refusal: why it does not do it; empty if it does
        shown: its pass
        addresses: where the node that is to be reached may be dialled
        bytes_per_s: that a carried connection has
    """

    refusal: str = ""
    shown: bytes = b""
    addresses: tuple[str, ...] = ()
    bytes_per_s: int = 0

    @classmethod
    def parse(cls, values: object) -> HelpAnswer:
        """Check what has arrived.

        Raises:
            InvalidMessage: it is no answer
            PeerUnreachable: it is a refusal
        """
        match values:
            case [str() as refusal, bytes() as shown, tuple() as addresses, int() as rate]:
                if refusal:
                    raise PeerUnreachable(f"refused: {refusal!r:.200}")
                if len(shown) <= MAX_PASS_BYTES and _is_rate(rate):
                    return cls(refusal, shown, checked_addresses(addresses), rate)
        raise InvalidMessage("help: not [refusal, pass, addresses, bytes/s]")

    def values(self) -> list[Any]:
        """As `parse` reads it."""
        return [self.refusal, self.shown, list(self.addresses), self.bytes_per_s]


def checked_addresses(values: tuple[Any, ...]) -> tuple[str, ...]:
    """Some addresses of a node, by plain TCP, as others have told them.

    Raises:
        InvalidMessage: one is of another kind, or there are too many
    """
    if len(values) > MAX_ADDRESSES:
        raise InvalidMessage(f"help: {len(values)} addresses; at most {MAX_ADDRESSES} go")
    for value in values:
        if not isinstance(value, str) or len(value) > MAX_ADDRESS_CHARS:
            raise InvalidMessage("help: an address that is none")
        match value.split("/"):
            case ["", "ip4" | "ip6" as family, host, "tcp", port] if _is_endpoint(int(family[2]), host, port):
                continue
        raise InvalidMessage(f"help: {value!r:.80} is no address to dial")
    return values


def _is_endpoint(version: int, host: str, port: str) -> bool:
    try:
        return ip_address(host).version == version and "%" not in host and 0 < int(port) < 65536
    except ValueError:
        return False


def _is_rate(value: int) -> bool:
    return type(value) is int and 0 <= value < 2**40
