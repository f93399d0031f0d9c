"""The few peers that an invite names beside the coordinator, so that it opens the run also while no coordinator lives.

An address is taken from a peer's own announcement, which the peer has signed and which shows its pass. Whether others
reach it is the peer's word, too; how long it has been there is what this coordinator has seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from coordinator.run.address_files import COORDINATOR, PEERS, is_address, read_known, write_addresses
from swarm_peer.policy.view import PeerState, PeerView
from swarm_peer.runtime.network.peer_addresses import host_of, is_dialable, is_loopback, is_public

log = logging.getLogger(__name__)

# In the run's folder: for the commands that make invites.
LASTING_PEERS = "lasting-peers"
# Three will seldom vanish together with the coordinator. Each makes an invite some 60 characters longer.
MAX_NAMED = 3
# A longer name of a host would make invites long, and is nobody's.
MAX_HOST_CHARS = 64


class LastingPeers:
    """Chooses the peers that invites name, and keeps their addresses in the run's folder.

    Attributes:
        addresses: one of each chosen peer; none as long as nobody was seen that could be one
    """

    def __init__(self, output: Path):
        self._path = output / LASTING_PEERS
        self._seen_since_s: dict[str, float] = {}
        self.addresses: tuple[str, ...] = tuple(read_known(self._path)[:MAX_NAMED])
        self._written = self.addresses

    def look(
        self,
        peers: Iterable[PeerView],
        addresses_of: Callable[[str], Sequence[str]],
        *,
        own: Sequence[str],
        now_s: float,
    ) -> None:
        """Take in who is there now. If nobody is, the former addresses stay: peers may be out of sight.

        Args:
            addresses_of: the addresses that a peer announces, with its id in them, the best one first
            own: the addresses of the coordinator
        """
        usable = {peer.peer_id: address for peer in peers if (address := _usable(peer, addresses_of, own))}
        if not usable:
            return
        self._seen_since_s = {peer_id: self._seen_since_s.get(peer_id, now_s) for peer_id in usable}
        self.addresses = choose_lasting(self.addresses, usable, self._seen_since_s, own)
        if self.addresses == self._written:
            return
        try:
            write_addresses(self._path, self.addresses)
            self._written = self.addresses
        except OSError as error:  # once more at the next look
            log.warning("peers_not_kept path=%s reason=%s", self._path, error)


def addresses_to_name(folder: Path) -> list[str]:
    """The addresses for a new invite that a run's folder holds: those of its coordinator and of lasting peers."""
    addresses = [*read_known(folder / COORDINATOR), *read_known(folder / LASTING_PEERS)[:MAX_NAMED]]
    return addresses or read_known(folder / PEERS)[:MAX_NAMED]


def choose_lasting(
    known: Sequence[str], usable: Mapping[str, str], seen_since_s: Mapping[str, float], own: Sequence[str]
) -> tuple[str, ...]:
    """The addresses that invites name from now on: those named already that are still good, then those of longest.

    Peers on machines of their own come before those that share one with the coordinator or with a peer chosen already,
    since that machine may vanish as a whole.

    Args:
        known: the addresses that invites name so far
        usable: the address of each peer that may be named, by its id
        seen_since_s: since when the coordinator has seen each of them
        own: the addresses of the coordinator
    """
    chosen = [address for address in known if address in usable.values()]
    waiting = [usable[peer_id] for peer_id in sorted(usable, key=lambda peer_id: (seen_since_s[peer_id], peer_id))]
    waiting = [address for address in waiting if address not in chosen]
    while waiting and len(chosen) < MAX_NAMED:
        hosts = {host_of(address) for address in (*own, *chosen)}
        best = next((address for address in waiting if host_of(address) not in hosts), waiting[0])
        chosen.append(best)
        waiting.remove(best)
    return tuple(chosen)


def _usable(peer: PeerView, addresses_of: Callable[[str], Sequence[str]], own: Sequence[str]) -> str | None:
    """The address to name of a peer; None if newcomers would look for it in vain, or it is about to go."""
    addresses = [address for address in addresses_of(peer.peer_id) if is_address(address)]
    if peer.state is not PeerState.SERVING or not addresses:
        return None
    # Hardly any newcomer lacks IPv4.
    best = next((each for each in addresses if not each.startswith("/ip6/") and _is_far(each, own)), addresses[0])
    if all(map(is_loopback, own)):  # the whole swarm is on this machine, where nobody has to find out about routers
        return best if is_loopback(best) and peer.is_reachable is not False else None
    return best if peer.is_reachable and _is_far(best, own) else None


def _is_far(address: str, own: Sequence[str]) -> bool:
    """Whether newcomers may be sent to an address: if the run is on the internet, to public ones alone."""
    is_near = any(map(is_public, own)) and not is_public(address)
    return len(host_of(address)) <= MAX_HOST_CHARS and is_dialable(address, own) and not is_near
