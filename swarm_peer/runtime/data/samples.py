"""Examples as samples of T+1 tokens, with marks (token_marks.py) of what is learnt, and where documents begin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from swarm_peer.runtime.data.chats import Example
from swarm_peer.runtime.data.examples import ExampleMaker
from swarm_peer.token_marks import BEGINS_DOCUMENT, NOT_LEARNT

# Samples that are being packed at a time: each document goes into the fullest one that has room for it.
OPEN_SAMPLES = 16


def samples_from(
    documents: Iterable[str], maker: ExampleMaker, length: int, padding_id: int
) -> Iterator[npt.NDArray[np.int32]]:
    """One sample of T+1 tokens for each document that has something to learn, or for several if they are packed.

    A longer one is cut off, and a shorter one filled up behind: no token attends to later ones, so the padding changes
    nothing, and it is not learnt.
    """
    examples = (maker.example(document, length + 1) for document in documents)
    made = (example for example in examples if example is not None)
    for together in packed(made, length + 1) if maker.packs else ([example] for example in made):
        yield _filled(together, length, padding_id)


def packed(examples: Iterable[Example], room: int) -> Iterator[list[Example]]:
    """Groups of examples that fit into so many tokens."""
    samples: list[tuple[int, list[Example]]] = []  # how many tokens are free, and the examples
    for example in examples:
        size = len(example.ids)
        fitting = [number for number, (free, _) in enumerate(samples) if free >= size]
        if fitting:
            number = min(fitting, key=lambda number: samples[number][0])
            free, together = samples.pop(number)
        else:
            free, together = room, []
        if free > size:
            samples.append((free - size, [*together, example]))
        else:
            yield [*together, example]
        if len(samples) > OPEN_SAMPLES:
            yield samples.pop(min(range(len(samples)), key=lambda number: samples[number][0]))[1]
    yield from (together for _, together in samples)


def _filled(examples: Iterable[Example], length: int, padding_id: int) -> npt.NDArray[np.int32]:
    sample = np.full(length + 1, padding_id | NOT_LEARNT, np.int32)
    start = 0
    for ids, is_target in examples:
        end = start + len(ids)
        sample[start:end] = np.array(ids, np.int32) | np.where(is_target, 0, NOT_LEARNT).astype(np.int32)
        sample[start] |= BEGINS_DOCUMENT
        start = end
    return sample
