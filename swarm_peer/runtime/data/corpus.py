"""The documents of a data set, shard by shard. Knows nothing of tokens, samples or held-out documents.

The data set `embedded` is Python's own text: the help topics of `pydoc_data` and the sources of the standard library.
It is for demos, since peers with different versions of Python read slightly different text. In `text` files a document
is a paragraph. In `json` and `parquet` files and in hub data sets a document is the text field of an example. Documents
of more than MAX_DOCUMENT_CHARS are cut into several at line ends.

Somebody else has written the manifest. So a peer reads only the local files that the manifest names itself, in
`data.files` or as a folder in `data.dataset`; allowed_files.py checks these names first. A peer reads no other files
that `datasets` would find under a name, and none outside of the data set that the data set's own card leads to.
"""

from __future__ import annotations

import functools
import glob
import itertools
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm_peer.config import DataSection, looks_like_a_path
from swarm_peer.errors import HubFailed, UserError, first_line

# A longer document is cut: a whole book would defeat the shuffling and take seconds to tokenize.
MAX_DOCUMENT_CHARS = 1 << 16

# About the size of Python's sources. The number must not depend on the version of Python.
EMBEDDED_BYTES = 9 << 20

# Examples to take from `datasets` at a time; one by one they come several times slower.
_READ_BATCH = 256

# Parts of the standard library that are not read: tests, and code that is unlike prose. Topics are read from pydoc_data
# in another way. Other parts differ between machines with the same Python.
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "pydoc_data", "encodings"}
_SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")

# Reads the documents of a shard, from the beginning at each call.
Shard = Callable[[], Iterator[str]]


def open_shards(section: DataSection, cache_dir: Path | None) -> list[Shard]:
    """Open the data set. Returns its shards, at least one, in an order that is the same for every peer."""
    if section.dataset == "embedded":
        return _embedded_shards()
    dataset = _load_dataset(section, cache_dir)
    count = dataset.num_shards
    return [functools.partial(_read_shard, dataset, count, index, section) for index in range(count)]


def total_bytes(section: DataSection) -> int | None:
    """The size of the data set's files; None if the manifest names no files, since the size is not known then."""
    if section.dataset == "embedded":
        return EMBEDDED_BYTES
    return sum(os.path.getsize(path) for path in find_files(section.files)) if section.files else None


def local_folder(section: DataSection) -> Path | None:
    """The folder on this machine that `data.dataset` names, if any. Only the form of the name decides this."""
    name = section.dataset
    is_path = looks_like_a_path(name) and not name.startswith("hf://")
    return Path(os.path.expanduser(name)) if is_path else None


def _load_dataset(section: DataSection, cache_dir: Path | None) -> Any:
    import datasets

    folder = local_folder(section)
    if folder is None and not section.files and os.path.isdir(section.dataset):  # `datasets` would read this folder
        raise UserError(
            f"data.dataset={section.dataset!r} is the name of a hub data set, and there is a folder of that name here: "
            f"write ./{section.dataset} if you mean the folder, or start the peer from another folder"
        )
    arguments: dict[str, Any] = {"cache_dir": cache_dir}
    if section.files:
        # `datasets` takes the names of files for patterns, too, so brackets in a name must be escaped.
        arguments["data_files"] = {section.split: [glob.escape(path) for path in find_files(section.files)]}
        if section.dataset == "text":
            arguments["sample_by"] = "paragraph"
    else:
        arguments["name"] = section.subset
    # The hub client, pyarrow, fsspec and the file system raise errors of many classes; all mean unreadable data.
    try:
        builder = datasets.load_dataset_builder(str(folder or section.dataset), **arguments)
        if not section.files:
            _check_sources(section, folder, builder.config.data_files or {})
        return builder.as_streaming_dataset(split=section.split)
    except UserError:
        raise
    except Exception as error:
        raise _cannot_read(section, error) from error


def _check_sources(section: DataSection, folder: Path | None, files: Mapping[str, Sequence[str]]) -> None:
    """Check that the files of a data set are its own. Its card may name files in any place.

    Raises:
        UserError: the card names a file outside of the data set
    """
    for file in itertools.chain.from_iterable(files.values()):
        if folder is None:
            is_its_own = file.startswith("hf://")
        else:
            is_its_own = "://" not in file and Path(file).resolve().is_relative_to(folder.resolve())
        if not is_its_own or "::" in file:
            raise UserError(
                f"data.dataset={section.dataset!r} leads to {file}, outside of that data set: choose another one, or "
                f"name its files in data.files"
            )


def _cannot_read(section: DataSection, error: Exception) -> UserError:
    what = f"data.dataset={section.dataset!r}" + (f", files={list(section.files)}" if section.files else "")
    text = f"cannot read {what}: {first_line(error)}; "
    if section.files or local_folder(section) is not None:
        return UserError(f"{text}check the files")
    return HubFailed(
        f"{text}check its name, subset and split, and the connection to the hub (a local folder begins with ./)"
    )


def find_files(patterns: tuple[str, ...]) -> list[str]:
    """The files that the patterns name, without empty ones, for which `datasets` would raise StopIteration.

    Raises:
        UserError: a pattern names no file, or all files are empty
    """
    found = []
    for pattern in patterns:
        paths = [path for path in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path)]
        if not paths:
            raise UserError(f"data.files: {pattern!r} names no file on this machine: correct it, or put the file there")
        found += paths
    files = [path for path in sorted(set(found)) if os.path.getsize(path)]
    if not files:
        raise UserError(f"data.files: all of {list(patterns)} are empty: add text")
    return [os.path.abspath(path) for path in files]


def _read_shard(dataset: Any, num_shards: int, index: int, section: DataSection) -> Iterator[str]:
    field = section.text_field
    try:
        for batch in dataset.shard(num_shards, index).iter(batch_size=_READ_BATCH):
            if field not in batch:
                raise UserError(
                    f"data.text_field={field!r} is no field of {section.dataset!r}: it has {', '.join(sorted(batch))}; "
                    f"choose one of them"
                )
            for text in batch[field]:
                if isinstance(text, str):
                    yield from _cut(text)
                elif text is not None:
                    raise UserError(
                        f"data.text_field={field!r} of {section.dataset!r} holds {type(text).__name__}, not text: "
                        f"choose a field that holds text"
                    )
    except UserError:
        raise
    except Exception as error:  # see _load_dataset
        raise _cannot_read(section, error) from error


def _embedded_shards() -> list[Shard]:
    from pydoc_data.topics import topics

    shards: list[Shard] = [functools.partial(_cut, topics[name]) for name in sorted(topics)]
    shards += [functools.partial(_read_source, path) for path in sorted(_library_sources())]
    return shards


def _library_sources() -> Iterator[Path]:
    # Skipped folders are not even listed: installed packages may have 50,000 files there.
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        names = (name for name in files if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIXES))
        yield from (Path(folder, name) for name in names)


def _read_source(path: Path) -> Iterator[str]:
    yield from _cut(path.read_text(encoding="utf-8", errors="replace"))


def _cut(text: str) -> Iterator[str]:
    """Cut a text into pieces of at most MAX_DOCUMENT_CHARS, at line ends where possible. Blank pieces are left out."""
    start = 0
    while start < len(text):
        end = start + MAX_DOCUMENT_CHARS
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        piece = text[start:end]
        if not piece.isspace():
            yield piece
        start = end
