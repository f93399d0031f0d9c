"""The terminal on which a person reads what a model writes, and answers."""

from __future__ import annotations

import sys
from collections.abc import Callable

from swarm_peer.policy.plain_text import without_controls


class Terminal:
    """Standard input and output, and standard error for what is not the model's.

    Args:
        on_use: called before each use, to take away what waits on the same terminal
        input_fd: a file descriptor to read from
    """

    def __init__(self, on_use: Callable[[], None], input_fd: int = 0):
        self._on_use = on_use
        # Without a buffer: a thread that is left behind in a read of Python's own standard input holds a lock, and the
        # process cannot end.
        self._input = open(input_fd, "rb", buffering=0, closefd=False)  # noqa: SIM115

    def read(self) -> str:
        """The next line, without space around it; empty at the end of the input. Blocks, so call it in a thread."""
        if self._input.isatty():
            self._on_use()
            print("> ", end="", file=sys.stderr, flush=True)
        return self._input.readline().decode(errors="replace").strip()

    def write(self, text: str) -> None:
        """Write a piece of text, without what would command the terminal."""
        self._on_use()
        print(without_controls(text), end="", flush=True)

    def tell(self, sentence: str) -> None:
        """Write a remark that is not the model's."""
        self._on_use()
        print(without_controls(sentence), file=sys.stderr, flush=True)
