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
from swarm_peer.runtime.step.barrier import Barrier
from swarm_peer.runtime.step.settlement import StageGroup
from swarm_peer.runtime.step.step_loop import StepLoop

# Waits of the end of a round, in their order; "end" is all of them.
WAITS: dict[str, tuple[type, str]] = {
    "end": (StepLoop, "_end"),
    "barrier": (Barrier, "gather"),
    "averaging": (StageGroup, "_average"),
    "vote": (StageGroup, "_gather_votes"),
    "commit": (StepLoop, "_commit"),
}


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

    def watch_wait(what: str, wait: Callable[..., Any]) -> Callable[..., Any]:
        async def noted(self: Any, *args: Any) -> Any:
            begin_s, round_number = time.time(), self._rounds.current.number
            result = await wait(self, *args)
            spans.note(what, self._stage, round_number, begin_s)
            return result

        return noted

    for name in ("forward", "backward", "apply"):
        setattr(StageTrainer, name, watch_passes(name, getattr(StageTrainer, name)))
    for what, (owner, name) in WAITS.items():
        setattr(owner, name, watch_wait(what, getattr(owner, name)))


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
