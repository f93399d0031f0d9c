"""Files of addresses: where a coordinator listens, and where its peers listened when it last saw them."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path

from swarm_peer.errors import UserError
from swarm_peer.files import ANYBODY, OWNER, replace_file
from swarm_peer.runtime.network.guarded_p2p import check_peer_address
from swarm_peer.runtime.network.peer_addresses import is_tcp_address

log = logging.getLogger(__name__)

# Enough to find the run again: some peers are gone when a coordinator comes back, and others cannot be dialled.
MAX_KNOWN = 32
# In the run's folder: where its coordinator listens, and where its peers do.
COORDINATOR = "coordinator"
PEERS = "peers"


def write_addresses(path: Path, addresses: Sequence[str], *, is_secret: bool = False) -> None:
    """Replace the addresses in a file at once: a reader finds all of the new ones, or all of the old ones.

    Args:
        is_secret: an invite is among them, so nobody but the file's owner may read it
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "\n".join(addresses) + "\n", mode=OWNER if is_secret else ANYBODY)


def read_known(path: Path) -> list[str]:
    """The addresses in a file of the run's folder, those that are malformed left out; none if it is not there.

    Raises:
        UserError: the file cannot be read
    """
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}, the addresses of the run's peers: {error}") from error
    return [line for line in lines if is_address(line)]


class KnownPeers:
    """The addresses of a run's peers, kept in the run's folder: through them its coordinator finds the run again."""

    def __init__(self, output: Path):
        self._path = output / PEERS
        self._kept: set[str] = set()

    def read(self) -> list[str]:
        """The addresses that were kept, as read_known reads them."""
        return read_known(self._path)

    def keep(self, addresses: Sequence[str]) -> None:
        """Keep some of these, at random. If there are none, the former ones stay: peers may be out of sight."""
        if addresses and set(addresses) != self._kept:
            try:
                write_addresses(self._path, random.sample(addresses, min(MAX_KNOWN, len(addresses))))
            except OSError as error:
                log.warning("peers_not_kept path=%s reason=%s", self._path, error)
                return
            self._kept = set(addresses)


def is_address(line: str) -> bool:
    """Whether a line is an address. It came from peers; a malformed one would keep the coordinator from starting."""
    try:
        return is_tcp_address(line, check_peer_address(line))
    except UserError:
        return False
