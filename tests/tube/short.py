"""What must hold where the text is so short that the run passes over it more than once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from invariants import Invariants
from wrapping import before

import swarm_peer.runtime.data.corpus as corpus_module
from swarm_peer.policy.data.ranges import SampleId, SliceId
from swarm_peer.runtime.data.granted_slices import GrantedSlices
from swarm_peer.runtime.data.slices import MIN_SLICES, SliceReader

# With a slice for each document, some of them empty: 130 samples in a pass, of which an optimizer step takes eight.
NUM_DOCUMENTS = MIN_SLICES
LENGTHS = range(4, 32)
# So many passes have to end once faults have ceased.
PASSES_AFTER = 2


def short_text() -> AbstractContextManager[Any]:
    """Have all peers read a short text while the context is open."""
    rng = random.Random("short text")
    documents = ["".join(rng.choices("etaoin shrdlu", k=rng.choice(LENGTHS))) for _ in range(NUM_DOCUMENTS)]
    shards = [lambda offset=0, stride=1: iter(documents[offset::stride])]
    return patch.object(corpus_module, "_embedded_shards", lambda: shards)


class ShortInvariants(Invariants):
    """Watches a tube with a short text."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._given_up: set[SampleId] = set()  # their microbatches have failed too often
        self._pass_at_calm = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        with super().watching(), short_text(), before(GrantedSlices, "give_up", self._giving_up):
            yield

    def _giving_up(self, slices: GrantedSlices, present: Any, samples: Any) -> None:
        self._given_up.update(samples)

    def _newest_pass(self) -> int:
        self.note_ends()
        if 0 not in self.ends:
            return 0
        return self.records.ledger(self.ends[0][1], self.num_slices).current_pass

    def note_calm(self) -> None:
        self._pass_at_calm = self._newest_pass()

    def has_gone_on(self) -> bool:
        """Whether a pass that began since has come to its end: none of its slices hangs."""
        return self._newest_pass() >= self._pass_at_calm + PASSES_AFTER

    def check_shares(self) -> None:
        """As for any text; and of a pass that is over, every sample has counted."""
        super().check_shares()
        if 0 not in self.ends or not self.num_slices:
            return
        self.records.passes = self.records.ledger(self.ends[0][1], self.num_slices).current_pass
        line = list(self.records.line(self.ends[0]))
        counted = {name for entry in line for name in self.records.names(self.records.ids_of(0, entry))}
        missing = [name for name in self._samples_before(self.records.passes) if name not in counted | self._given_up]
        if missing:
            self.tube.violation(
                f"{len(missing)} samples of passes that are over are in no entry, such as {missing[:3]}"
            )

    def _samples_before(self, current_pass: int) -> list[SampleId]:
        """The samples of all passes that are over."""
        reader = SliceReader(manifest=self._resolved.manifest)
        with short_text():
            return [
                SampleId(number, index, window)
                for number in range(current_pass)
                for index in range(reader.num_slices())
                for window, _ in reader.open(SliceId(number, index))
            ]
