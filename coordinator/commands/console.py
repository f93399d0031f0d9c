"""Where commands print their tables."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Wider than any table of ours.
FILE_COLUMNS = 200


def open_console() -> Console:
    """Open a console as wide as its terminal. In a file or a pipe, nothing is wrapped at 80 columns."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=FILE_COLUMNS)
