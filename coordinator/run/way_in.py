"""The line with which peers join a run, told anew when the addresses in it change."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from coordinator.run.address_files import COORDINATOR, write_addresses
from coordinator.run.invites import InviteBook
from swarm_peer.config import RunManifest
from swarm_peer.runtime.data.allowed_files import local_data_folder
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.peer_addresses import host_of, is_loopback, is_public, ports_of
from swarm_peer.wire.identity import Identity

NOT_PUBLIC = (
    "This machine has no public address of its own, so this line works in its own network alone. For others, begin "
    "again with --announce-maddrs HOST: the address of the cloud or router that hands TCP port {port} on to it.\n"
)
IP6_ALONE = (
    "This machine has a public address of IPv6 alone, so this line works on machines that have IPv6, as far as router "
    "and firewall let TCP port {port} through. For others, begin again with --announce-maddrs HOST '[{host}]', where "
    "HOST is the IPv4 address of the cloud or router that hands TCP port {port} on to it.\n"
)

LOCAL_FILES = (
    "On another machine, --data-dir is the folder there that has the run's files. A peer of any stage but 0 may "
    "leave it out, unless the weights to begin with are among them.\n"
)


class WayIn:
    """Tells how peers join: on the terminal, and in files.

    Attributes:
        line: the command of a machine that joins; empty until it has been told
    """

    def __init__(
        self,
        *,
        dht: SwarmDHT,
        manifest: RunManifest,
        run_key: Identity,
        output: Path,
        address_file: Path | None,
        is_announced: bool,
        say: Callable[[str], None],
    ):
        """Make a way in that nobody has been told of.

        Args:
            output: the run's folder
            address_file: written as well, if the operator wants it
            is_announced: whether the operator has named the addresses
            say: prints a text
        """
        self.line = ""
        self._dht = dht
        self._is_private = manifest.admission == "invite"
        folder = local_data_folder(manifest)
        self._data_dir = "" if folder is None else f" --data-dir {shlex.quote(str(folder))}"
        self._run_key = run_key
        self._output = output
        self._address_file = address_file
        self._is_announced = is_announced
        self._say = say
        self._told: tuple[list[str], tuple[str, ...]] = ([], ())
        self._printed: tuple[list[str], tuple[str, ...]] = ([], ())

    def tell(self, peers: Sequence[str]) -> None:
        """Tell it, if the coordinator or the peers to name have other addresses than those told last.

        Files and page have each change. The terminal has those after which the line printed last is no longer good.

        Args:
            peers: addresses of peers that live on while no coordinator does
        """
        told = own, peers = self._dht.addresses, tuple(peers)
        book = InviteBook(self._output)
        has_lapsed = self._has_lapsed(book)
        if told == self._told and not has_lapsed:
            return
        moved, news = own != self._printed[0], ""
        addresses = [*own, *peers]
        invites = [book.standing(self._run_key, addresses).text()] if self._is_private else addresses
        self.line = f"swarm-peer --stage auto --initial-peers {' '.join(invites)}{self._data_dir}"
        if has_lapsed or is_worth_printing(told, self._printed):
            if has_lapsed:
                news = "The invite above holds no longer. "
            elif self._printed[0]:
                news = "The coordinator has other addresses now. " if moved else "There are other peers to name now. "
            self._printed = told
            while_ = ", as long as the coordinator or one of the peers named lives" if peers else ""
            self._say(f"{news}Peers join with{while_}:\n\n  {self.line}\n")
            if self._data_dir:
                self._say(LOCAL_FILES)
        if moved and not self._is_announced and not all(map(is_loopback, own)):
            public = [address for address in own if is_public(address)]
            if not public:
                self._say(NOT_PUBLIC.format(port=ports_of(own)[0]))
            elif all(address.startswith("/ip6/") for address in public):
                self._say(IP6_ALONE.format(port=ports_of(own)[0], host=host_of(public[0])))
        write_addresses(self._output / COORDINATOR, own)
        if self._address_file is not None:
            write_addresses(self._address_file, invites, is_secret=self._is_private)
        self._told = told  # not earlier: what a full disk has not taken is written at the next look

    def _has_lapsed(self, book: InviteBook) -> bool:
        """Whether the invite in the line holds no longer: its operator may have revoked it."""
        return self._is_private and bool(self.line) and book.kept(self._run_key) is None


def is_worth_printing(told: tuple[list[str], tuple[str, ...]], printed: tuple[list[str], tuple[str, ...]]) -> bool:
    """Whether the coordinator has moved, or the line printed last names fewer than half of the peers that it could.

    Args:
        told, printed: the addresses of the coordinator, and of peers
    """
    (own, peers), (own_then, peers_then) = told, printed
    return own != own_then or 2 * len(set(peers).intersection(peers_then)) < len(peers)
