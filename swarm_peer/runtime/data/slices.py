"""The training samples and the held-out samples of a run: text from a data set, as windows of token ids.

This module owns the slices of the data, the choice of the documents that are held out for validation, and the way from
documents (corpus.py) to samples. It knows nothing of microbatches or rounds. Which peer reads which slice, and when, is
decided elsewhere (policy/data/ledger.py).

**Slices.** A data set is a list of shards, which are its files. Streaming cannot seek inside a file, so a pass over the
data consists of slices: every n-th record of a shard, from the k-th on. If there are few shards, n is larger, so that
peers can choose from MIN_SLICES slices. The price is that a small data set is read up to MIN_SLICES times in a pass:
some hundred bytes for each token, while an activation takes kilobytes. A slice parses its own records alone. Many small
files are joined: the tokens at the end of a slice that make no whole sample are lost, so a slice should not be much
shorter than MIN_SLICE_WINDOWS samples.

**Samples.** A slice is read on its own. Its documents go through a shuffle buffer. Their tokens, with the separator
after each document, form one sequence, which is cut into windows of T+1 tokens. The last token of a window is the first
of the next one, so every token but the very first is predicted exactly once. The windows go through a shuffle buffer,
too, since the many windows of one long document would make a poor global batch. The run's seed, the pass and the slice
alone determine all this. So (pass, slice, window) names a sample, where `window` counts the windows in the order in
which they come out. It names the same sample at every peer that has the same data and the same version of the
tokenizer.

Data for fine-tuning, whose documents are examples, gives one sample for each of them (samples.py).

**Held-out documents.** The candidates are the first documents of the shards: VALIDATION_WINDOW candidates for each
document wanted, from at most VALIDATION_SHARDS shards if these are long, in an order drawn from the seed. Those with
the smallest hashes under the run's seed are held out, at most a tenth of the candidates. A held-out document is
recognised by its content. So every peer finds the same ones, and a slice skips them wherever they turn up, duplicates
included.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from swarm_peer.config import DataSection, RunManifest
from swarm_peer.errors import UserError
from swarm_peer.policy.data.ledger import MAX_SLICES
from swarm_peer.policy.data.ranges import SliceId, Uncounted
from swarm_peer.runtime.data.corpus import check_shards, open_shards, total_bytes
from swarm_peer.runtime.data.examples import ExampleMaker
from swarm_peer.runtime.data.samples import samples_from
from swarm_peer.runtime.data.tokenizers import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

Item = TypeVar("Item")

# So that peers find slices enough, and that one that takes over a slice which another one has begun has at most a 64th
# of a file to tokenize again.
MIN_SLICES = 64

# On average half a window is lost at the end of a slice: a 64th of the text, if a slice has this many windows.
MIN_SLICE_WINDOWS = 32
BYTES_PER_TOKEN = 4

# Of records that are packed, nothing is lost at the end of a slice, but the last samples are not as full as others.
MIN_PACKED_WINDOWS = 4

# Small files are joined until slices have about this size, as long as enough slices remain.
JOINED_SLICE_BYTES = 1 << 20

# Slices that a peer reads at a time, if there are enough. Each has its own part of data.shuffle_buffer, so samples
# depend on this number. It must be the same for all peers of a run.
OPEN_SLICES = 8

# This many peers each find a slice of one pass, also those that join later. A peer that finds none begins with the next
# pass, which has the same documents.
READERS_TO_COME = 16

# Candidates for each held-out document: enough to spread the choice, few enough to stream at every start.
VALIDATION_WINDOW = 16

# Most shards that candidates come from, if they are long. To open a remote file takes about a second.
VALIDATION_SHARDS = 8

# Of a slice's tokens, those at its end that make no whole sample are lost. A larger share of them is told.
MOST_LEFT_OVER = 0.1

# Of each held-out document so many characters are looked at to see whether the tokenizer knows them. If it knows fewer
# than the first share of them, it is none for this text, and below the second one the log says so.
PROBE_CHARS = 2000
LEAST_KNOWN, FEW_KNOWN = 0.5, 0.95

ALL_WINDOWS = Uncounted((), 0)


class SliceReader:
    """Reads the slices of a run's data. Belongs to one thread at a time.

    Nothing is read before the first call. A call may block on the disk or the network. It takes seconds the first time,
    and while the shuffle buffers of a slice fill.

    Args:
        cache_dir: folder for files from the hub
    """

    def __init__(self, *, manifest: RunManifest, cache_dir: Path | None = None):
        self._manifest = manifest
        self._cache_dir = cache_dir
        self._num_left_over = 0

    def num_slices(self) -> int:
        """The number of slices in a pass, the same for every peer with the same data.

        Raises:
            UserError: the data cannot be read
        """
        return len(self._slices)

    def num_at_a_time(self, num_readers: int) -> int:
        """The number of slices that each peer reads at a time: few if a pass has few, so that others find some.

        At least two: while one ends, there is another one to read. Raises as `num_slices` does.
        """
        return min(OPEN_SLICES, max(2, self.num_slices() // max(num_readers, READERS_TO_COME)))

    def open(self, slice_id: SliceId, left: Uncounted = ALL_WINDOWS) -> SliceWindows:
        """Begin to read the windows of a slice, in their order.

        Windows that are not `left` are read and tokenized again, and skipped: only tokens show where a window begins.

        Args:
            left: the windows that are wanted

        Raises:
            UserError: from `next`: the data or the tokenizer cannot be read
        """
        return SliceWindows(functools.partial(self._windows, slice_id), left)

    def no_text(self) -> UserError:
        """The error to raise if all slices of a pass are empty."""
        data = self._manifest.data
        if data.has_targets:
            return _nothing_learnt(data, self._maker)
        if self._tokenizer.num_dropped:
            return _unknown_tokens(data, self._tokenizer)
        return UserError(
            f"data.dataset={data.dataset!r} has no text besides the documents held out for validation, or its slices "
            f"are too short for one sample of data.sequence_length={data.sequence_length}: add text, or shorten the "
            f"sequences"
        )

    @functools.cached_property
    def _slices(self) -> list[list[Callable[[], Iterator[str]]]]:
        """The readers of each slice's documents. If slices share a shard, each has its own records of the shard."""
        shards = open_shards(self._manifest.data, self._cache_dir)
        num_groups, stride = _cut_shards(len(shards), self._manifest.data)
        return [
            [functools.partial(shard, offset, stride) for shard in shards[group::num_groups]]
            for group in range(num_groups)
            for offset in range(stride)
        ]

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = _tokenizer_of(self._manifest, self._cache_dir)
        _check_known(self._manifest, tokenizer, self._cache_dir)
        return tokenizer

    @functools.cached_property
    def _maker(self) -> ExampleMaker:
        return ExampleMaker(self._manifest.data, self._tokenizer)

    def _windows(self, slice_id: SliceId) -> Iterator[npt.NDArray[np.int32]]:
        data, documents = self._manifest.data, self._documents(slice_id)
        if data.has_targets:
            windows = samples_from(documents, self._maker, data.sequence_length, self._tokenizer.separator_id)
        else:
            tell = functools.partial(self._tell_left_over, slice_id)
            windows = _pack(documents, self._tokenizer, data.sequence_length, tell)
        yield from shuffled(windows, self._shuffle_buffer, self._rng("windows", slice_id))

    def _tell_left_over(self, slice_id: SliceId, num_used: int, num_left: int) -> None:
        if num_left <= MOST_LEFT_OVER * (num_used + num_left):
            return
        self._num_left_over += 1
        if str(self._num_left_over).strip("0") == "1":
            log.warning(
                "tokens_left_over slice=%d left=%d used=%d slices=%d of=%d: what makes no whole sample at the end of a "
                "slice is left out; shorten data.sequence_length=%d, or add text",
                *(slice_id.slice_index, num_left, num_used, self._num_left_over, self.num_slices()),
                self._manifest.data.sequence_length,
            )

    def _documents(self, slice_id: SliceId) -> Iterator[str]:
        data, seed = self._manifest.data, self._manifest.seed
        held_out = _held_out(data, seed, self._cache_dir)
        documents = itertools.chain.from_iterable(read() for read in self._slices[slice_id.slice_index])
        for text in shuffled(documents, self._shuffle_buffer, self._rng("documents", slice_id)):
            if _fingerprint(text, seed) not in held_out:
                yield text

    @property
    def _shuffle_buffer(self) -> int:
        return max(1, self._manifest.data.shuffle_buffer // OPEN_SLICES)

    def _rng(self, what: str, slice_id: SliceId) -> random.Random:
        return random.Random(f"{self._manifest.seed}/{what}/{slice_id.pass_number}/{slice_id.slice_index}")


class SliceWindows:
    """Iterator over the windows of one slice: (number of the window, its tokens as int32 of shape (T+1,)).

    After UserError it may be asked again: it goes on where it was. Any other error it raises each time.

    Args:
        open_windows: begins to read all windows of the slice, the same each time

    Attributes:
        num_windows: the number of all windows of the slice, skipped ones included; None until the iterator has ended
        num_read: how many of them have been read so far
    """

    def __init__(self, open_windows: Callable[[], Iterator[npt.NDArray[np.int32]]], left: Uncounted):
        self.num_windows: int | None = None
        self._open = open_windows
        self._windows = open_windows()
        self._left = left
        self.num_read = 0
        self._error: Exception | None = None

    def __iter__(self) -> SliceWindows:
        return self

    def __next__(self) -> tuple[int, npt.NDArray[np.int32]]:
        if self._error is not None:  # the generator would only say that the slice has ended, once it has raised
            raise self._error
        try:
            for tokens in self._windows:
                window, self.num_read = self.num_read, self.num_read + 1
                if window >= self._left.next_window or any(start <= window < end for start, end in self._left.gaps):
                    return window, tokens
        except UserError:
            self._windows = itertools.islice(self._open(), self.num_read, None)
            raise
        except Exception as error:
            self._error = error
            raise
        self.num_windows = self.num_read
        raise StopIteration

    @property
    def has_counted_further(self) -> bool:
        """Whether windows have counted that come after those which have been read."""
        return self._left.next_window > self.num_read


def sample_stream(
    manifest: RunManifest, stream_id: str, cache_dir: Path | None = None
) -> Iterator[npt.NDArray[np.int32]]:
    """The samples of all slices, pass after pass, without end, for a process that trains alone.

    A sample is an array of int32 of shape (T+1,). OPEN_SLICES slices are mixed at a time. The same manifest and
    `stream_id` give the same samples again, bitwise.

    Args:
        stream_id: any string; the order of the slices is drawn from it
        cache_dir: as for SliceReader

    Raises:
        UserError: from `next`: the data or the tokenizer cannot be read, or there is no text to train on
    """
    reader, rng = SliceReader(manifest=manifest, cache_dir=cache_dir), random.Random(f"{manifest.seed}/{stream_id}")
    for pass_number in itertools.count():
        is_empty = True
        order = list(range(reader.num_slices()))
        rng.shuffle(order)
        slices = (reader.open(SliceId(pass_number, index)) for index in order)
        opened = list(itertools.islice(slices, OPEN_SLICES))
        while opened:
            position = rng.randrange(len(opened))
            item = next(opened[position], None)
            if item is None:
                opened[position : position + 1] = itertools.islice(slices, 1)
                continue
            is_empty = False
            yield item[1]
        if is_empty:
            raise reader.no_text()


def validation_samples(manifest: RunManifest, num_samples: int, cache_dir: Path | None = None) -> npt.NDArray[np.int32]:
    """The held-out samples of a run, int32 of shape (N, T+1). They are the same for every peer, and in no slice.

    They are spread evenly over the held-out documents, so a larger or smaller number of them covers the same text. N is
    `num_samples`, or the number of samples that the held-out text has if that is smaller.

    Raises:
        UserError: the data or the tokenizer cannot be read, or the held-out text is too short for one sample
    """
    data = manifest.data
    documents = list(_held_out(data, manifest.seed, cache_dir).values())
    _check_known(manifest, _tokenizer_of(manifest, cache_dir), cache_dir)
    samples = samples_of(manifest, documents, num_samples, cache_dir)
    if samples is None and data.has_targets:
        raise UserError(
            f"of the {len(documents)} documents held out for validation, none has a token to learn: raise "
            f"data.validation_documents (now {data.validation_documents}), and look at data.format and data.loss_on"
        )
    if samples is None:
        raise UserError(
            f"the {len(documents)} documents held out for validation are too short for one sample of "
            f"data.sequence_length={data.sequence_length}: raise data.validation_documents (now "
            f"{data.validation_documents}), add text, or shorten the sequences"
        )
    if len(samples) < num_samples:
        text = "held_out_text_short samples=%d wanted=%d documents=%d: data.validation_documents=%d may be raised"
        log.warning(text, len(samples), num_samples, len(documents), data.validation_documents)
    return samples


def samples_of(
    manifest: RunManifest, documents: Iterable[str], num_samples: int, cache_dir: Path | None = None
) -> npt.NDArray[np.int32] | None:
    """At most `num_samples` samples, spread evenly over some documents, int32 of shape (N, T+1).

    Returns:
        the samples; None if the documents are too short for one

    Raises:
        UserError: the tokenizer cannot be loaded, or they are too short but for those that have been dropped
    """
    length = manifest.data.sequence_length
    tokenizer = _tokenizer_of(manifest, cache_dir)
    if manifest.data.has_targets:
        maker = ExampleMaker(manifest.data, tokenizer)
        samples = list(samples_from(documents, maker, length, tokenizer.separator_id))
        count = min(num_samples, len(samples))
        return np.stack([samples[i * len(samples) // count] for i in range(count)]) if count else None
    tokens = np.fromiter(_tokens(documents, tokenizer), np.int32)
    windows = max(len(tokens) - 1, 0) // length
    if not windows and tokenizer.num_dropped:
        raise _unknown_tokens(manifest.data, tokenizer)
    if not windows:
        return None
    count = min(num_samples, windows)
    starts = [i * windows // count * length for i in range(count)]
    return np.stack([tokens[start : start + length + 1] for start in starts])


def _unknown_tokens(data: DataSection, tokenizer: Tokenizer) -> UserError:
    return UserError(
        f"data.tokenizer={data.tokenizer!r} has given {tokenizer.num_dropped} documents tokens that the model does not "
        f"know, and without these the text is too short: take the model's own tokenizer, or other text"
    )


def _nothing_learnt(data: DataSection, maker: ExampleMaker) -> UserError:
    counts = ", ".join(f"{count} {what}" for what, count in sorted(maker.counts.items())) or "no documents"
    return UserError(
        f"data.dataset={data.dataset!r} has nothing to learn besides the documents held out for validation ({counts}): "
        f"look at data.format={data.format!r}, data.loss_on and data.sequence_length={data.sequence_length}"
    )


def _check_known(manifest: RunManifest, tokenizer: Tokenizer, cache_dir: Path | None) -> None:
    """Check by the held-out documents that the tokenizer knows what the text is made of.

    Raises:
        UserError: it does not know most of it, or the data cannot be read
    """
    data = manifest.data
    if data.tokenizer == "bytes" or data.format == "tokens":
        return
    share = tokenizer.share_known(text[:PROBE_CHARS] for text in _held_out(data, manifest.seed, cache_dir).values())
    if share < LEAST_KNOWN:
        raise UserError(
            f"data.tokenizer={data.tokenizer!r} knows {share:.0%} of the letters and digits of this text, and the rest "
            f"would be lost: take a tokenizer that was made for such text, or other text"
        )
    if share < FEW_KNOWN:
        text = "tokenizer_knows_few tokenizer=%s share=%.2f: it loses the other letters and digits of this text"
        log.warning(text, data.tokenizer, share)


def _tokenizer_of(manifest: RunManifest, cache_dir: Path | None) -> Tokenizer:
    return load_tokenizer(manifest.data, _vocab_size(manifest), cache_dir)


def _vocab_size(manifest: RunManifest) -> int:
    config = manifest.model.config
    if isinstance(config, dict) and isinstance(config.get("vocab_size"), int):
        return int(config["vocab_size"])
    from swarm_peer.model.architecture import parse_model_config, resolve_model_config

    return int(parse_model_config(resolve_model_config(manifest.model)).vocab_size)


# --- from documents to samples


def _tokens(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[int]:
    for text in documents:
        yield from tokenizer.encode_document(text)


def _pack(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    length: int,
    on_end: Callable[[int, int], None] = lambda num_used, num_left: None,
) -> Iterator[npt.NDArray[np.int32]]:
    """Windows of T+1 tokens; `on_end` is told of how many tokens they are made, and how many are left."""
    tokens: list[int] = []
    num_used = 0
    for text in documents:
        tokens += tokenizer.encode_document(text)
        start = 0
        while len(tokens) - start > length:
            yield np.array(tokens[start : start + length + 1], dtype=np.int32)
            start += length
        del tokens[:start]
        num_used += start
    on_end(num_used, len(tokens))


def shuffled(documents: Iterable[Item], size: int, rng: random.Random) -> Iterator[Item]:
    """Pass items through a buffer of `size` items. When it is full, a random item leaves it for each one that comes."""
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


@functools.lru_cache(maxsize=1)  # a stage-0 peer needs them twice, and has to open files for it, maybe remote ones
def _held_out(section: DataSection, seed: int, cache_dir: Path | None) -> dict[bytes, str]:
    """The held-out documents, by fingerprint."""
    shards = open_shards(section, cache_dir)
    check_shards(section, shards)
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


# --- from shards to slices


def _cut_shards(num_shards: int, section: DataSection) -> tuple[int, int]:
    """The number of groups that the shards are joined to, and the number of slices that each group is cut into."""
    num_bytes = total_bytes(section)
    if num_bytes is None:
        num_groups, at_least = num_shards, MIN_SLICES
    else:
        min_windows = MIN_PACKED_WINDOWS if section.packing else MIN_SLICE_WINDOWS
        room = num_bytes // (min_windows * BYTES_PER_TOKEN * section.sequence_length)
        # Where a record is a sample, slices may be as short as they like: data for fine-tuning is often small.
        is_whole = section.has_targets and not section.packing
        at_least = MIN_SLICES if is_whole else min(max(room, 1), MIN_SLICES)
        num_groups = min(num_shards, max(at_least, num_bytes // JOINED_SLICE_BYTES))
    num_groups = min(num_groups, MAX_SLICES)
    return num_groups, math.ceil(at_least / num_groups)
