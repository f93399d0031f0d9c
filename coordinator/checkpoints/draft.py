"""A checkpoint that is being written, one stage after the other: a model may be larger than this machine's memory.

Owns the order in which files are written. Must not know where states come from (filler.py), nor which checkpoints may
go (store.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from safetensors import SafetensorError
from safetensors.torch import save_file

from coordinator.checkpoints.files import FileEntry, FileStore
from coordinator.checkpoints.folder import CONTENTS, MANIFEST, Contents, StateFields, one_line, stage_file
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.runtime.state.index import StageState


class CheckpointDraft:
    """The files that there are of a checkpoint. Before `finish` they are none, and then they are complete.

    The constructor, `put`, `finish` and `discard` wait for the store: call them from a worker thread. `put` may be
    called from several at once.

    Args:
        folder: where the checkpoint will be; nothing is there yet

    Raises:
        UserError: the folder could not be made
    """

    def __init__(self, files: FileStore, folder: str, optimizer_step: int, manifest: RunManifest):
        self.folder = folder
        self.optimizer_step = optimizer_step
        self._files = files
        self._partial = files.partial_of(folder)
        self._manifest = manifest
        self._stages: dict[int, StateFields] = {}
        self._entries: dict[str, FileEntry] = {}
        content = manifest.canonical_json()
        with self._errors():
            files.begin(self._partial, first=CONTENTS)
            self._entries[MANIFEST] = files.write(f"{self._partial}/{MANIFEST}", lambda path: path.write_bytes(content))

    def lacking(self) -> list[int]:
        """The stages whose states have not been put here."""
        return [stage for stage in range(self._manifest.stages.count) if stage not in self._stages]

    def history_hash(self, stage: int) -> str:
        """The history hash of a state that has been put here."""
        return self._stages[stage].history_hash

    def put(self, stage: int, state: StageState) -> None:
        """Write the state of a stage, in place of another one.

        Raises:
            UserError: it could not be written; it may be tried again
        """
        name, tensors = stage_file(stage), {key: value.cpu().contiguous() for key, value in state.tensors.items()}
        notes = {"format": "pt", "manifest": self._manifest.hash, "history_hash": state.history_hash}
        notes |= {"stage": str(stage), "optimizer_step": str(self.optimizer_step), "round": str(state.round_number)}
        with self._errors():
            path = f"{self._partial}/{name}"
            self._entries[name] = self._files.write(path, partial(save_file, tensors, metadata=notes))
        self._stages[stage] = StateFields.model_validate(state, from_attributes=True)

    def drop(self, stage: int) -> None:
        """Have a stage's state lack again."""
        del self._stages[stage]

    def finish(self) -> int:
        """Make it a checkpoint. It appears complete or not at all. Returns the number of its bytes.

        Raises:
            UserError: it could not be written; it may be tried again
        """
        assert not self.lacking(), "one state for each stage"
        fields = tuple(self._stages[stage] for stage in sorted(self._stages))
        assert len({state.round_number for state in fields}) == 1, "states of one round"
        step, manifest_hash = self.optimizer_step, self._manifest.hash
        contents = Contents(optimizer_step=step, manifest=manifest_hash, stages=fields, files=self._entries)
        text = contents.model_dump_json(indent=2).encode()
        with self._errors():
            self._files.write(f"{self._partial}/{CONTENTS}", lambda path: path.write_bytes(text))
            self._files.publish(self._partial, self.folder)
        return sum(entry.size for entry in self._entries.values())

    def discard(self) -> None:
        """Remove what has been written, if the store lets it."""
        with suppress(OSError):
            self._files.remove(self._partial, first=CONTENTS)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"cannot write checkpoint {self.folder} ({one_line(error)}): check space, permissions and network"
            ) from error
