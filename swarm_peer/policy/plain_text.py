"""Makes text of peers fit to be shown: they may announce any characters."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

# Control, format (among them those that turn the direction of writing), surrogate, private and unassigned characters.
UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# More combining marks than this on one character reach into the lines above and below.
MAX_MARKS = 2


# Peers announce the same words again and again.
@lru_cache(maxsize=8192)
def plain_text(text: str, max_length: int) -> str:
    """The text on one line without characters that cannot be seen, cut to a length."""
    kept: list[str] = []
    marks = 0
    for character in text[: 8 * max_length]:
        category = unicodedata.category(character)
        marks = marks + 1 if category.startswith("M") else 0
        if marks <= MAX_MARKS:
            kept.append(" " if category in UNSEEN else character)
    cleaned = " ".join("".join(kept).split())
    return cleaned if len(cleaned) <= max_length else cleaned[: max_length - 1] + "…"


def without_controls(text: str) -> str:
    """The text, or a piece of it, without control characters other than tabs and ends of lines."""
    return "".join(char for char in text if char in "\t\n" or unicodedata.category(char) != "Cc")
