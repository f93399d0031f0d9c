"""A peer on a machine of a box of links, with a device that sleeps: `wan_peer.py NAMESPACE SECONDS FOLDER OPTIONS...`.

The device takes SECONDS for each microbatch, a third of them forward, and sleeps for nearly all of them: its layers
compute one product each.
FOLDER gets PID.jsonl, the microbatches that a stage-0 peer counts (see recording_peer.py), and PID.timeline, a line for
each thing that took time: what, stage, round, begin and end by the wall clock. No run rewinds here, so the round is the
number of updates before it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "integration"))

from links import enter_namespace
from recording_peer import app
from wan_timeline import FORWARD_SHARE, SpanWriter, compute_little, sleeping

from swarm_peer.model.training import StageTrainer
from swarm_peer.runtime.step.driver import RoundDriver


def write_timeline(file: Path) -> None:
    """Have each pass of the device and each wait at the end of a round written down."""
    spans = SpanWriter(file)

    def watch_passes(what: str, passes: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            begin_s, optimizer_step = time.time(), self.optimizer_step
            result = passes(self, *args, **kwargs)
            spans.note(what, self.spec.index, optimizer_step, begin_s)
            return result

        return noted

    for name in ("forward", "backward", "apply"):
        setattr(StageTrainer, name, watch_passes(name, getattr(StageTrainer, name)))
    watch_ends_of_rounds(spans)


def watch_ends_of_rounds(spans: SpanWriter) -> None:
    """Have each step at the end of a round written down: those of the driver, and the waits between them."""
    driver: Any = RoundDriver
    drain, average, apply = driver._drain, driver._average_cut, driver._apply
    since_s: dict[tuple[str, int], float] = {}  # when the last step of a round has ended

    def note_wait(what: str, stage: int, round_number: int) -> None:
        if (begin_s := since_s.pop((what, round_number), None)) is not None:
            spans.note(what, stage, round_number, begin_s)

    async def noted_drain(self: Any) -> None:
        present = self.member.draining
        await drain(self)
        if present is not None:
            since_s["barrier", present.number] = time.time()

    async def noted_average(self: Any, averaging: Any) -> None:
        begin_s, number = time.time(), averaging.cut.round
        note_wait("barrier", self._stage, number)
        await average(self, averaging)
        spans.note("averaging", self._stage, number, begin_s)
        since_s["vote", number] = time.time()

    async def noted_apply(self: Any) -> None:
        begin_s, committed = time.time(), self._due(self.member)
        await apply(self)
        if committed is not None:
            note_wait("vote", self._stage, committed.entry.cut.round)
            spans.note("commit", self._stage, committed.entry.cut.round, begin_s)

    driver._drain, driver._average_cut, driver._apply = noted_drain, noted_average, noted_apply


def main() -> None:
    """The command line."""
    namespace, seconds, folder, *options = sys.argv[1:]
    enter_namespace(namespace)
    compute_little()
    shares = {"forward": FORWARD_SHARE, "backward": 1 - FORWARD_SHARE}
    for name, share in shares.items():
        setattr(StageTrainer, name, sleeping(share, float(seconds), getattr(StageTrainer, name)))
    write_timeline(Path(folder) / f"{os.getpid()}.timeline")
    app([folder, "", *options])


if __name__ == "__main__":
    main()
