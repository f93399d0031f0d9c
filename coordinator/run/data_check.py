"""A first look at a run's data: how long its documents are, what is learnt of them, and what is left out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm_peer.errors import UserError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.data.chats import Example
from swarm_peer.runtime.data.corpus import check_shards, open_shards
from swarm_peer.runtime.data.examples import ExampleMaker
from swarm_peer.runtime.data.samples import packed
from swarm_peer.runtime.data.shards import Shard
from swarm_peer.runtime.data.tokenizers import Tokenizer, load_tokenizer

# Of a document so many tokens are shown at most: its beginning and its end.
MOST_SHOWN = 400

# A part of a document, and whether it is learnt.
Piece = tuple[str, bool]


@dataclass(frozen=True)
class DataCheck:
    """The first documents of a run's data, and the samples that they make.

    Attributes:
        counts: documents by what becomes of them: used, cut (used too), cut_off, without_target, unusable
        lengths: tokens of each document that has any to learn, uncut, from the shortest to the longest
        num_tokens: tokens of all samples, without padding
        num_targets: those of them that are learnt
        num_samples: that the documents make
        num_without_end: documents the last learnt token of which is none that ends a turn or a text
        shown: pieces of some documents
    """

    counts: Mapping[str, int]
    lengths: Sequence[int]
    num_tokens: int
    num_targets: int
    num_samples: int
    num_without_end: int
    shown: Sequence[Sequence[Piece]]

    def length_at(self, share: float) -> int:
        """The length that this share of the documents do not exceed."""
        return self.lengths[min(int(share * len(self.lengths)), len(self.lengths) - 1)]


def check_data(resolved: ResolvedManifest, num_documents: int, num_shown: int, cache_dir: Path | None) -> DataCheck:
    """Look at the first documents of each shard in turn.

    Raises:
        UserError: the data cannot be read, or nothing in these documents is learnt
    """
    section = resolved.manifest.data
    tokenizer = load_tokenizer(section, resolved.vocab_size, cache_dir)
    shards = open_shards(section, cache_dir)
    check_shards(section, shards)
    documents = list(itertools.islice(_in_turn(shards), num_documents))
    counts, examples = _examples(documents, resolved, tokenizer)
    if not examples:
        found = ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "there are none"
        raise UserError(
            f"nothing is learnt of the first {len(documents)} documents of data.dataset={section.dataset!r} ({found}): "
            f"look at data.format={section.format!r} and data.loss_on"
        )
    room = section.sequence_length + 1
    kept = [Example(ids[:room], is_target[:room]) for ids, is_target in examples if any(is_target[:room])]
    counts["used"] = len(kept)
    counts["cut_off"] = len(examples) - len(kept)
    num_tokens = sum(len(each.ids) for each in kept)
    if not section.has_targets:  # text is one long row, of which nothing is cut off
        counts["cut"], num_tokens = 0, sum(len(each.ids) for each in examples)
        num_samples = num_tokens // section.sequence_length
    else:
        counts["cut"] = sum(len(ids) > room for ids, is_target in examples if any(is_target[:room]))
        num_samples = len(list(packed(kept, room))) if section.packing else len(kept)
    chosen = [examples[i * len(examples) // num_shown] for i in range(min(num_shown, len(examples)))]
    return DataCheck(
        counts=counts,
        lengths=sorted(len(each.ids) for each in examples),
        num_tokens=num_tokens,
        num_targets=sum(sum(each.is_target) for each in kept) if section.has_targets else num_tokens,
        num_samples=num_samples,
        num_without_end=sum(not _has_end(each, tokenizer) for each in examples),
        shown=[list(_pieces(each, tokenizer)) for each in chosen],
    )


def _in_turn(shards: Sequence[Shard]) -> Iterator[str]:
    readers = [shard() for shard in shards]
    while readers:
        for reader in list(readers):
            document = next(reader, None)
            if document is None:
                readers.remove(reader)
            else:
                yield document


def _examples(
    documents: Iterable[str], resolved: ResolvedManifest, tokenizer: Tokenizer
) -> tuple[Counter[str], list[Example]]:
    """The documents that have something to learn, uncut, and how many have not."""
    section = resolved.manifest.data
    if section.has_targets:
        maker = ExampleMaker(section, tokenizer)
        examples = [example for document in documents if (example := maker.example(document)) is not None]
        return maker.counts, examples
    rows = [ids for document in documents if (ids := tokenizer.encode_document(document))]
    counts = Counter({"unusable": tokenizer.num_dropped} if tokenizer.num_dropped else {})
    return counts, [Example(ids, [True] * len(ids)) for ids in rows]


def _has_end(example: Example, tokenizer: Tokenizer) -> bool:
    last = max(number for number, counts in enumerate(example.is_target) if counts)
    token = example.ids[last]
    return token == tokenizer.separator_id or tokenizer.decode([token]) in tokenizer.special_tokens


def _pieces(example: Example, tokenizer: Tokenizer) -> Iterator[Piece]:
    """The text of a document, in pieces that are learnt or not; of a long one, the middle is left out."""
    tokens = list(zip(*example, strict=True))
    half = MOST_SHOWN // 2
    parts = [tokens] if len(tokens) <= MOST_SHOWN else [tokens[:half], tokens[-half:]]
    for number, part in enumerate(parts):
        if number:
            yield f" [... {len(tokens) - MOST_SHOWN} tokens ...] ", False
        for is_learnt, run in itertools.groupby(part, key=lambda item: item[1]):
            yield tokenizer.decode([token for token, _ in run]), is_learnt
