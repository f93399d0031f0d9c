"""Further places for a run's metrics besides metrics.jsonl: TensorBoard and Weights & Biases, as --log-to names them.

Both are extras of the package and are imported when they are opened. Each has a thread of its own: whatever befalls
it then (a full disk, a network that hangs), the run goes on without it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import queue
import textwrap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from coordinator.watch.metrics_file import MetricsLine
from coordinator.watch.promises import Promises
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)

LoggerName = Literal["tensorboard", "wandb"]
# Lines that wait for a logger that is slower than the run.
MAX_WAITING_LINES = 1000
# Time for a logger to end: uploading the last lines may take a while, and a dead network for ever.
CLOSE_S = 30.0
WANDB_PROJECT = "swarm"


class StepLogger(ABC):
    """Takes the lines of metrics.jsonl as they come. One thread at a time.

    `round` always grows. `optimizer_step` goes back where the run does; then earlier lines of that step and of later
    steps are void.
    """

    @abstractmethod
    def write(self, line: MetricsLine) -> None:
        """Record the line of one optimizer step."""

    @abstractmethod
    def close(self) -> None:
        """Write what is still buffered, and end."""


def scalars(line: MetricsLine) -> dict[str, float]:
    """The numbers in a line of metrics.jsonl that can be plotted."""
    values: dict[str, float] = {
        "loss": line["loss"],
        "tokens_per_s": line["tokens_per_s"],
        "samples": line["samples"],
        "seconds": line["seconds"],
    }
    if "validation_loss" in line:
        values["validation_loss"] = line["validation_loss"]
    values |= {f"peers/stage{stage}": count for stage, count in enumerate(line["peers"])}
    shares = enumerate(line.get("busy_share", []))
    return values | {f"busy_share/stage{stage}": share for stage, share in shares if share is not None}


class TensorBoardLogger(StepLogger):
    """Event files in OUTPUT/tensorboard.

    Args:
        resume: go on with the events that are there, rather than hide them
    """

    def __init__(self, manifest: RunManifest, output: Path, resume: bool):
        self._folder = output / "tensorboard"
        self._last_step = -1 if resume else 0
        try:
            self._writer = self._open(None if resume else 0)
            self._writer.add_text(
                "manifest", textwrap.indent(json.dumps(manifest.model_dump(mode="json"), indent=2), "    ")
            )
            self._writer.flush()
        except OSError as error:
            raise UserError(
                f"--log-to tensorboard: cannot write to {self._folder}: {error.strerror}; free it, or name another "
                f"--output"
            ) from error

    def _open(self, void_from: int | None) -> SummaryWriter:
        """Begin another event file, which hides the steps that are void from TensorBoard."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self._folder, purge_step=void_from)

    def write(self, line: MetricsLine) -> None:
        """Record the line of one optimizer step."""
        step = line["optimizer_step"]
        if step <= self._last_step or self._last_step < 0:  # the run went back, perhaps unobserved
            self._writer.close()
            self._writer = self._open(step)
        self._last_step = step
        for name, value in scalars(line).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is still buffered, and end."""
        self._writer.close()


class WandbLogger(StepLogger):
    """A run of the project `swarm`; its id is kept in OUTPUT/wandb-id, and files in OUTPUT/wandb.

    Its plots are over `optimizer_step`, and still show the steps that a run gave up. The account, and whether anything
    goes to a server at all, are wandb's own settings: `wandb login`, WANDB_MODE=offline.

    Args:
        resume: go on with the run of the id that is there
    """

    def __init__(self, manifest: RunManifest, output: Path, resume: bool):
        import wandb

        id_file = output / "wandb-id"
        known = id_file.read_text(encoding="utf-8").strip() if resume and id_file.exists() else ""
        try:
            self._run = wandb.init(
                project=WANDB_PROJECT,
                name=manifest.name,
                id=known or None,
                resume="allow" if known else None,
                dir=output,
                config=manifest.model_dump(mode="json") | {"manifest_hash": manifest.hash},
                # The terminal is the live view's.
                settings=wandb.Settings(console="off"),
            )
            # wandb drops rows whose own step does not grow.
            self._run.define_metric("*", step_metric="optimizer_step")
            id_file.write_text(f"{self._run.id}\n", encoding="utf-8")
        except (wandb.Error, OSError) as error:
            raise UserError(
                f"--log-to wandb: cannot begin: {' '.join(str(error).split())}; log in with `wandb login`, or set "
                f"WANDB_MODE=offline"
            ) from error

    def write(self, line: MetricsLine) -> None:
        """Record the line of one optimizer step."""
        # Without `commit`, a row with a given step waits for the next one.
        self._run.log(scalars(line) | {"optimizer_step": line["optimizer_step"]}, step=line["round"], commit=True)

    def close(self) -> None:
        """Write what is still buffered, and end."""
        self._run.finish()


LOGGERS: dict[LoggerName, Callable[[RunManifest, Path, bool], StepLogger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
}


def check_installed(names: Iterable[LoggerName]) -> None:
    """Check that the packages of these loggers are installed.

    Raises:
        UserError: one is missing
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a mere folder of that name is none: wandb makes one
            raise UserError(f"--log-to {name} needs a package that is not installed: pip install 'swarm-train[{name}]'")


@contextlib.contextmanager
def open_loggers(
    names: Iterable[LoggerName],
    manifest: RunManifest,
    output: Path,
    resume: bool = False,
    promises: Promises | None = None,
) -> Iterator[Callable[[MetricsLine], None]]:
    """Open these loggers for a run, and yield a function that takes each new line, never waits and never raises.

    Open them after the last fork: this starts threads.

    Args:
        output: folder of metrics.jsonl
        resume: the run goes on from an earlier start
        promises: told of what is lost

    Raises:
        UserError: a logger cannot begin
    """
    promises = promises or Promises()
    names = list(dict.fromkeys(names))
    check_installed(names)
    with contextlib.ExitStack() as stack:
        loggers = [
            stack.enter_context(BackgroundLogger(name, LOGGERS[name](manifest, output, resume), promises))
            for name in names
        ]

        def write(line: MetricsLine) -> None:
            for logger in loggers:
                logger.write(line)

        yield write


class BackgroundLogger:
    """A context manager that feeds a logger from a thread."""

    def __init__(self, name: str, logger: StepLogger, promises: Promises):
        self._name = name
        self._logger = logger
        self._promises = promises
        self._lines: queue.SimpleQueue[MetricsLine | None] = queue.SimpleQueue()
        # A daemon: a logger that hangs must not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"log-{name}", daemon=True)
        self._num_refused = 0  # counted by the thread
        self._num_dropped = 0  # counted by the writer
        self._failure = ""  # the newest one

    @property
    def num_lost(self) -> int:
        """Lines that the logger refused or was too slow for."""
        return self._num_refused + self._num_dropped

    def __enter__(self) -> BackgroundLogger:
        self._thread.start()
        return self

    def write(self, line: MetricsLine) -> None:
        """Hand over a line; returns at once."""
        if self._lines.qsize() < MAX_WAITING_LINES:
            self._lines.put(line)
        else:
            self._num_dropped += 1
            self._warn_once(f"{MAX_WAITING_LINES} lines wait for it")

    def __exit__(self, *_: object) -> None:
        self._lines.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._failure = f"it did not end in {CLOSE_S:.0f} s"
            log.warning("log_unfinished logger=%s reason=%s", self._name, self._failure)
        if self.num_lost:
            log.warning("log_incomplete logger=%s lost_lines=%d", self._name, self.num_lost)
        if self._failure:
            lost = f"{self.num_lost} lines" if self.num_lost else "its end"
            self._promises.broken(f"--log-to {self._name} lacks {lost}", self._failure)

    def _work(self) -> None:
        while (line := self._lines.get()) is not None:
            self._num_refused += not self._try(partial(self._logger.write, line))
        self._try(self._logger.close)

    def _try(self, action: Callable[[], None]) -> bool:
        # A logger is somebody else's code: any error is possible, and none is worth a run.
        try:
            action()
        except Exception as error:
            self._warn_once(f"{type(error).__name__}: {error}")
            return False
        return True

    def _warn_once(self, reason: str) -> None:
        was_well, self._failure = not self._failure, " ".join(reason.split())
        if was_well:
            log.warning("log_failed logger=%s reason=%s; the run goes on", self._name, self._failure)
