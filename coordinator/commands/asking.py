"""Prints what `local --ask` is for: the answers of a model before a run and after it, side by side."""

from __future__ import annotations

from pathlib import Path

from coordinator.commands.console import open_console
from coordinator.query.asking import Questions, read_questions
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.plain_text import without_controls


class Asking:
    """The questions of a file, and the answers of the model that a run begins with, which are printed at once.

    Raises:
        UserError: the file or the run is none to ask questions of
    """

    def __init__(self, resolved: ResolvedManifest, file: Path, cache_dir: Path | None):
        self._questions = Questions(resolved, read_questions(file), cache_dir)
        self._before = self._questions.ask_base()
        print("Before training, the model answers:")
        for question, answer in zip(self._questions.texts, self._before, strict=True):
            print(f"\n> {without_controls(question)}\n{without_controls(answer)}")
        print(flush=True)

    def compare(self, folder: Path) -> None:
        """Ask the trained model, and print its answers beside those before."""
        from rich import box
        from rich.table import Table

        table = Table("Question", "Before training", "After training", box=box.SIMPLE, show_lines=True)
        after = self._questions.ask(str(folder))
        for row in zip(self._questions.texts, self._before, after, strict=True):
            table.add_row(*map(without_controls, row))
        open_console().print(table, markup=False)
