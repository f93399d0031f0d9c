"""Devices that sleep, the file that says what took time in an arm of wan.py, and the figures of such files."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from transformers.models.gpt2.modeling_gpt2 import GPT2Block

# The backward pass takes the rest of a device's time for a microbatch.
FORWARD_SHARE = 1 / 3
# The steps at the end of a round, in their order.
WAITS = ("barrier", "averaging", "vote", "commit")


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time at a peer; see wan_peer.py."""

    what: str
    stage: int
    round_number: int
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


class SpanWriter:
    """Writes spans down as they end. By the wall clock, which all machines of a box share."""

    def __init__(self, file: Path):
        self._lines = file.open("w", buffering=1)

    def note(self, what: str, stage: int, round_number: int, begin_s: float) -> None:
        """Note something that has just ended."""
        self._lines.write(json.dumps([what, stage, round_number, begin_s, time.time()]) + "\n")


def sleeping(share: float, device_s: float, passes: Callable[..., Any]) -> Callable[..., Any]:
    """Have a pass take its share of the device's time for a microbatch, or longer if it computes for longer."""

    def slow(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = passes(*args, **kwargs)
        time.sleep(max(0.0, begin + share * device_s - time.perf_counter()))
        return result

    return slow


def compute_little() -> None:
    """Have a layer of GPT-2 compute one product, so that two cores can hold and send what large models do."""

    def forward(layer: Any, hidden_BTD: Any, **_: Any) -> Any:
        return hidden_BTD * layer.ln_1.weight

    patched: Any = GPT2Block
    patched.forward = forward


def read_spans(folder: Path) -> list[Span]:
    """Read the spans of all processes; a last line may be torn."""
    spans = []
    for path in folder.glob("*.timeline"):
        for line in path.read_text().splitlines():
            if line.endswith("]"):
                spans.append(Span(*json.loads(line)))
    return spans


def summarise_stage(spans: list[Span], num_peers: int, seconds: float) -> dict[str, float]:
    """The seconds of an average round at one stage, of all rounds that the spans are of.

    fill: from the update before it to the first pass; inside: from the first pass to the last one, and of that idle,
    by device; drain: from the last pass to the barrier; tail: how much sooner the first device ended than the last.
    """
    by_round = defaultdict(list)
    for span in spans:
        by_round[span.round_number].append(span)
    passes = [span for span in spans if span.what in ("forward", "backward")]
    rounds = sorted(by_round)
    inside, fill, drain = [], [], []
    for number in rounds:
        own = [span for span in by_round[number] if span.what in ("forward", "backward")]
        begin_s, end_s = min(span.begin_s for span in own), max(span.end_s for span in own)
        inside.append(end_s - begin_s)
        drain.append(_first(by_round[number], "barrier") - end_s)
        if number - 1 in by_round:
            fill.append(begin_s - max(span.end_s for span in by_round[number - 1] if span.what == "commit"))
    busy_s = sum(span.seconds for span in passes)
    figures = {
        "busy_share": busy_s / (seconds * num_peers),
        "fill_s": _mean(fill),
        "inside_s": mean(inside),
        "idle_inside_s": mean(inside) - busy_s / num_peers / len(rounds),
        "drain_s": mean(drain),
        **{f"{what}_s": _mean([span.seconds for span in spans if span.what == what]) for what in WAITS},
    }
    return {name: round(value, 4) for name, value in figures.items()}


def _first(spans: Iterable[Span], what: str) -> float:
    return min(span.begin_s for span in spans if span.what == what)


def _mean(values: list[float]) -> float:
    return mean(values) if values else 0.0
