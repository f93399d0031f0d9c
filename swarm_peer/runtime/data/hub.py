"""Data sets that `datasets` finds: those of the hub, and folders whose card says what they have.

`datasets` tells which files there are. Our readers take them from there, since those of `datasets` cast all columns to
what the first ones hold; other formats are read by `datasets`.

A peer reads no files of its machine that `datasets` would find under a name, and none outside of the data set that the
data set's own card leads to.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from swarm_peer.config import DataSection
from swarm_peer.errors import UserError
from swarm_peer.hub_waits import told_if_slow
from swarm_peer.runtime.data.files import DataFile, kind_of
from swarm_peer.runtime.data.opening import Broken
from swarm_peer.runtime.data.records import Record, no_such_field, text_of
from swarm_peer.runtime.data.shards import RecordShard, Shard, reading_failed, row_shard, shard_of

# Records to take from `datasets` at a time; one by one they come several times slower.
_READ_BATCH = 256


def open_dataset(section: DataSection, folder: Path | None, cache_dir: Path | None) -> list[Shard]:
    """Open a data set. Returns its shards, at least one.

    Args:
        folder: where it is, if that is on this machine

    Raises:
        UserError: there is none of that name, or it leads to files elsewhere
        HubFailed: the hub did not give it
    """
    import datasets

    # The hub client, pyarrow, fsspec and the file system raise errors of many classes; all mean unreadable data.
    what, is_remote = f"data.dataset={section.dataset!r}", folder is None
    try:
        cache = None if cache_dir is None else str(cache_dir)
        with told_if_slow(what) if is_remote else nullcontext():
            builder = datasets.load_dataset_builder(
                str(folder or section.dataset), name=section.subset, cache_dir=cache
            )
        data_files = {str(split): list(files) for split, files in (builder.config.data_files or {}).items()}
        _check_sources(section, folder, data_files)
        files = data_files.get(section.split, [])
        if files and _has_readers(builder, files):
            sizes = (0 if is_remote else os.path.getsize(path) for path in files)
            return [
                shard_of(DataFile(path, kind_of(path) or "text", size), section)
                for path, size in zip(files, sizes, strict=True)
            ]
        dataset = builder.as_streaming_dataset(split=section.split)
    except UserError:
        raise
    except Exception as error:
        raise reading_failed(what, error, is_remote=is_remote) from error
    count = dataset.num_shards
    shards = []
    for index in range(count):
        name = f"{what}, shard {index}"
        read = functools.partial(_streamed_records, dataset, count, index, section, is_remote)
        if section.format == "text":
            text = functools.partial(text_of, field=section.text_field, is_json=False)
            shards.append(RecordShard(name, read, text, is_remote=is_remote))
        else:
            shards.append(row_shard(name, read, section, is_remote))
    return list(shards)


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


def _has_readers(builder: Any, files: Sequence[str]) -> bool:
    """Whether records.py can read the files of a data set as its card has them read."""
    module, config = type(builder).__module__.rpartition(".")[2], builder.config
    is_plain = getattr(config, "field", None) is None and getattr(config, "encoding", None) in (None, "utf-8")
    return module in ("text", "json", "parquet", "arrow") and is_plain and all(kind_of(file) for file in files)


def _streamed_records(
    dataset: Any, num_shards: int, index: int, section: DataSection, is_remote: bool
) -> Iterator[Record]:
    num_rows = 0
    try:
        for batch in dataset.shard(num_shards, index).iter(batch_size=_READ_BATCH):
            if section.format != "text":
                rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
                yield from ((f"row {row}", 0, value) for row, value in enumerate(rows, num_rows + 1))
                num_rows += len(rows)
                continue
            if section.text_field not in batch:
                raise Broken(no_such_field(section.text_field, batch))
            texts = batch[section.text_field]
            for row, text in enumerate(texts, num_rows + 1):
                yield f"row {row}", len(text) if isinstance(text, str) else 0, text
            num_rows += len(texts)
    except (UserError, Broken):
        raise
    except Exception as error:  # see open_dataset
        raise reading_failed(f"data.dataset={section.dataset!r}", error, is_remote=is_remote) from error
