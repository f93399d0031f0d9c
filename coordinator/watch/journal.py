"""events.jsonl: what has happened to a run, one event a line, kept over restarts of its coordinator.

It is for people alone: whatever goes wrong with the file is logged, and the run goes on.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast, get_args

from coordinator.watch.happenings import Event, EventKind, Happenings, make_event, standing
from coordinator.watch.run_watch import RunWatch
from swarm_peer.files import replace_file

log = logging.getLogger(__name__)

EVENTS = "events.jsonl"
# Some 4000 events. When the file is longer, its older half goes, which holds the event loop up for some 30 ms.
MAX_BYTES = 1024 * 1024
# Kept in memory, for those who look.
NEWEST_KEPT = 300


def read_events(folder: Path) -> list[Event]:
    """The events in a run's folder, the oldest first; lines that are no events are left out.

    Raises:
        OSError: the file is there and cannot be read
    """
    try:
        lines = (folder / EVENTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [event for line in lines if (event := _parse(line)) is not None]


def has_ended(folder: Path) -> bool:
    """Whether a coordinator has told in this folder that the run is over."""
    with suppress(OSError):
        return any(event["kind"] == "ended" for event in read_events(folder))
    return False


def _parse(line: str) -> Event | None:
    try:
        fields = json.loads(line)
    except ValueError:  # cut off when its writer was killed
        return None
    match fields:
        case {
            "time": float() | int() as unix_s,
            "kind": str() as kind,
            "stage": int() | None,
            "peer": str() | None,
            "name": str() | None,
            "text": str(),
        } if kind in get_args(EventKind) and 0 <= unix_s < 2**40:
            return cast(Event, fields)
    return None


class Journal:
    """The events of one run, in its folder and, the newest ones, in memory. Belongs to the event loop's thread.

    Args:
        folder: of the run; None to keep them in memory alone
        is_revoked: see Happenings
        on_event: called with each event that is new

    Attributes:
        newest: the last events, the oldest of them first
        num_events: how many have been told or read so far
    """

    def __init__(
        self,
        folder: Path | None = None,
        is_revoked: Callable[[str], bool] = lambda _: False,
        on_event: Callable[[Event], None] = lambda _: None,
    ):
        self._is_revoked = is_revoked
        self._on_event = on_event
        self._path = None if folder is None else folder / EVENTS
        self._happenings: Happenings | None = None
        self._failure = ""
        self._unwritten: deque[Event] = deque(maxlen=NEWEST_KEPT)  # the disk has not taken them so far
        self._is_cut = False  # the last line may be there in part
        self.newest: deque[Event] = deque(maxlen=NEWEST_KEPT)
        self.num_events = 0

    def begin(
        self,
        *,
        lifetime_s: float,
        now_s: float,
        resume: bool = True,
        known: Sequence[Event] = (),
        optimizer_step: int = 0,
        round_number: int = -1,
    ) -> bool:
        """Read what an earlier process has told, and go on from there.

        Args:
            lifetime_s, optimizer_step, round_number: see Happenings
            resume: keep the events that are there
            known: events that another process has written down, for a journal without a folder

        Returns:
            whether there are any
        """
        if self._path is not None:
            try:
                known = read_events(self._path.parent) if resume else []
                self._rewrite(known)
            except OSError as error:
                self._fail(error)
        self._remember(known)
        self._happenings = Happenings(
            lifetime_s=lifetime_s,
            begun_s=now_s,
            known=known,
            optimizer_step=optimizer_step,
            round_number=round_number,
            is_revoked=self._is_revoked,
        )
        return bool(known)

    def look(self, watch: RunWatch, now_s: float) -> None:
        """Write down what has happened since the last look at the run."""
        assert self._happenings is not None, "begin comes first"
        self._add(self._happenings.look(watch, now_s))

    def tell(self, kind: EventKind, text: str, now_s: float) -> None:
        """Write down what cannot be seen from looking at the run's peers."""
        self._add([make_event(kind, text, now_s)])

    def _add(self, events: Sequence[Event]) -> None:
        self._remember(events)
        for event in events:
            self._on_event(event)
        if self._path is not None:
            self._unwritten.extend(events)
            self._write(self._path)

    def close(self) -> str:
        """Write the events that the disk has not taken so far, if it takes them now; returns why not, or nothing."""
        if self._path is not None:
            self._write(self._path)
        return self._failure if self._unwritten else ""

    def _write(self, path: Path) -> None:
        if not self._unwritten:
            return
        begun_at: int | None = None
        try:
            with path.open("a", encoding="utf-8") as file:
                begun_at = file.tell()
                if self._is_cut:
                    file.write("\n")
                file.writelines(json.dumps(event) + "\n" for event in self._unwritten)
                num_bytes = file.tell()
            begun_at, self._is_cut = None, False
            self._unwritten.clear()
            if num_bytes > MAX_BYTES:
                self._shorten()
        except OSError as error:
            self._fail(error)
            if begun_at is not None:  # what is there in part would come twice
                with suppress(OSError):
                    os.truncate(path, begun_at)

    def _remember(self, events: Sequence[Event]) -> None:
        self.newest.extend(events)
        self.num_events += len(events)

    def _shorten(self) -> None:
        """Drop the older half, but for what still holds: a restart must know which peers are there."""
        assert self._path is not None
        events = read_events(self._path.parent)
        older, newer = events[: len(events) // 2], events[len(events) // 2 :]
        self._rewrite([*standing(older), *newer])

    def _rewrite(self, events: Iterable[Event]) -> None:
        assert self._path is not None
        replace_file(self._path, "".join(json.dumps(event) + "\n" for event in events))

    def _fail(self, error: OSError) -> None:
        self._is_cut = True
        if not self._failure:  # a full disk would fail at each look
            log.warning("events_not_written path=%s reason=%s", self._path, error.strerror)
        self._failure = error.strerror or str(error)
