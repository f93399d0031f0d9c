"""A finding: what one check of `swarm-peer doctor` says, in one line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"  # the peer could not take part


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """The result of a check.

    Attributes:
        check: the name of what was looked at, such as `disk`
        seen: what was seen there, in words
        remedy: the one thing to do; empty if there is nothing to do
    """

    check: str
    level: Level
    seen: str
    remedy: str = ""

    @property
    def text(self) -> str:
        """All of it but the check's name, in one line."""
        return f"{self.seen}: {self.remedy}" if self.remedy else self.seen


def fine(check: str, seen: str) -> CheckFinding:
    """A finding that needs nothing to be done."""
    return CheckFinding(check=check, level=Level.OK, seen=seen)


def warning(check: str, seen: str, remedy: str = "") -> CheckFinding:
    """A finding that the peer can take part with, if not well."""
    return CheckFinding(check=check, level=Level.WARNING, seen=seen, remedy=remedy)


def failure(check: str, seen: str, remedy: str = "") -> CheckFinding:
    """A finding that keeps the peer from taking part."""
    return CheckFinding(check=check, level=Level.FAILURE, seen=seen, remedy=remedy)


def can_take_part(findings: Iterable[CheckFinding]) -> bool:
    """Whether nothing was found that keeps the peer from taking part."""
    return all(finding.level is not Level.FAILURE for finding in findings)


def in_figures(number: float) -> str:
    """A number with its first three figures, such as 2,050 or 0.31."""
    rounded = float(f"{number:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"


def in_bytes(count: float) -> str:
    """A number of bytes as people write it, such as 3.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
