"""The decay of a `wsd` schedule: where it begins and ends, and how the run key says so.

Nobody knows how long volunteers stay, so a run's operator may have the decay begin while the run goes on. All seats of
a stage must make an update at the same rate. So the word of a decay stands in an epoch that the run key has signed, and
in those that follow (protocol/epochs.py: Epoch.word), and each update is made by the word of the epoch in which it was
agreed: nobody needs to have heard it in time. It names an optimizer step that the run comes to a little later, so that
all stages begin at the same one.
"""

from __future__ import annotations

import re
from typing import NamedTuple

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

    @property
    def word(self) -> str:
        """As the run key says it."""
        return f"decay/{self.begins_at}/{self.steps}"


def decay_in(word: str) -> Decay | None:
    """The decay that an epoch's word tells of; None if the run key has said none."""
    match = _WORD.fullmatch(word)
    return None if match is None else Decay(int(match[1]), int(match[2]))


def last_step_of(planned: int, word: str) -> int:
    """The optimizer step of a run's last weights.

    Args:
        planned: by the run's manifest
        word: what the run key has said
    """
    decay = decay_in(word)
    return planned if decay is None else decay.end
