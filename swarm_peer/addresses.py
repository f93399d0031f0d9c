"""Addresses as people write them, HOST:PORT, and as libp2p takes them, as multiaddresses. Asks no network."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from ipaddress import ip_address

from swarm_peer.errors import UserError

_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z.-]{1,253}):([0-9]{1,5})")
_NAME = re.compile(r"[0-9A-Za-z.-]{1,253}")
_HOST_ALONE = re.compile("/[^/]+/[^/]+")
_PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{40,64}")
# Where a process listens that is told nothing else. A machine without IPv6 leaves out the second one.
EVERYWHERE = ("/ip4/0.0.0.0", "/ip6/::")
_HINT = "expected one such as /ip4/1.2.3.4/tcp/31337 or host.example.org:31337"


def multiaddress(text: str) -> str:
    """The multiaddress of HOST:PORT, where HOST is a name, an IPv4 address or an IPv6 address in brackets.

    A text that begins with a slash is taken for a multiaddress and returned as it is.

    Raises:
        UserError: it is neither, or no such port exists
    """
    if text.startswith("/"):
        return text
    match = _HOST_AND_PORT.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r} is no address: {_HINT}")
    host, port = match[1].strip("[]"), int(match[2])
    if port > 65535:
        raise UserError(f"{text!r}: there is no port {port}; the highest is 65535")
    try:
        return f"/ip{ip_address(host).version}/{host}/tcp/{port}"
    except ValueError:
        if re.fullmatch(r"[0-9.]+|.*:.*", host):
            raise UserError(f"{text!r}: {host} is no IP address: {_HINT}") from None
        return f"/dns/{host}/tcp/{port}"


def own_address(text: str) -> str:
    """The multiaddress to listen on, of HOST:PORT or of HOST alone, which leaves the port open.

    Raises:
        UserError: see multiaddress
    """
    try:
        return f"/ip{ip_address(text.strip('[]')).version}/{text.strip('[]')}"
    except ValueError:
        return multiaddress(text)


def announced_address(text: str) -> str:
    """The multiaddress to announce, of HOST:PORT or of HOST alone, which leaves out the port.

    Raises:
        UserError: see multiaddress
    """
    if _NAME.fullmatch(text) and not re.fullmatch("[0-9.]+", text):
        return f"/dns/{text}"
    return own_address(text)


def announced_addresses(texts: Sequence[str], ports: Sequence[int]) -> list[str]:
    """The multiaddresses to announce; a host alone takes the ports that are listened on.

    Raises:
        UserError: see multiaddress
    """
    addresses = map(announced_address, texts)
    ported = [[f"{each}/tcp/{port}" for port in ports] if _HOST_ALONE.fullmatch(each) else [each] for each in addresses]
    return list(itertools.chain(*ported))


def peer_address(text: str) -> str:
    """The multiaddress, with peer id, of a peer to dial; from a multiaddress or from HOST:PORT/ID.

    Raises:
        UserError: it is neither; without an id libp2p dials nobody, since it could not tell who answers
    """
    where, _, peer_id = text.rpartition("/p2p/" if text.startswith("/") else "/")
    if not where or _PEER_ID.fullmatch(peer_id) is None:
        try:
            where = multiaddress(where or peer_id).rstrip("/")
        except UserError as error:
            raise UserError(
                f"{text!r} is no address of a peer: expected one such as /ip4/1.2.3.4/tcp/31337/p2p/12D3Koo... or "
                f"host.example.org:31337/12D3Koo...; copy the whole line that the coordinator prints"
            ) from error
        raise UserError(
            f"{text!r} does not say who listens there: it lacks /p2p/ and the peer's id, as in {where}/p2p/12D3Koo...; "
            f"copy the whole line that the coordinator prints"
        )
    return f"{multiaddress(where)}/p2p/{peer_id}"


def check_own_addresses(host_maddrs: tuple[str, ...], announce_maddrs: tuple[str, ...]) -> None:
    """Check where a process is to listen, and what it is to announce.

    Raises:
        UserError: an option has no value, a name is to be listened on, port 0 is to be announced, or a host alone
            where any port may be listened on
    """
    if not host_maddrs:
        raise UserError("--host-maddrs needs a value: an address to listen on, such as 0.0.0.0:31337")
    for value in host_maddrs:
        if own_address(value).startswith("/dns"):
            raise UserError(f"--host-maddrs {value}: listen on an IP address, such as 0.0.0.0, and announce the name")
    for value in announce_maddrs:
        announced = announced_address(value)
        if "/tcp/0/" in f"{announced}/":
            raise UserError(f"--announce-maddrs {value}: nobody can dial port 0; name the port that is forwarded")
        if _HOST_ALONE.fullmatch(announced) and any("/tcp/0/" in f"{own_address(own)}/" for own in host_maddrs):
            raise UserError(f"--announce-maddrs {value}: name a port, since --host-maddrs leaves it to the system")


def check_metrics_place(host: str, port: int | None) -> None:
    """Check that metrics which are to be shown at an address have a port there.

    Raises:
        UserError: they have none
    """
    if port is None and host != "127.0.0.1":
        raise UserError(
            f"--metrics-host {host}: no metrics are served without --metrics-port: name a port, such as 9464"
        )
