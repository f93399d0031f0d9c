"""Examples as samples of T+1 tokens, with marks (token_marks.py) of what is learnt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from swarm_peer.runtime.data.chats import Example
from swarm_peer.runtime.data.examples import ExampleMaker
from swarm_peer.token_marks import BEGINS_DOCUMENT, NOT_LEARNT


def samples_from(
    documents: Iterable[str], maker: ExampleMaker, length: int, padding_id: int
) -> Iterator[npt.NDArray[np.int32]]:
    """One sample of T+1 tokens for each document that has something to learn.

    A longer one is cut off, and a shorter one filled up behind: no token attends to later ones, so the padding changes
    nothing, and it is not learnt.
    """
    for document in documents:
        if (example := maker.example(document, length + 1)) is not None:
            yield _filled([example], length, padding_id)


def _filled(examples: Iterable[Example], length: int, padding_id: int) -> npt.NDArray[np.int32]:
    sample = np.full(length + 1, padding_id | NOT_LEARNT, np.int32)
    start = 0
    for ids, is_target in examples:
        end = start + len(ids)
        sample[start:end] = np.array(ids, np.int32) | np.where(is_target, 0, NOT_LEARNT).astype(np.int32)
        sample[start] |= BEGINS_DOCUMENT
        start = end
    return sample
