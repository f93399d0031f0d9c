"""The files of this machine that a run may read: those below the folder that the machine's owner names."""

from __future__ import annotations

import os
from pathlib import Path

from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.runtime.data.corpus import find_files, local_folder


def check_data_files(manifest: RunManifest, data_dir: Path | None) -> None:
    """Check that a run reads only files that this peer's user allows: somebody else has written its manifest.

    Raises:
        UserError: the manifest names files outside of `data_dir`, or none that exist
    """
    if (path := forbidden_path(manifest, data_dir)) is not None:
        raise UserError(
            f"the run wants to read {path} on this machine: allow it with --data-dir FOLDER, or serve another stage "
            f"than 0"
        )


def forbidden_path(manifest: RunManifest, data_dir: Path | None) -> Path | None:
    """The first file outside of `data_dir` that the run's training data names; None if there is no such file.

    Raises:
        UserError: the manifest names no files that exist
    """

    def is_forbidden(path: Path) -> bool:
        return data_dir is None or not path.resolve().is_relative_to(data_dir.resolve())

    files, folder = manifest.data.files, local_folder(manifest.data)
    named = [Path(os.path.expanduser(file)) for file in files] + ([] if folder is None else [folder])
    if (forbidden := next(filter(is_forbidden, named), None)) is not None:
        return forbidden
    # Patterns may lead out of the folder through links. They are not followed before their beginnings are checked.
    return next(filter(is_forbidden, map(Path, find_files(files) if files else ())), None)
