"""The peers of this user that run on this machine, and what their owner has told them: small files in one folder.

`swarm-peer pause` and `resume` write and read them; a peer looks at its own twice a second. The folder is its owner's
alone, and what was said outlives the peer: one that was paused and is started again stays paused.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from swarm_peer.errors import UserError
from swarm_peer.files import OWNER, replace_file
from swarm_peer.runtime.host.identities import locked, state_folder

log = logging.getLogger(__name__)

# The last characters of an id that tell it from others.
FEWEST_CHARACTERS = 4


def running_folder() -> Path:
    """The folder of this user's peers on this machine; several machines may share a home."""
    return state_folder() / f"peers-{socket.gethostname()}"


@dataclass(frozen=True, kw_only=True)
class RunningPeer:
    """A peer as it shows itself to its owner.

    Attributes:
        run: the name of its run
        state: as it announces it
        note: why it does not serve, in words
        is_at_rest: whether it is paused, has handed over its work and has freed its memory
        left_alone: what becomes of the run, where it has left a stage that nobody else serves; else empty
    """

    peer_id: str
    name: str
    run: str
    stage: int
    state: str
    note: str
    is_at_rest: bool
    left_alone: str = ""
    pid: int = field(default_factory=os.getpid)

    @property
    def who(self) -> str:
        """The peer as people call it."""
        return f"{self.name or 'peer'} (…{self.peer_id[-8:]}) of run {self.run}"


class PeerFiles:
    """The files of one running peer, made by `shown`."""

    def __init__(self, folder: Path, peer_id: str):
        self._about = folder / f"{peer_id}.json"
        self._paused = folder / f"{peer_id}.paused"
        self._shown: RunningPeer | None = None

    def show(self, about: RunningPeer) -> None:
        """Write down what is true of the peer now, if anything has changed. May block."""
        if about != self._shown:
            self._shown = about
            try:
                replace_file(self._about, json.dumps(asdict(about)), mode=OWNER)
            except OSError as error:
                log.warning("not_kept path=%s reason=%s", self._about, error.strerror)

    def is_told_to_pause(self) -> bool:
        """Whether the owner has said so, and has not taken it back. May block."""
        return self._paused.exists()


@contextmanager
def shown(folder: Path, peer_id: str) -> Iterator[PeerFiles | None]:
    """The files of a peer that runs for as long as the context is open.

    None, with a line in the log, if there can be none: nobody can pause the peer from another shell then.
    """
    try:
        lock = locked(folder, peer_id)
    except OSError as error:
        log.warning("cannot_be_paused folder=%s reason=%s", folder, error.strerror)
        yield None
        return
    if lock is None:
        log.warning("cannot_be_paused folder=%s reason=another process runs with the same identity", folder)
        yield None
        return
    with closing(lock):
        try:
            yield PeerFiles(folder, peer_id)
        finally:
            (folder / f"{peer_id}.json").unlink(missing_ok=True)


def running_peers(folder: Path) -> list[RunningPeer]:
    """The peers that run, by name and id. Those of which the machine has lost power are not among them."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            if (lock := locked(folder, path.stem)) is not None:  # its process is gone
                lock.close()
                continue
            found.append(RunningPeer(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):  # it is ending, or is of another version
            continue
    return sorted(found, key=lambda peer: (peer.name, peer.peer_id))


def chosen(peers: Sequence[RunningPeer], names: Sequence[str]) -> list[RunningPeer]:
    """Those that are named, by their name or the end of their id; all if none is named.

    Raises:
        UserError: none is running, or none has such a name
    """
    if not peers:
        raise UserError("no peer of this user is running on this machine, or it has no place with the others yet")
    if not names:
        return list(peers)
    for name in names:
        if not any(_is_called(peer, name) for peer in peers):
            raise UserError(f"no peer {name} is running here; there are {', '.join(peer.who for peer in peers)}")
    return [peer for peer in peers if any(_is_called(peer, name) for name in names)]


def _is_called(peer: RunningPeer, name: str) -> bool:
    return name == peer.name or (len(name) >= FEWEST_CHARACTERS and peer.peer_id.endswith(name))


def tell(folder: Path, peer: RunningPeer, *, is_paused: bool) -> None:
    """Tell a peer to pause, or no longer to.

    Raises:
        OSError: the file cannot be written
    """
    path = folder / f"{peer.peer_id}.paused"
    if is_paused:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, OWNER))
    else:
        path.unlink(missing_ok=True)
