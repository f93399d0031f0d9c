"""The addresses in an invite, packed: an IPv4 address of the run's own key takes 11 bytes in place of 80."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

from swarm_peer.errors import InvalidMessage
from swarm_peer.wire.identity import id_of_key, key_of_id


def pack_addresses(addresses: Sequence[str], run_id: str) -> list[Any]:
    """Pack multiaddresses: [key, IP, port] for each, or its text if it is of another form, such as a name's.

    Args:
        run_id: the peer that takes no room, since an invite names it anyway
    """
    return [_pack(address, run_id) for address in addresses]


def _pack(address: str, run_id: str) -> Any:
    match address.split("/"):
        case ["", "ip4" | "ip6", host, "tcp", port, "p2p", peer_id]:
            try:
                packed = [b"" if peer_id == run_id else key_of_id(peer_id), ip_address(host).packed, int(port)]
                # Another spelling of a host or a port stays as it is.
                return packed if _unpack(tuple(packed), run_id) == address else address
            except (ValueError, InvalidMessage):
                return address
        case _:
            return address


def unpack_addresses(values: Sequence[object], run_id: str) -> tuple[str, ...]:
    """The multiaddresses that `pack_addresses` packed.

    Raises:
        InvalidMessage: they are none
    """
    return tuple(_unpack(value, run_id) for value in values)


def _unpack(value: object, run_id: str) -> str:
    match value:
        case str():
            return value
        case [bytes() as key, bytes() as host, int() as port] if (
            len(key) in (0, 32) and len(host) in (4, 16) and 0 <= port < 2**16
        ):
            ip = ip_address(host)
            return f"/ip{ip.version}/{ip}/tcp/{port}/p2p/{id_of_key(key) if key else run_id}"
        case _:
            raise InvalidMessage("an address in an invite: neither a text nor [key, IP, port]")
