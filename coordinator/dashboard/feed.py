"""Server-sent events: the whole state of the page for each new viewer, then patches for all of them.

State and patch are made once for all viewers, and not at all while nobody looks.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from coordinator.dashboard.merge_patch import merge_patch

MAX_VIEWERS = 64
# Between patches; longer where they are large, so that no viewer gets more than so many bytes a second. On the way they
# are packed to a third or less.
PUSH_S = 3.0
BYTES_PER_S = 4000
# A page that hears nothing for SILENCE_MS (page.js) takes its connection for broken.
MAX_PAUSE_S = 15.0
# A viewer that falls so many patches behind is cut off: its page comes back by itself, for the whole state.
BACKLOG = 4

# A gzip stream begins so; then come packed events. It has no end, so it needs no checksum.
GZIP_HEADER = bytes((31, 139, 8, 0, 0, 0, 0, 0, 0, 255))

State = dict[str, Any]


class FeedEvent(NamedTuple):
    """One server-sent event, packed once for all viewers.

    Attributes:
        packed: by deflate, with no reference to the events before it, so that any viewer's stream may go on with it
    """

    plain: bytes
    packed: bytes


class Feed:
    """Sends the state of a page to all who look at it. Belongs to the event loop's thread.

    Args:
        make_state: the state as of now, in JSON's types, without None but in lists
    """

    def __init__(self, make_state: Callable[[], State]):
        self._make_state = make_state
        self._state: State = {}
        self._whole: FeedEvent | None = None  # the present state, once somebody has asked for it
        self._viewers: set[MemoryObjectSendStream[FeedEvent]] = set()
        self._is_watched = anyio.Event()

    @property
    def is_full(self) -> bool:
        """Whether as many look already as this program serves."""
        return len(self._viewers) >= MAX_VIEWERS

    async def run(self) -> None:
        """Send patches for ever, while anybody looks."""
        while True:
            await self._is_watched.wait()
            await anyio.sleep(pause_s(self.push()))

    def push(self) -> int:
        """Send what has changed since the last time to all viewers; returns the number of bytes for each."""
        state = self._make_state()
        event = _event("patch", merge_patch(self._state, state))
        self._state, self._whole = state, None
        for viewer in list(self._viewers):
            try:
                viewer.send_nowait(event)
            except (anyio.WouldBlock, anyio.BrokenResourceError):
                self._forget(viewer)
        return len(event.plain)

    @asynccontextmanager
    async def viewer(self) -> AsyncIterator[MemoryObjectReceiveStream[FeedEvent]]:
        """A stream of events for one who looks, as long as the context is open."""
        if not self._viewers:
            self._state, self._whole = self._make_state(), None
        if self._whole is None:
            self._whole = _event("state", self._state)
        send, receive = anyio.create_memory_object_stream[FeedEvent](BACKLOG)
        send.send_nowait(self._whole)
        self._viewers.add(send)
        self._is_watched.set()
        try:
            yield receive
        finally:
            receive.close()
            self._forget(send)

    def close(self) -> None:
        """Let all viewers go."""
        for viewer in list(self._viewers):
            self._forget(viewer)

    def _forget(self, viewer: MemoryObjectSendStream[FeedEvent]) -> None:
        self._viewers.discard(viewer)
        with suppress(anyio.BrokenResourceError):
            viewer.close()
        if not self._viewers:
            self._is_watched = anyio.Event()


def pause_s(num_bytes: int) -> float:
    """How long to wait after a patch of so many bytes."""
    return min(max(PUSH_S, num_bytes / BYTES_PER_S), MAX_PAUSE_S)


def _event(name: str, data: State) -> FeedEvent:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    plain = f"event: {name}\ndata: {text}\n\n".encode()
    packer = zlib.compressobj(level=4, wbits=-zlib.MAX_WBITS)
    return FeedEvent(plain, packer.compress(plain) + packer.flush(zlib.Z_SYNC_FLUSH))
