"""The documents of a data set, shard by shard. Knows nothing of tokens, samples or held-out documents.

The data set `embedded` is Python's own text: the help topics of `pydoc_data` and the sources of the standard library.
It is for demos, since peers with different versions of Python read slightly different text. With `data.format`
`messages` it is a file beside this one, of chats about Swarm. Files on this machine are found by files.py, other data
sets by hub.py.

Somebody else has written the manifest. So a peer reads only the local files that the manifest names itself, in
`data.files` or as `data.dataset`; allowed_files.py checks these names first.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from swarm_peer.config import DataSection
from swarm_peer.errors import UserError
from swarm_peer.runtime.data.files import DataFile, describe_left_out, find_data, kind_of, local_folder
from swarm_peer.runtime.data.hub import open_dataset
from swarm_peer.runtime.data.records import cut
from swarm_peer.runtime.data.shards import RecordShard, Shard, shard_of

log = logging.getLogger(__name__)

# About the size of Python's sources. The number must not depend on the version of Python.
EMBEDDED_BYTES = 9 << 20

# 148 short chats about Swarm, written by its authors: what a model answers that has learnt them can be told apart from
# what it says before.
CHATS = Path(__file__).with_name("swarm-chats.jsonl")

# Files that are looked into before a run begins. One that cannot be read should be told then, not after hours.
MOST_CHECKED = 100

# Parts of the standard library that are not read: tests, and code that is unlike prose. Topics are read from pydoc_data
# in another way. Other parts differ between machines with the same Python.
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "pydoc_data", "encodings"}
_SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")

# A data set's card that says which files there are.
_CONFIGS = re.compile(r"---\s*\n((?!---).*\n)*configs:")


def open_shards(section: DataSection, cache_dir: Path | None) -> list[Shard]:
    """Open the data set. Returns its shards, at least one, in an order that is the same for every peer.

    Raises:
        UserError: there is no such data
    """
    if section.dataset == "embedded":
        return [shard_of(_chats(), section)] if section.format == "messages" else _embedded_shards()
    folder = local_folder(section)
    if folder is None and not section.files and (here := _namesake(section.dataset)):
        raise UserError(
            f"data.dataset={section.dataset!r} is the name of a hub data set, and there is a {here} of that name here: "
            f"write ./{section.dataset} if you mean the {here}, or start this in another folder"
        )
    if _is_found_here(section):
        return [shard_of(file, section) for file in find_data(section).files]
    return open_dataset(section, folder, cache_dir)


def _namesake(dataset: str) -> str | None:
    """`folder` or `file` if one here has the name of a data set on the hub, and might be meant or read in its place."""
    if os.path.isdir(dataset):
        return "folder"  # which `datasets` would read
    return "file" if kind_of(dataset) is not None and os.path.isfile(dataset) else None


def check_shards(section: DataSection, shards: Sequence[Shard]) -> None:
    """Say which files are left out, and see that files can be read.

    Of many files some alone are looked into, and of those on the hub one. A file in a folder may be there for something
    else: where others can be read, the log names it.

    Raises:
        UserError: a file that the manifest names, or each one of a folder, has no document because of what is in it
    """
    tell_left_out(section)
    own = [shard for shard in shards if isinstance(shard, RecordShard)]
    checked = own[: 1 if own and own[0].is_remote else MOST_CHECKED]
    problems = []
    for shard in checked:
        if (found := shard.problem()) is not None:
            problems.append(found)
            if section.files or len(problems) == len(checked):
                raise problems[0]
    for problem in problems:
        log.warning("file_without_documents reason=%s", problem)


def tell_left_out(section: DataSection) -> None:
    """Say in the log which files are not read that one may expect to be.

    Raises:
        UserError: there is no such data on this machine
    """
    if _is_found_here(section):
        for line in describe_left_out(find_data(section)):
            log.warning("files_left_out %s", line)


def total_bytes(section: DataSection) -> int | None:
    """The size of the data set's files; None if they are not on this machine, since the size is not known then."""
    if section.dataset == "embedded":
        return _chats().size if section.format == "messages" else EMBEDDED_BYTES
    return sum(file.size for file in find_data(section).files) if _is_found_here(section) else None


def _is_found_here(section: DataSection) -> bool:
    """Whether files are looked for on this machine, rather than by `datasets`, which reads the cards of data sets."""
    folder = local_folder(section)
    if section.files or folder is None or section.dataset == "embedded":
        return bool(section.files)
    has_configs = os.path.isfile(folder / ".huggingface.yaml")
    with suppress(OSError):  # there is no card, or none that can be read
        has_configs = has_configs or bool(
            _CONFIGS.match((folder / "README.md").read_text(encoding="utf-8", errors="replace"))
        )
    if section.subset and not has_configs and folder.exists():
        raise UserError(
            f"data.subset={section.subset!r} is one of the configs that a data set's card has, and {section.dataset} "
            f"has no README.md with configs: leave it out"
        )
    return not has_configs


# --- embedded


def _chats() -> DataFile:
    return DataFile(str(CHATS), "json", CHATS.stat().st_size)


def _embedded_shards() -> list[Shard]:
    from pydoc_data.topics import topics

    shards: list[Shard] = [functools.partial(_documents_of, topics[name]) for name in sorted(topics)]
    shards += [functools.partial(_documents_of, path) for path in sorted(_library_sources())]
    return shards


def _library_sources() -> Iterator[Path]:
    # Skipped folders are not even listed: installed packages may have 50,000 files there.
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        names = (name for name in files if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIXES))
        yield from (Path(folder, name) for name in names)


def _documents_of(source: str | Path, offset: int = 0, stride: int = 1) -> Iterator[str]:
    text = source.read_text(encoding="utf-8", errors="replace") if isinstance(source, Path) else source
    yield from itertools.islice(cut(text), offset, None, stride)
