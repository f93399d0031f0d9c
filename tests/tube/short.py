"""What must hold where the text is so short that the run passes over it more than once.

The text takes the place of Python's own, which no schedule gets to the end of even one slice of.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from invariants import Invariants, Place

import swarm_peer.runtime.data.corpus as corpus_module
from swarm_peer.policy.data.ranges import SampleId, SliceId
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
        self._pass_at: dict[Place, int] = {}  # the pass over the text that stage 0 is in, by where it is
        self._pass_at_calm = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        with super().watching(), short_text():
            yield

    async def _committed(self, call: Any, loop: Any, settlement: Any) -> None:
        place = (loop._stage, loop.step.timeline.first_round, loop.step.round_number + 1, settlement.history_hash)
        await super()._committed(call, loop, settlement)
        if loop._leases is not None:
            self._pass_at[place] = max(self._pass_at.get(place, 0), loop._leases._ledger.current_pass)

    def _newest_pass(self) -> int:
        newest = max(self._pass_at, key=lambda place: (place[2], place[1]), default=None)
        return 0 if newest is None else self._pass_at[newest]

    def note_calm(self) -> None:
        self._pass_at_calm = self._newest_pass()

    def has_gone_on(self) -> bool:
        """Whether a pass that began since has come to its end: none of its slices hangs."""
        return self._newest_pass() >= self._pass_at_calm + PASSES_AFTER

    def check_samples(self) -> None:
        """As for any text; and of a pass that is over, every sample has counted, but for those reported lost.

        After two halves of stage 0 have gone on without each other, one gives its updates up. The other one has heard
        that their samples have counted, and does not read them again.
        """
        super().check_samples()
        if not self._pass_at:
            return
        newest = max(self._pass_at, key=lambda place: (place[2], place[1]))
        self.records.passes = self._pass_at[newest]
        updates = [*dict(self.history(newest)).values(), *self.forked().values()]
        counted = {name for ids in updates for name in self.names(ids)}
        missing = [name for name in self._samples_before(self._pass_at[newest]) if name not in counted]
        told = self.records.told_lost[0] + self.records.told_lost[None] + self.gone_back_in_vain(0)
        if 0 not in self.records.ends:  # the run has ended early: whether what was given up was read again is not known
            told = self.reported_lost()
        excused = told + self.records.died[0]
        if len(missing) > excused:
            self.tube.violation(
                f"{len(missing)} samples of passes that are over are in no update, such as {missing[:3]}; "
                f"{excused} were reported lost, or held by peers as they died"
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
