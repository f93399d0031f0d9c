"""The files of this machine that a run may read: those below the folder that the machine's owner names."""

from __future__ import annotations

import os
from pathlib import Path

from swarm_peer.config import DataSection, RunManifest
from swarm_peer.errors import UserError
from swarm_peer.runtime.data.files import Found, find_paths, local_folder
from swarm_peer.runtime.data.tokenizers import local_tokenizer

# The data_dir of somebody who has written the manifest himself: all of this machine.
ANYWHERE = Path("/")


def check_data_files(manifest: RunManifest, data_dir: Path | None, *, reads_tokenizer: bool = True) -> None:
    """Check that a run reads only files that this peer's user allows: somebody else has written its manifest.

    Args:
        reads_tokenizer: whether it reads the tokenizer that the manifest names

    Raises:
        UserError: the manifest names files outside of `data_dir`, or none that exist
    """
    if (path := forbidden_path(manifest, data_dir, reads_tokenizer=reads_tokenizer)) is not None:
        raise UserError(
            f"the run wants to read {path.resolve()} on this machine: allow it with --data-dir FOLDER, which is that "
            f"folder or one above it, or serve another stage than 0"
        )


def local_data_folder(manifest: RunManifest) -> Path | None:
    """A folder of this machine that holds what the run reads first; None if its peers need no files of their machines.

    A tokenizer that members give, with the weights of a frozen base, is none of these.

    Raises:
        UserError: the manifest names no files that exist
    """
    model = manifest.model
    is_given = model.base_sha256 is not None and manifest.data.tokenizer == model.pretrained
    path = forbidden_path(manifest, None, reads_tokenizer=not is_given)
    if path is None:
        return None
    return path.resolve() if path.is_dir() else path.resolve().parent


def forbidden_path(manifest: RunManifest, data_dir: Path | None, *, reads_tokenizer: bool = True) -> Path | None:
    """The first file outside of `data_dir` that the run's training data or tokenizer names; None if there is none.

    Args:
        reads_tokenizer: see check_data_files

    Raises:
        UserError: the manifest names no files that exist
    """

    def is_forbidden(path: Path) -> bool:
        return not is_within(path, data_dir)

    files = manifest.data.files
    folders = (local_folder(manifest.data), local_tokenizer(manifest.data) if reads_tokenizer else None)
    named = [Path(os.path.expanduser(file)) for file in files] + [folder for folder in folders if folder is not None]
    if (forbidden := next(filter(is_forbidden, named), None)) is not None:
        return forbidden
    # Patterns may lead out of the folder through links. They are not followed before their beginnings are checked.
    return next(filter(is_forbidden, map(Path, find_paths(files, Found()))), None)


def check_tokenizer(section: DataSection, data_dir: Path | None) -> None:
    """Check that a run's tokenizer, if it is a folder of this machine, lies below `data_dir`.

    Raises:
        UserError: it does not
    """
    folder = local_tokenizer(section)
    if folder is not None and not is_within(folder, data_dir):
        raise UserError(
            f"the run wants to read the tokenizer {folder.resolve()} on this machine: allow it with --data-dir FOLDER, "
            f"which is that folder or one above it"
        )


def is_within(path: Path, data_dir: Path | None) -> bool:
    """Whether a path leads to what lies below the folder that the machine's owner names, links followed."""
    return data_dir is not None and path.resolve().is_relative_to(data_dir.resolve())
