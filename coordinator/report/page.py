"""The report of a run: one HTML file that needs nothing else, with all figures in it."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import ValidationError

from coordinator.report.figures import ACTIVITIES, draw_all, time_by_stage
from coordinator.report.run_folder import HOUR_S, RecordedEvent, RecordedRun, read_run
from coordinator.watch.what_is_trained import training_line
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError

REPORT_FILE = "report.html"
# More events would make a page that no browser likes; the newest ones are shown.
MAX_EVENTS = 2000

# Of each figure, its heading and what to see in it.
SECTIONS = {
    "loss": (
        "Loss",
        "Training loss of each optimizer step (thin: as it was; thick: the mean of some steps), and loss on held-out "
        "samples, over steps, time and tokens: the same steps take more time while peers are few.",
    ),
    "throughput": ("Throughput", "Tokens per second, the time included in which the run made no step."),
    "busy": (
        "Busy share of each stage",
        "How much of their time the devices of a stage's peers compute, in the mean. The busiest stage bounds the run; "
        "a stage far below the others has peers to spare.",
    ),
    "time": (
        "Where the time went",
        "What is not computing is time in which devices are idle: the round ends (peers wait for the last microbatches "
        "and average their gradients), peers join (they get their state), or no microbatch is there to compute.",
    ),
    "peers": (
        "Peers of each stage",
        "How many peers served each stage, as the height of its band, and below what happened. Where it is red, a "
        "stage had no peer, so the run waited.",
    ),
}


def write_report(
    folder: Path, output: Path | None = None, *, pngs: bool = False, price_per_peer_hour: float | None = None
) -> Path:
    """Write the report of a run from its folder alone.

    Args:
        output: the HTML file; report.html in the folder if not given
        pngs: write the figures beside it, too
        price_per_peer_hour: in any currency; None if nobody knows

    Returns:
        the HTML file

    Raises:
        UserError: the folder is not that of a run that has begun, matplotlib is not installed, or a file cannot be
            written
    """
    run = read_run(folder)
    output = output or folder / REPORT_FILE
    figures = draw_all(run)
    files = {output: render(run, figures, price_per_peer_hour).encode()}
    if pngs:
        files |= {output.with_name(f"{output.stem}-{name}.png"): png for name, png in figures.items()}
    for path, contents in files.items():
        try:
            path.write_bytes(contents)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; name another file with --to") from error
    return output


def render(run: RecordedRun, figures: Mapping[str, bytes], price_per_peer_hour: float | None) -> str:
    """The page as HTML. The template escapes all strings, since peers and other people have made some of them."""
    environment = Environment(
        loader=PackageLoader("coordinator.report", "."), autoescape=True, undefined=StrictUndefined
    )
    manifest, versions = (run.about.get(key) for key in ("manifest", "versions"))
    name = manifest.get("name") if isinstance(manifest, dict) else None
    sections = [
        {"name": key, "heading": heading, "text": text, "png": base64.b64encode(figures[key]).decode()}
        for key, (heading, text) in SECTIONS.items()
        if key in figures
    ]
    kinds = Counter(event.kind for event in run.events)
    shown = f", the newest {MAX_EVENTS} are listed" if len(run.events) > MAX_EVENTS else ""
    return environment.get_template("page.html").render(
        title=f"Run {name or run.folder.resolve().name}",
        state=_state(run),
        trains=_what_is_trained(run),
        facts=_facts(run, price_per_peer_hour),
        sections=sections,
        activities=ACTIVITIES,
        time_table=time_by_stage(run),
        events=[_row(run, event) for event in run.events[-MAX_EVENTS:]],
        events_summary=", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) + shown,
        versions=versions if isinstance(versions, dict) else {},
        manifest_hash=run.about.get("manifest_hash", ""),
        manifest=json.dumps(manifest, indent=2),
        folder=run.folder.resolve().name,  # the way to it is nobody else's business
        num_unread=run.num_unread,
        unit=run.unit[0],
    )


def _state(run: RecordedRun) -> str:
    wanted = _steps_wanted(run)
    begin, end = (_utc(time) for time in (run.begin, run.ends[-1]))
    if run.lines[0].time is None:
        return "When the run began is not recorded; its hours are the sum of its steps' times."
    if run.has_model:
        return f"It ran from {begin} to {end} (UTC), made its steps and saved its model."
    of_all = f" of {wanted}" if wanted else ""
    return (
        f"It began {begin} and made step {run.lines[-1].optimizer_step}{of_all} at {end} (UTC); it has saved no model."
    )


def _what_is_trained(run: RecordedRun) -> str:
    """Words for what the run trains; none if its folder tells nothing that this version can read."""
    try:
        manifest = RunManifest.model_validate(run.about.get("manifest"))
    except ValidationError:
        return ""
    return training_line(manifest)


def _steps_wanted(run: RecordedRun) -> int | None:
    manifest = run.about.get("manifest")
    training = manifest.get("training") if isinstance(manifest, dict) else None
    steps = training.get("steps") if isinstance(training, dict) else None
    return steps if isinstance(steps, int) else None


def _facts(run: RecordedRun, price_per_peer_hour: float | None) -> list[tuple[str, str]]:
    last, tokens = run.lines[-1], sum(line.tokens for line in run.lines)
    targets = sum(line.targets or 0 for line in run.lines)
    seconds = run.ends[-1] - run.begin
    held_out = [line.validation_loss for line in run.lines if line.validation_loss is not None]
    busy = [share for line in run.lines for share in line.busy_share if share is not None]
    facts = [
        ("Optimizer steps", f"{last.optimizer_step:,}"),
        ("Training loss at the end", f"{last.loss:.4f}"),
        ("Validation loss at the end", f"{held_out[-1]:.4f}" if held_out else "-"),
        ("Tokens", f"{tokens:,}"),
        *([("Tokens that were targets", f"{targets:,}")] if targets else []),
        ("Time", _duration(seconds)),
        ("Tokens per second", f"{tokens / seconds:,.0f}" if seconds else "-"),
        ("Busy share of all peers", f"{sum(busy) / len(busy):.0%}" if busy else "-"),
        ("Peer-hours", f"{run.peer_hours:,.2f}"),
    ]
    if price_per_peer_hour is not None:
        cost = price_per_peer_hour * run.peer_hours
        facts.append((f"Cost at {price_per_peer_hour:g} per peer-hour", f"{cost:,.2f}"))
        facts.append(("Cost of a million tokens", f"{cost / tokens * 1e6:,.4f}" if tokens else "-"))
    return facts


def _duration(seconds: float) -> str:
    if seconds < 2 * HOUR_S:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{seconds / HOUR_S:,.1f} hours"


def _utc(unix_s: float) -> str:
    try:
        return f"{datetime.fromtimestamp(unix_s, timezone.utc):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "at an unknown time"


def _row(run: RecordedRun, event: RecordedEvent) -> dict[str, Any]:
    peer = " ".join(part for part in (event.name, event.peer[-8:] if event.peer else None) if part)
    stage = "" if event.stage is None else event.stage
    elapsed = f"{run.elapsed(event.time):.2f}"
    return {
        "time": _utc(event.time),
        "elapsed": elapsed,
        "kind": event.kind,
        "stage": stage,
        "peer": peer,
        "text": event.text,
    }
