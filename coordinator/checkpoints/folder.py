"""The contents of one checkpoint: how they are written, and checked before they are used.

A folder `step-00000123` holds `stage-000.safetensors` and so on (weights and optimizer) and `manifest.json`. Size and
SHA-256 of each stand in `checkpoint.json`, with the parts of each state that are no tensors, such as the sample ledger.
It is written last: without it, the folder is no checkpoint. Where a run has gone back and comes to the same number
again, its new checkpoint is `step-00000123.1` and so on; when that is whole, the older one goes. Nothing is unpickled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from coordinator.checkpoints.file_store import FileEntry, FileStore, describe_file
from swarm_peer.config import RunManifest
from swarm_peer.config_errors import describe
from swarm_peer.errors import UserError
from swarm_peer.policy.timeline import FIRST_TIMELINE, Timeline
from swarm_peer.runtime.state.index import StageState
from swarm_peer.wire.messages import MAX_ENTRY_BYTES

CONTENTS, MANIFEST = "checkpoint.json", "manifest.json"
# Beside them, once the run has shown that these weights are broken.
DIVERGED = "diverged"
FOLDER = re.compile(r"step-(\d{8}|[1-9]\d{8,11})(?:\.([1-9]\d{0,8}))?")
# Tells from an optimizer step, and the round that it begins, whether a checkpoint is of use.
Fits = Callable[[int, int], bool]
# Size limit of a file of JSON; the sample ledger is the largest part.
MAX_JSON_BYTES = 64 * 2**20


class CheckpointDamaged(UserError):
    """A checkpoint that cannot be used.

    Attributes:
        reason: why
    """

    def __init__(self, path: str, reason: str):
        super().__init__(f"checkpoint {path} cannot be used ({reason}): take another one, or restore its files")
        self.reason = reason


class CheckpointUnfit(CheckpointDamaged):
    """It is not one that was looked for; its files have not been read."""


class CheckpointIncomplete(CheckpointDamaged):
    """Its save has not ended, or was cut off."""


class CheckpointUnread(CheckpointDamaged):
    """The store does not give its files now, and may give them later."""


_FROZEN = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class StateFields(BaseModel):
    """All of a StageState but its tensors."""

    model_config = _FROZEN
    round_number: int
    history_hash: str
    timeline: Timeline = FIRST_TIMELINE
    ledger: bytes = b""
    entry: bytes = Field(b"", max_length=MAX_ENTRY_BYTES)


class Contents(BaseModel):
    """checkpoint.json. `stages` has all of each StageState but its tensors."""

    model_config = _FROZEN
    format: Literal[3] = 3
    optimizer_step: int = Field(ge=0, lt=10**12)
    manifest: str
    stages: tuple[StateFields, ...]
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were all whole when it was opened.

    Attributes:
        optimizer_step: updates that its weights have had
    """

    path: str
    optimizer_step: int
    manifest: RunManifest
    _files: FileStore
    _contents: Contents

    @property
    def address(self) -> str:
        """Where it can be opened from any folder; `path` lacks the protocol of a store that is not a disk."""
        return str(Path(self.path).absolute()) if self._files.is_local else self._files.address(self.path)

    @property
    def round_number(self) -> int:
        """The round that its states begin."""
        return self._contents.stages[0].round_number

    @property
    def entries(self) -> tuple[bytes, ...]:
        """By stage, the entry that names its state; empty where none does."""
        return tuple(fields.entry for fields in self._contents.stages)

    def load_stage(self, stage: int) -> StageState:
        """The state of one stage.

        Raises:
            CheckpointDamaged: its file has changed since, or holds no tensors
        """
        name = _stage_file(stage)
        try:
            with self._files.on_disk(f"{self.path}/{name}") as path:
                with path.open("rb") as file:
                    if describe_file(file) != self._contents.files[name]:
                        raise CheckpointDamaged(self.path, f"{name} has changed since it was checked")
                with safe_open(path, framework="pt") as content:
                    # Copies, since the tensors lie in the file's memory map.
                    tensors = {key: content.get_tensor(key).clone() for key in content.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointDamaged(self.path, f"{name}: {one_line(error)}") from error
        return StageState(**dict(self._contents.stages[stage]), tensors=tensors)


def write_checkpoint(
    files: FileStore, folder: str, optimizer_step: int, manifest: RunManifest, stages: Sequence[StageState]
) -> int:
    """Fill a folder that FileStore.begin has made; returns how many bytes it has.

    Raises:
        OSError, SafetensorError: it could not be written
    """
    manifest_json = manifest.canonical_json()
    entries = {MANIFEST: files.write(f"{folder}/{MANIFEST}", lambda path: path.write_bytes(manifest_json))}
    for stage, state in enumerate(stages):
        name, tensors = _stage_file(stage), {key: value.cpu().contiguous() for key, value in state.tensors.items()}
        notes = {"format": "pt", "manifest": manifest.hash, "history_hash": state.history_hash}
        notes |= {"stage": str(stage), "optimizer_step": str(optimizer_step), "round": str(state.round_number)}
        entries[name] = files.write(f"{folder}/{name}", partial(save_file, tensors, metadata=notes))
    fields = tuple(StateFields.model_validate(state, from_attributes=True) for state in stages)
    contents = Contents(optimizer_step=optimizer_step, manifest=manifest.hash, stages=fields, files=entries)
    text = contents.model_dump_json(indent=2).encode()
    files.write(f"{folder}/{CONTENTS}", lambda path: path.write_bytes(text))
    return sum(entry.size for entry in entries.values())


def mark_diverged(files: FileStore, folder: str) -> None:
    """Mark a checkpoint as one of broken weights: it is not opened any more.

    Raises:
        OSError: the store does not take it
    """
    files.write(
        f"{folder}/{DIVERGED}", lambda path: path.write_text("no loss of these weights was finite\n", encoding="utf-8")
    )


def round_of(files: FileStore, folder: str, unknown: int) -> int:
    """The round that a checkpoint's states begin; `unknown` if its files do not tell.

    Raises:
        OSError: the store does not answer
    """
    try:
        stages = Contents.model_validate_json(files.read(f"{folder}/{CONTENTS}", MAX_JSON_BYTES)).stages
    except (FileNotFoundError, ValueError):  # pydantic's errors are among the latter
        return unknown
    return stages[0].round_number if stages else unknown


def open_checkpoint(
    files: FileStore, folder: str, wanted: RunManifest | None = None, fits: Fits = lambda *_: True
) -> Checkpoint:
    """Compare all files of a checkpoint with their hashes.

    Args:
        wanted: refuse a checkpoint of another run
        fits: refuse one whose optimizer step and round do not fit

    Raises:
        CheckpointUnfit: as these arguments say
        CheckpointUnread: a file cannot be read
        CheckpointDamaged: a file is missing, has changed, or does not belong to it
    """
    name = CONTENTS
    try:
        if not files.exists(f"{folder}/{name}"):
            raise CheckpointIncomplete(folder, f"it has no {name}")
        if files.exists(f"{folder}/{DIVERGED}"):
            raise CheckpointDamaged(folder, "its run has shown that these weights have diverged")
        contents = Contents.model_validate_json(files.read(f"{folder}/{name}", MAX_JSON_BYTES))
        # Names that lead elsewhere are none of these.
        expected = {MANIFEST, *(_stage_file(stage) for stage in range(len(contents.stages)))}
        named_step = optimizer_step_of(folder) if is_checkpoint_name(folder) else contents.optimizer_step
        if set(contents.files) != expected or contents.optimizer_step != named_step:
            raise CheckpointDamaged(folder, f"{name} does not belong to it")
        if wanted is not None and contents.manifest != wanted.hash:
            raise CheckpointUnfit(folder, f"it is of manifest {contents.manifest}, and the run's is {wanted.hash}")
        if contents.stages and not fits(contents.optimizer_step, contents.stages[0].round_number):
            raise CheckpointUnfit(folder, "the run has not come to it, or has given it up")
        for name, entry in contents.files.items():
            found = files.describe(f"{folder}/{name}")
            if found.size != entry.size:
                raise CheckpointDamaged(folder, f"{name} has {found.size} bytes, and should have {entry.size}")
            if found != entry:
                raise CheckpointDamaged(folder, f"{name} does not match its hash")
        name = MANIFEST
        manifest = RunManifest.model_validate_json(files.read(f"{folder}/{name}", MAX_JSON_BYTES))
    except ValidationError as error:
        raise CheckpointDamaged(folder, f"{name}: {describe(error):.300}") from error
    except (FileNotFoundError, ValueError) as error:
        raise CheckpointDamaged(folder, f"{name}: {one_line(error)}") from error
    except OSError as error:
        raise CheckpointUnread(folder, f"{name} cannot be read: {one_line(error)}") from error
    if len(contents.stages) != manifest.stages.count:
        raise CheckpointDamaged(folder, f"its files do not fit its manifest of {manifest.stages.count} stages")
    return Checkpoint(folder, contents.optimizer_step, manifest, files, contents)


def folder_name(optimizer_step: int, version: int) -> str:
    """The name of a checkpoint's folder; `version` counts the checkpoints of this optimizer step before it."""
    return f"step-{optimizer_step:08d}" + (f".{version}" if version else "")


def is_checkpoint_name(folder: str) -> bool:
    """Whether a folder has the name of a checkpoint, rather than one that a person has given it."""
    return FOLDER.fullmatch(folder.rpartition("/")[2]) is not None


def optimizer_step_of(folder: str) -> int:
    """The optimizer step in a checkpoint's name."""
    return age_of(folder)[0]


def age_of(folder: str) -> tuple[int, int]:
    """Optimizer step and version in a checkpoint's name; the later of two checkpoints has the greater pair."""
    match = FOLDER.fullmatch(folder.rpartition("/")[2])
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def one_line(error: Exception) -> str:
    """The error's text in one line of limited length."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _stage_file(stage: int) -> str:
    return f"stage-{stage:03d}.safetensors"
