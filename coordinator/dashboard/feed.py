"""Server-sent events: the whole state of the page for each new viewer, then patches for all of them.

State and patch are made once for all viewers, and not at all while nobody looks.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from coordinator.dashboard.merge_patch import merge_patch

MAX_VIEWERS = 64
# Between patches; longer where they are large, so that no viewer gets more than so many bytes a second.
PUSH_S = 3.0
BYTES_PER_S = 3000
# A viewer that falls so many patches behind is cut off: its page comes back by itself, for the whole state.
BACKLOG = 4

State = dict[str, Any]


class Feed:
    """Sends the state of a page to all who look at it. Belongs to the event loop's thread.

    Args:
        make_state: the state as of now, in JSON's types, without None but in lists
    """

    def __init__(self, make_state: Callable[[], State]):
        self._make_state = make_state
        self._state: State = {}
        self._whole = b""  # the present state as an event; empty if nobody has asked for it yet
        self._viewers: set[MemoryObjectSendStream[bytes]] = set()
        self._is_watched = anyio.Event()

    @property
    def is_full(self) -> bool:
        """Whether as many look already as this program serves."""
        return len(self._viewers) >= MAX_VIEWERS

    async def run(self) -> None:
        """Send patches for ever, while anybody looks."""
        while True:
            await self._is_watched.wait()
            await anyio.sleep(max(PUSH_S, self.push() / BYTES_PER_S))

    def push(self) -> int:
        """Send what has changed since the last time to all viewers; returns the number of bytes for each."""
        state = self._make_state()
        event = _event("patch", merge_patch(self._state, state))
        self._state, self._whole = state, b""
        for viewer in list(self._viewers):
            try:
                viewer.send_nowait(event)
            except (anyio.WouldBlock, anyio.BrokenResourceError):
                self._forget(viewer)
        return len(event)

    @asynccontextmanager
    async def viewer(self) -> AsyncIterator[MemoryObjectReceiveStream[bytes]]:
        """A stream of events for one who looks, as long as the context is open."""
        if not self._viewers:
            self._state, self._whole = self._make_state(), b""
        if not self._whole:
            self._whole = _event("state", self._state)
        send, receive = anyio.create_memory_object_stream[bytes](BACKLOG)
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

    def _forget(self, viewer: MemoryObjectSendStream[bytes]) -> None:
        self._viewers.discard(viewer)
        with suppress(anyio.BrokenResourceError):
            viewer.close()
        if not self._viewers:
            self._is_watched = anyio.Event()


def _event(name: str, data: State) -> bytes:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n".encode()
