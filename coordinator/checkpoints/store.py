"""All checkpoints of a run: which of them is the newest good one, and which may go.

One process writes to a store. All methods wait for the store: call them from a worker thread.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from coordinator.checkpoints.file_store import PARTIAL, FileStore
from coordinator.checkpoints.folder import (
    CONTENTS,
    FOLDER,
    Checkpoint,
    CheckpointDamaged,
    CheckpointIncomplete,
    CheckpointUnfit,
    CheckpointUnread,
    Fits,
    age_of,
    folder_name,
    is_checkpoint_name,
    mark_diverged,
    one_line,
    open_checkpoint,
    optimizer_step_of,
    round_of,
    write_checkpoint,
)
from coordinator.watch.run_file import CHECKPOINTS
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.policy.run_progress import MAX_ROUND
from swarm_peer.runtime.state.index import StageState

log = logging.getLogger(__name__)

# Unless somebody asks for another number.
KEPT_CHECKPOINTS = 3

LEFTOVER = re.compile(FOLDER.pattern + re.escape(PARTIAL))


class CheckpointStore:
    """The checkpoints in one base folder.

    Args:
        url: a path, or an address that fsspec understands
        keep: number of complete checkpoints that `prune` leaves

    Attributes:
        url: as it was given

    Raises:
        UserError: the address cannot work
    """

    def __init__(self, url: str, keep: int = KEPT_CHECKPOINTS):
        assert keep >= 1, "the newest checkpoint is never removed"
        self.url = url
        self._keep = keep
        self._files = FileStore(url)

    def save(self, optimizer_step: int, manifest: RunManifest, stages: Sequence[StageState]) -> str:
        """Write a checkpoint, then prune; returns its address. It appears complete or not at all.

        Args:
            optimizer_step: of the states; a checkpoint of the same number is replaced, and stays until then
            stages: one state for each stage, all of the same round

        Raises:
            UserError: it could not be written; those that are there are as good as before
        """
        assert len(stages) == manifest.stages.count, "one state for each stage"
        assert len({state.round_number for state in stages}) == 1, "states of one round"
        folder = self._free_folder(optimizer_step)
        partial = self._files.partial_of(folder)
        try:
            self._files.begin(partial, first=CONTENTS)
            num_bytes = write_checkpoint(self._files, partial, optimizer_step, manifest, stages)
            self._files.publish(partial, folder)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):  # the disk may be full of it
                self._files.remove(partial, first=CONTENTS)
            raise UserError(
                f"cannot write checkpoint {folder} ({one_line(error)}): check space, permissions and network"
            ) from error
        log.info("checkpoint_saved path=%s optimizer_step=%d bytes=%d", folder, optimizer_step, num_bytes)
        try:
            self.prune(known_good=folder)
        except (OSError, UserError) as error:
            log.warning("checkpoints_not_pruned path=%s reason=%s", self.url, one_line(error))
        return self._files.address(folder)

    @property
    def local_folder(self) -> Path | None:
        """The base folder; None if it is not on this machine."""
        return Path(self._files.base) if self._files.is_local else None

    @property
    def is_empty(self) -> bool:
        """Whether there are no checkpoints, not even unfinished ones. Raises UserError if the store does not answer."""
        return not self._folders()

    def check_empty(self) -> None:
        """Check, for a run that begins anew, that here are no checkpoints of another run.

        The rounds of the run begin at 0 once more: until they pass those of the other run, `newest` takes the other
        run's checkpoints, and `prune` keeps these in place of the run's own.

        Raises:
            UserError: there are some, or the store does not answer
        """
        if not self.is_empty:
            raise UserError(
                f"{self.url} has checkpoints of an earlier run, and this run begins anew: name another folder or URL "
                f"with --checkpoints, or go on from the earlier run with --resume {self.url}"
            )

    def newest(self, manifest: RunManifest | None = None) -> Checkpoint | None:
        """The newest good checkpoint; None if none was ever completed.

        Args:
            manifest: take none of another run

        Raises:
            UserError: there are checkpoints, and none of them is good; or the store does not answer, or does not give
                one that may be the newest
        """
        reasons: list[str] = []
        newest = next(self._good(manifest, reasons, may_skip_unread=False), None)
        if newest is None and reasons:
            raise UserError(
                f"none of the {len(reasons)} checkpoints in {self.url} can be used, the newest because {reasons[0]}: "
                f"restore its files, or name another folder"
            )
        return newest

    def newest_that(self, fits: Fits, manifest: RunManifest) -> Checkpoint | None:
        """The newest good checkpoint that fits; None if there is none.

        Args:
            fits: tells from an optimizer step and a round; the files of others are not read

        Raises:
            UserError: the store does not answer
        """
        return next(self._good(manifest, [], fits), None)

    def _good(
        self,
        manifest: RunManifest | None,
        reasons: list[str],
        fits: Fits = lambda *_: True,
        *,
        may_skip_unread: bool = True,
    ) -> Iterator[Checkpoint]:
        """Open one good checkpoint after another; `reasons` gets why others are not good."""
        # Damaged ones come first: it is told which were passed over.
        for folder in sorted(self._folders(), key=self._age_or_newest, reverse=True):
            try:
                yield open_checkpoint(self._files, folder, manifest, fits)
            except CheckpointUnfit as error:
                log.debug("checkpoint_passed_over path=%s reason=%s", folder, error.reason)
                reasons.append(error.reason)
            except CheckpointDamaged as error:
                if isinstance(error, CheckpointUnread) and not may_skip_unread:
                    raise UserError(
                        f"checkpoint {folder} may be the newest, and {error.reason}: try again, or name another of the "
                        f"folders in {self.url}"
                    ) from error
                log.warning("checkpoint_damaged path=%s reason=%s", folder, error.reason)
                if not isinstance(error, CheckpointIncomplete):
                    reasons.append(error.reason)

    def itself(self) -> Checkpoint | None:
        """The checkpoint that the base folder itself is, under whatever name; None if it is none.

        Raises:
            UserError: it is damaged, or the store does not answer
        """
        return open_checkpoint(self._files, self._files.base) if self._is_complete(self._files.base) else None

    def set_aside(self, fits: Fits) -> None:
        """Mark complete checkpoints that fit as those of broken weights: nobody goes on from them any more.

        Args:
            fits: tells from an optimizer step and a round

        Raises:
            UserError: the store does not answer
        """
        for folder in filter(self._is_complete, self._folders()):
            try:
                if fits(optimizer_step_of(folder), round_of(self._files, folder, -1)):
                    mark_diverged(self._files, folder)
                    log.warning("checkpoint_set_aside path=%s reason=its weights have diverged", folder)
            except OSError as error:
                raise UserError(f"cannot mark {folder} ({one_line(error)}): check permissions and network") from error

    def named(self, name: str) -> Checkpoint:
        """The checkpoint in the folder of this name, or the one of the same optimizer step that has replaced it.

        Raises:
            UserError: there is none, or it is damaged
        """
        for folder in self._folders():
            if folder.rpartition("/")[2] == name:
                return open_checkpoint(self._files, folder)
        return self.at(optimizer_step_of(name))

    def at(self, optimizer_step: int) -> Checkpoint:
        """The checkpoint of an optimizer step.

        Raises:
            UserError: there is none, or it is damaged
        """
        folders = self._folders()
        found = [folder for folder in folders if optimizer_step_of(folder) == optimizer_step]
        if not found:
            known = ", ".join(map(str, sorted({optimizer_step_of(folder) for folder in folders}))) or "none"
            raise UserError(
                f"{self.url} has no checkpoint of step {optimizer_step}: name one of those it has ({known})"
            )
        complete = [folder for folder in found if self._is_complete(folder)]
        return open_checkpoint(self._files, (complete or found)[0])

    def prune(self, known_good: str | None = None) -> None:
        """Remove all but the newest complete checkpoints, and the remains of saves that were cut off.

        If all that would stay are damaged, the newest good one stays, too; if none is good, all stay. One that cannot
        be read stays as well, beside the others: the store may give it later.

        Args:
            known_good: the checkpoint that was just saved; it stays, also where the run has gone back and those of
                later optimizer steps are there

        Raises:
            UserError, OSError: the store does not answer
        """
        folders = self._folders()
        complete = [folder for folder in folders if self._is_complete(folder)]
        if not complete:
            return
        # Of each number the one that replaced the others.
        latest = {optimizer_step_of(folder): folder for folder in reversed(complete)}
        ages, stay = dict[str, tuple[int, tuple[int, int]]](), [*filter(None, [known_good])]
        for folder in latest.values():
            try:
                ages[folder] = self._age_in_run(folder, -1)
            except OSError as error:
                log.warning("checkpoint_not_read path=%s reason=%s", folder, one_line(error))
                stay.append(folder)
        stay += sorted(ages, key=ages.__getitem__)[-self._keep :]
        surplus = [folder for folder in complete if folder not in stay]
        if surplus and known_good is None and not any(self._is_good(folder) for folder in stay):
            good = next((folder for folder in surplus if self._is_good(folder)), None)
            surplus = [folder for folder in surplus if good not in (folder, None)]
        cut_off = [folder for folder in folders if folder not in (*complete, known_good)]
        leftovers = [path for name, path in self._files.folders().items() if LEFTOVER.fullmatch(name)]
        for folder in (*cut_off, *leftovers, *surplus):
            self._files.remove(folder, first=CONTENTS)
            log.info("checkpoint_removed path=%s", folder)

    def _folders(self) -> list[str]:
        """Folders whose names are those of checkpoints, newest first."""
        try:
            found = self._files.folders()
        except OSError as error:
            raise UserError(
                f"cannot list {self.url} ({one_line(error)}): correct the address, or check permissions and network"
            ) from error
        return sorted((path for name, path in found.items() if FOLDER.fullmatch(name)), key=age_of, reverse=True)

    def _age_in_run(self, folder: str, unknown: int) -> tuple[int, tuple[int, int]]:
        """Sort key of checkpoints. Rounds count on where a run is resumed from an earlier step, and steps do not."""
        return round_of(self._files, folder, unknown), age_of(folder)

    def _age_or_newest(self, folder: str) -> tuple[int, tuple[int, int]]:
        try:
            return self._age_in_run(folder, MAX_ROUND)
        except OSError:
            return MAX_ROUND, age_of(folder)

    def _free_folder(self, optimizer_step: int) -> str:
        """Where a checkpoint goes: beside complete ones of its number, since no store replaces a folder in one step."""
        same = [folder for folder in self._folders() if optimizer_step_of(folder) == optimizer_step]
        versions = [age_of(folder)[1] for folder in same if self._is_complete(folder)]
        return f"{self._files.base}/{folder_name(optimizer_step, max(versions, default=-1) + 1)}"

    def _is_complete(self, folder: str) -> bool:
        try:
            return self._files.exists(f"{folder}/{CONTENTS}")
        except OSError as error:
            raise UserError(f"cannot look into {folder} ({one_line(error)}): check permissions and network") from error

    def _is_good(self, folder: str) -> bool:
        try:
            open_checkpoint(self._files, folder)
        except CheckpointDamaged:
            return False
        return True


def find_checkpoint(url: str, optimizer_step: int | None = None) -> Checkpoint:
    """A checkpoint to read: of a base folder the newest good one, or that of a certain step; or one folder itself.

    Args:
        url: of these folders, or of a run's own, whose checkpoints are below it

    Raises:
        UserError: there is none, or it is damaged
    """
    if (itself := _checkpoint_itself(url)) is not None:
        if optimizer_step not in (None, itself.optimizer_step):
            raise UserError(
                f"--step {optimizer_step}: {url} is the checkpoint of step {itself.optimizer_step}; leave one of them "
                f"out"
            )
        return itself
    store, below = CheckpointStore(url), CheckpointStore(f"{url.rstrip('/')}/{CHECKPOINTS}")
    if store.is_empty and not below.is_empty:
        store = below
    if optimizer_step is not None:
        return store.at(optimizer_step)
    checkpoint = store.newest()
    if checkpoint is None:
        raise UserError(
            f"there are no checkpoints in {url}: correct the path; a run that was stopped before its first one, or "
            f"begun with --checkpoint-every 0, or by swarm-coordinator local without it, has written none"
        )
    return checkpoint


def _checkpoint_itself(url: str) -> Checkpoint | None:
    """The checkpoint whose folder this is, or one that has replaced it; None if it is no checkpoint's folder."""
    if not is_checkpoint_name(url.rstrip("/")):
        return CheckpointStore(url).itself()
    base, _, name = url.rstrip("/").rpartition("/")
    return CheckpointStore(base or ("/" if url.startswith("/") else ".")).named(name)
