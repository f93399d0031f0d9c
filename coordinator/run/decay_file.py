"""decay.json in a run's folder: the decay that its operator asks for, and then the one that its coordinator has begun.

The command `decay` writes the first, and the coordinator that serves the run from this folder the second.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm_peer.config import MAX_STEPS
from swarm_peer.errors import UserError
from swarm_peer.files import replace_file
from swarm_peer.policy.decay import Decay

DECAY = "decay.json"


class DecayNote(BaseModel):
    """A decay that is asked for, or has begun.

    Attributes:
        steps: optimizer steps that it lasts
        begins_at: optimizer step at which it has begun; None while it is only asked for
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(ge=1, le=MAX_STEPS)
    begins_at: int | None = Field(None, ge=0, le=MAX_STEPS)

    @property
    def decay(self) -> Decay | None:
        """The decay, once it has begun."""
        return None if self.begins_at is None else Decay(self.begins_at, self.steps)


class DecayFile:
    """The note in a run's folder. Any thread may use it.

    Raises:
        UserError: from each method: the file cannot be read, is damaged, or cannot be written
    """

    def __init__(self, output: Path):
        self._path = output / DECAY

    def read(self) -> DecayNote | None:
        """The note; None if there is none."""
        try:
            return DecayNote.model_validate_json(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValidationError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {self._path}: mend it, or remove it ({type(error).__name__})") from error

    def write(self, note: DecayNote) -> None:
        """Replace the note, at once."""
        try:
            replace_file(self._path, note.model_dump_json() + "\n")
        except OSError as error:
            raise UserError(f"cannot write {self._path} ({error.strerror})") from error

    def remove(self) -> None:
        """Have no note, if there is one."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"cannot remove {self._path} ({error.strerror})") from error
