"""The run's key, for commands that only its holder may give."""

from __future__ import annotations

from pathlib import Path

from coordinator.watch.run_file import read_run_file
from swarm_peer.errors import UserError
from swarm_peer.wire.identity import Identity

# In the run's folder.
KEY = "identity"


def run_key_of(folder: Path, path: Path | None = None) -> Identity:
    """The key of the run that writes to a folder.

    Args:
        path: the key's file, where it is not in the folder

    Raises:
        UserError: it is not there, or it is another run's
    """
    path = path or folder / KEY
    if not path.is_file():
        raise UserError(
            f"{path} is not there: only the run's key allows this, which serve keeps in OUTPUT/identity; name it with "
            f"--identity-path if it is elsewhere (a run of local, which is for this machine, has none)"
        )
    key = Identity.from_file(path)
    if read_run_file(folder).get("run_id") not in (None, key.peer_id):
        raise UserError(
            f"{path} is not the key of the run in {folder}: name the folder of its own run, or the right key"
        )
    return key
