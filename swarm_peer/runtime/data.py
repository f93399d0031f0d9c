"""Training samples and held-out samples of a run: text from a data set, as windows of token ids.

Owns the order in which a stage-0 peer reads the data, what is held out for validation, and how documents become
samples. It knows nothing of microbatches, steps or other peers: each stage-0 peer reads a stream of its own, in an
order that follows from the run's seed and the stream's id alone.

Documents. `embedded` is Python's own: the help topics of `pydoc_data` and the standard library's sources (so peers
with different Python versions read slightly different text: for demos). In `text` files a document is a paragraph. In
`json` and `parquet` files and in hub data sets it is an example's text field. Documents beyond MAX_DOCUMENT_CHARS are
cut into several at line ends.

Order. A data set is a list of shards (its files). Streaming cannot seek inside a file, so a pass over the data is
made of slices: shard i, every n-th document from the k-th. With few shards n is larger, so that there are at least
MIN_SLICES slices, and two peers that read the same single file seldom read the same part of it at the same time. What
it costs is reading a small data set up to MIN_SLICES times in a pass: some tens of bytes a token, where an activation
takes kilobytes. The slices of a pass come in random order, their documents through a shuffle buffer, and so do the
samples made of them: the many windows of one long document would make a poor global batch.

Held out. The documents considered are the first of each shard (VALIDATION_WINDOW for each document wanted; of at most
VALIDATION_SHARDS shards where they are long, in an order drawn from the seed); those with the smallest hash under the
run's seed are held out. They are known by their content, so every peer finds the same ones and a stream passes over
them wherever they turn up, duplicates included. At most a tenth of the documents considered is held out.

Samples. The tokens of all documents, each followed by the separator, form one sequence; it is cut into windows of T+1
tokens, of which successive ones share one token: the last of the one is the first of the next, so every token but the
very first is predicted exactly once.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import itertools
import math
import os
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from swarm_peer.config import DataSection, RunManifest
from swarm_peer.errors import UserError
from swarm_peer.runtime.tokenizers import Tokenizer, first_line, load_tokenizer

Item = TypeVar("Item")

__all__ = ["SampleStream", "Tokenizer", "load_tokenizer", "validation_samples"]

# A longer document is cut: a book in one piece would defeat the shuffling and take seconds to tokenize.
MAX_DOCUMENT_CHARS = 1 << 16

# Two peers begin a pass with the same slice of a single file in one case of 16.
MIN_SLICES = 16

# Documents considered for each one held out: enough that the choice is spread, few enough to stream at every start.
VALIDATION_WINDOW = 16

# Opening a remote file takes about a second.
VALIDATION_SHARDS = 8

# Examples fetched from `datasets` at a time; its per-example path is several times slower.
_READ_BATCH = 256

# Of the standard library: tests and what is not prose-like code; pydoc_data is read as topics; the others differ
# between machines with the same Python.
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "pydoc_data", "encodings"}
_SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")

Shard = Callable[[], Iterator[str]]  # reads the shard's documents, anew at each call


class SampleStream:
    """Endless iterator of samples, arrays of int32 of shape (T+1,).

    The same manifest and `stream_id` give the same samples again, bitwise (with the same data and the same version
    of the tokenizer). A peer that starts anew and wants text that it has not seen yet puts what has changed, such as
    the global step, into its `stream_id`.

    Nothing is read before the first sample is taken. A call may block on the disk or the network, for seconds when
    the shuffle buffer fills; one thread at a time.

    Args:
        manifest: the run
        stream_id: any string; the peer id, for a peer's own stream
        cache_dir: where files from the hub are kept
        tokenizer: loaded from the manifest if not given

    Raises:
        UserError: from `next`: the data or the tokenizer cannot be read, or hold no text to train on
    """

    def __init__(
        self,
        manifest: RunManifest,
        stream_id: str,
        cache_dir: Path | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        self._manifest = manifest
        self._stream_id = stream_id
        self._cache_dir = cache_dir
        self._tokenizer = tokenizer
        self._samples: Iterator[np.ndarray] | None = None

    def __iter__(self) -> SampleStream:
        return self

    def __next__(self) -> np.ndarray:
        if self._samples is None:
            tokenizer = self._tokenizer or _tokenizer_of(self._manifest, self._cache_dir)
            data = self._manifest.data
            windows = _pack(self._documents(), tokenizer, data.sequence_length)
            rng = random.Random(f"{self._manifest.seed}/samples/{self._stream_id}")
            self._samples = _shuffled(windows, data.shuffle_buffer, rng)
        try:
            return next(self._samples)
        except UserError:
            self._samples = None  # a generator that has raised only says StopIteration from then on
            raise

    def _documents(self) -> Iterator[str]:
        """Documents to train on, pass after pass, each in another order."""
        data, seed = self._manifest.data, self._manifest.seed
        shards = _open_shards(data, self._cache_dir)
        held_out = _held_out(data, seed, self._cache_dir)
        for number in itertools.count():
            rng = random.Random(f"{seed}/{number}/{self._stream_id}")
            is_empty = True
            for text in _shuffled(_one_pass(shards, rng), data.shuffle_buffer, rng):
                if _fingerprint(text, seed) not in held_out:
                    is_empty = False
                    yield text
            if is_empty:
                raise UserError(
                    f"data.dataset={data.dataset!r} has no text but what is held out for validation: add text"
                )


def validation_samples(
    manifest: RunManifest, num_samples: int, cache_dir: Path | None = None, tokenizer: Tokenizer | None = None
) -> np.ndarray:
    """Samples that no SampleStream of the run yields, the same for every peer, int32 of shape (N, T+1).

    They are spread evenly over the held-out documents, so that more or fewer of them sample the same text. N is
    `num_samples`, or as many as the held-out text has.

    Raises:
        UserError: the data or the tokenizer cannot be read, or the held-out text is too short for one sample
    """
    data = manifest.data
    documents = list(_held_out(data, manifest.seed, cache_dir).values())
    samples = samples_of(manifest, documents, num_samples, cache_dir, tokenizer)
    if samples is None:
        raise UserError(
            f"the {len(documents)} documents held out for validation are too short for one sample of "
            f"data.sequence_length={data.sequence_length}: raise data.validation_documents (now "
            f"{data.validation_documents}), add text, or shorten the sequences"
        )
    return samples


def samples_of(
    manifest: RunManifest,
    documents: Iterable[str],
    num_samples: int,
    cache_dir: Path | None = None,
    tokenizer: Tokenizer | None = None,
) -> np.ndarray | None:
    """At most `num_samples` samples, spread evenly over these documents: int32 of shape (N, T+1); None if too short.

    Raises:
        UserError: the tokenizer cannot be loaded
    """
    tokenizer = tokenizer or _tokenizer_of(manifest, cache_dir)
    windows = list(_pack(documents, tokenizer, manifest.data.sequence_length))
    if not windows:
        return None
    count = min(num_samples, len(windows))
    return np.stack([windows[i * len(windows) // count] for i in range(count)])


def _tokenizer_of(manifest: RunManifest, cache_dir: Path | None) -> Tokenizer:
    return load_tokenizer(manifest.data, _vocab_size(manifest), cache_dir)


def _vocab_size(manifest: RunManifest) -> int:
    config = manifest.model.config
    if isinstance(config, dict) and isinstance(config.get("vocab_size"), int):
        return int(config["vocab_size"])
    from swarm_peer.model.architecture import parse_model_config, resolve_model_config

    return int(parse_model_config(resolve_model_config(manifest.model)).vocab_size)


# --- from documents to samples


def _pack(documents: Iterable[str], tokenizer: Tokenizer, length: int) -> Iterator[np.ndarray]:
    tokens: list[int] = []
    for text in documents:
        tokens += tokenizer.encode(text)
        tokens.append(tokenizer.separator_id)
        start = 0
        while len(tokens) - start > length:
            yield np.array(tokens[start : start + length + 1], dtype=np.int32)
            start += length
        del tokens[:start]


def _one_pass(shards: list[Shard], rng: random.Random) -> Iterator[str]:
    stride = math.ceil(MIN_SLICES / len(shards))
    slices = [(shard, offset) for shard in shards for offset in range(stride)]
    rng.shuffle(slices)
    for shard, offset in slices:
        yield from itertools.islice(shard(), offset, None, stride)


def _shuffled(documents: Iterable[Item], size: int, rng: random.Random) -> Iterator[Item]:
    buffer: list[Item] = []
    for text in documents:
        if len(buffer) < size:
            buffer.append(text)
            continue
        index = rng.randrange(size)
        yield buffer[index]
        buffer[index] = text
    rng.shuffle(buffer)
    yield from buffer


def _fingerprint(text: str, seed: int) -> bytes:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16, key=seed.to_bytes(8, "big")).digest()


@functools.lru_cache(maxsize=1)  # a stage-0 peer needs it twice, and it may mean opening remote files
def _held_out(section: DataSection, seed: int, cache_dir: Path | None) -> dict[bytes, str]:
    """The documents held out, by fingerprint."""
    shards = _open_shards(section, cache_dir)
    random.Random(f"{seed}/validation").shuffle(shards)
    wanted = section.validation_documents * VALIDATION_WINDOW
    share = math.ceil(wanted / min(len(shards), VALIDATION_SHARDS))
    first_of_each = (itertools.islice(shard(), share) for shard in shards)
    documents = itertools.islice(itertools.chain.from_iterable(first_of_each), wanted)
    candidates = {_fingerprint(text, seed): text for text in documents}
    if len(candidates) < 2:
        raise UserError(
            f"data.dataset={section.dataset!r} has {len(candidates) or 'no'} distinct document: one is needed to train "
            f"on and one to hold out for validation; add text, or cut it into paragraphs"
        )
    count = min(section.validation_documents, max(1, len(candidates) // 10))
    return {key: candidates[key] for key in sorted(candidates)[:count]}


# --- from data sets to documents


def _open_shards(section: DataSection, cache_dir: Path | None) -> list[Shard]:
    """The data set's shards in an order that is the same for every peer; at least one."""
    if section.dataset == "embedded":
        return _embedded_shards()
    dataset = _load_dataset(section, cache_dir)
    count = dataset.num_shards
    return [functools.partial(_read_shard, dataset, count, index, section) for index in range(count)]


def _load_dataset(section: DataSection, cache_dir: Path | None) -> Any:
    import datasets

    arguments: dict[str, Any] = {"split": section.split, "streaming": True, "cache_dir": cache_dir}
    if section.files:
        arguments["data_files"] = {section.split: _find_files(section.files)}
        if section.dataset == "text":
            arguments["sample_by"] = "paragraph"
    else:
        arguments["name"] = section.subset
    # The hub client, pyarrow, fsspec and the file itself fail in their own ways; for us it is always the same.
    try:
        return datasets.load_dataset(section.dataset, **arguments)
    except Exception as error:
        raise UserError(_cannot_read(section, error)) from error


def _cannot_read(section: DataSection, error: Exception) -> str:
    what = f"data.dataset={section.dataset!r}" + (f", files={list(section.files)}" if section.files else "")
    remedy = "check the files" if section.files else "check its name, subset and split, and the connection to the hub"
    return f"cannot read {what}: {first_line(error)}; {remedy}"


def _find_files(patterns: tuple[str, ...]) -> list[str]:
    """The files that the patterns name, without empty ones, of which `datasets` makes a StopIteration."""
    found = []
    for pattern in patterns:
        paths = [path for path in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path)]
        if not paths:
            raise UserError(f"data.files: {pattern!r} names no file on this machine: correct it, or put the file there")
        found += paths
    files = [path for path in sorted(set(found)) if os.path.getsize(path)]
    if not files:
        raise UserError(f"data.files: all of {list(patterns)} are empty: add text")
    # `datasets` takes its files for patterns, too: a name with brackets would be looked up as one.
    return [glob.escape(os.path.abspath(path)) for path in files]


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
        raise UserError(_cannot_read(section, error)) from error


def _embedded_shards() -> list[Shard]:
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_path("stdlib"))
    shards: list[Shard] = [functools.partial(_cut, topics[name]) for name in sorted(topics)]
    shards += [
        functools.partial(_read_source, path) for path in sorted(library.rglob("*.py")) if _is_text(path, library)
    ]
    return shards


def _is_text(path: Path, library: Path) -> bool:
    folders = path.relative_to(library).parts[:-1]
    return _SKIPPED_FOLDERS.isdisjoint(folders) and not path.name.startswith(_SKIPPED_PREFIXES)


def _read_source(path: Path) -> Iterator[str]:
    yield from _cut(path.read_text(encoding="utf-8", errors="replace"))


def _cut(text: str) -> Iterator[str]:
    """The text in pieces of at most MAX_DOCUMENT_CHARS, cut at a line end where there is one; nothing if blank."""
    start = 0
    while start < len(text):
        end = start + MAX_DOCUMENT_CHARS
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        piece = text[start:end]
        if not piece.isspace():
            yield piece
        start = end
