"""Collects the promises that a command has not kept: they are told when it ends, and are an error then.

While the run goes on, none of it is worth an end: a full disk costs a checkpoint, and not the run. But a command that
ends well has done what it was asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from swarm_peer.errors import SwarmError
from swarm_peer.policy.plain_text import plain_text

# Checkpoints that a line names; of more, the first and the last ones.
MOST_NAMED = 6
MAX_WORDS = 300


class NotKept(SwarmError):
    """The command has ended, and not all that it was asked for was done."""


class Promises:
    """Collects what was not done so far; a promise that is kept late is kept. Any thread may tell it of one."""

    def __init__(self) -> None:
        self._broken: dict[str, str] = {}  # what is not as it should be, in words, with the newest reason
        self._checkpoints: dict[int, tuple[str, bool]] = {}  # by optimizer step: why not, and whether that is final

    def broken(self, what: str, reason: object) -> None:
        """Note that something was not done, for now or for good.

        Args:
            what: a clause such as `metrics.jsonl lacks its last lines`
        """
        self._broken[what] = _in_words(reason)

    def kept(self, what: str) -> None:
        """Note that it was done after all."""
        self._broken.pop(what, None)

    def checkpoint_due(self, optimizer_step: int, reason: object) -> None:
        """Note that a checkpoint should be there and is not yet, and why, as far as it is known."""
        self._note(optimizer_step, reason, is_final=False)

    def checkpoint_failed(self, optimizer_step: int, reason: object) -> None:
        """Note that a checkpoint will not be written any more."""
        self._note(optimizer_step, reason, is_final=True)

    def _note(self, optimizer_step: int, reason: object, *, is_final: bool) -> None:
        self._checkpoints.pop(optimizer_step, None)  # the newest one comes last
        self._checkpoints[optimizer_step] = _in_words(reason), is_final

    def checkpoint_saved(self, optimizer_step: int) -> None:
        """Note that a checkpoint is there, or was another's to write."""
        self._checkpoints.pop(optimizer_step, None)

    def went_back(self, optimizer_step: int) -> None:
        """Note that the run has given up the weights after an optimizer step: nobody wants checkpoints of them."""
        self._checkpoints = {step: why for step, why in self._checkpoints.items() if step <= optimizer_step}

    def stops_early(self) -> None:
        """Note that the run goes on without this program: what is still under way is not to be told."""
        self._checkpoints = {step: why for step, why in self._checkpoints.items() if why[1]}

    def unkept(self) -> list[str]:
        """The promises that were not kept, each with its newest reason."""
        told = [f"{what} ({reason})" for what, reason in self._broken.items()]
        if self._checkpoints:
            steps, (reason, _) = sorted(self._checkpoints), list(self._checkpoints.values())[-1]
            some = "1 checkpoint was not written, of optimizer step"
            many = f"{len(steps)} checkpoints were not written, of optimizer steps"
            told.insert(0, f"{some if len(steps) == 1 else many} {_listed(steps)} ({reason})")
        return told

    @contextmanager
    def told_at_end(self) -> Iterator[None]:
        """While the context is open, promises are made; when it is left, those that were not kept are told.

        Raises:
            NotKept: there are some, and nothing else has gone wrong
        """
        try:
            yield
        except Exception:  # it goes on as it came
            for line in self.unkept():
                print(f"Not done: {line}.", file=sys.stderr, flush=True)
            raise
        if told := self.unkept():
            raise NotKept(f"not all that was asked for was done: {'; '.join(told)}")


def _listed(steps: list[int]) -> str:
    named = [str(step) for step in steps]
    if len(steps) > MOST_NAMED:
        named = [*named[: MOST_NAMED // 2], "…", *named[-(MOST_NAMED // 2) :]]
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"


def _in_words(reason: object) -> str:
    """A reason, which may quote peers, fit to be shown."""
    return plain_text(str(reason), MAX_WORDS).rstrip(".") or "nobody knows why"
