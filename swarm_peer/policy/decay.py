"""The decay of a `wsd` schedule: where it begins and ends, and how a run's restart carries the run key's word of it.

Nobody knows how long volunteers stay, so a run's operator may have the decay begin while the run goes on. All stages
must take every update at the same rate. So the word is a part of the restart that the run key has the run go on from:
what names the snapshots of the stages names the decay as well, behind them. The core carries it unread. Every head,
entry and state that follows a restart stands for it, so nobody makes an update of that time at another rate.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

# Behind the names of snapshots, in Restart.entries.
_WORD = re.compile(r"decay/(0|[1-9][0-9]{0,9})/([1-9][0-9]{0,9})")


class Decay(NamedTuple):
    """The end of a run at falling learning rates.

    Attributes:
        begins_at: the optimizer step of the weights that get its first update
        steps: optimizer steps
    """

    begins_at: int
    steps: int

    @property
    def end(self) -> int:
        """The optimizer step of the run's last weights."""
        return self.begins_at + self.steps


def names_in(entries: Sequence[str], num_stages: int) -> tuple[str, ...]:
    """The names of snapshots, by stage, of the entries of a restart."""
    return tuple(entries[:num_stages])


def decay_in(entries: Sequence[str], num_stages: int) -> Decay | None:
    """The decay that the entries of a restart name; None if the run key has said none."""
    words = entries[num_stages:]
    match = _WORD.fullmatch(words[0]) if len(words) == 1 else None
    return None if match is None else Decay(int(match[1]), int(match[2]))


def with_decay(names: Sequence[str], decay: Decay | None) -> tuple[str, ...]:
    """The entries of a restart that begins with these snapshots."""
    return (*names, *(() if decay is None else (f"decay/{decay.begins_at}/{decay.steps}",)))


def last_step_of(planned: int, entries: Sequence[str], num_stages: int) -> int:
    """The optimizer step of the last weights of a run that goes on from a restart with these entries.

    Args:
        planned: the last one by the run's manifest
    """
    decay = decay_in(entries, num_stages)
    return planned if decay is None else decay.end
