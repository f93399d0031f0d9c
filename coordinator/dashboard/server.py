"""Serves the page in this program's event loop, beside its other work."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path

import anyio
import uvicorn
from starlette.routing import BaseRoute
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.dashboard.app import make_app
from coordinator.dashboard.feed import Feed
from coordinator.dashboard.run_page import RunPage
from swarm_peer.errors import UserError

log = logging.getLogger(__name__)

# If a port is taken, so many of the next ones are tried: several runs may be watched on one machine.
PORTS_TRIED = 20
STOP_S = 2.0
RETRY_S = 10.0
# A stranger who reaches the port could use up the files that the program may open. So the program closes connections
# beyond these at once, those that ask for nothing in this time, and those whose other side takes nothing for so long.
MAX_CONNECTIONS = 256
ASK_S = 10.0
TAKE_S = 60.0
# In the run's folder: a page that is open finds a coordinator again that was started again.
TOKEN = "dashboard-token"


def bind(host: str, port: int) -> socket.socket:
    """Listen there, or at the next port that is free.

    Raises:
        UserError: none of them is, or this machine has no such address
    """
    error: OSError | None = None
    for tried in range(port, min(port + PORTS_TRIED, 65536) if port else 1):
        try:
            family, *_, address = socket.getaddrinfo(host, tried, type=socket.SOCK_STREAM)[0]
            listening = socket.create_server((str(address[0]), tried), family=family, backlog=128)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux has it; accepted connections inherit it
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(TAKE_S * 1000))
            return listening
        except OSError as failed:
            error = failed
    reason = "no port" if error is None else error.strerror
    raise UserError(f"--dashboard {host}:{port}: cannot listen there ({reason}); name another one, or --no-dashboard")


def kept_token(folder: Path | None) -> str:
    """The token of the page of a run, the same one after a restart, from a file for its owner alone."""
    if folder is None:
        return secrets.token_urlsafe(18)
    with suppress(OSError, ValueError):
        if len(known := (folder / TOKEN).read_text(encoding="utf-8").strip()) >= 20 and known.isascii():
            return known
    token = secrets.token_urlsafe(18)
    try:
        with os.fdopen(os.open(folder / TOKEN, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(token + "\n")
    except OSError as error:
        log.warning("dashboard_token_not_kept reason=%s", error.strerror)
    return token


def link(listening: socket.socket, host: str, token: str) -> str:
    """The link that opens the page."""
    port = listening.getsockname()[1]
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            host = socket.gethostname()
        elif address.version == 6:
            host = f"[{host}]"
    return f"http://{host}:{port}/?token={token}"


class Connection(H11Protocol):
    """A connection of which there are only so many, and which has to ask for something soon."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or close it."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        self.loop.call_later(ASK_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.cycle is None:
            self.transport.abort()


class _Server(uvicorn.Server):
    """A server that leaves signals to the program that it is a part of."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take no signals."""
        yield


@asynccontextmanager
async def showing(
    page: RunPage,
    place: tuple[str, int],
    say: Callable[[str], None],
    *,
    folder: Path | None = None,
    routes: Sequence[BaseRoute] = (),
) -> AsyncIterator[None]:
    """Serve the page while the context is open. Whatever fails in it is logged, and the program goes on.

    Args:
        place: host and port
        say: told the link
        folder: where to keep the token
        routes: see make_app

    Raises:
        UserError: see bind
    """
    host, port = place
    with closing(bind(host, port)) as listening:
        token = kept_token(folder)
        feed = Feed(page.state)
        config = uvicorn.Config(
            make_app(feed, token=token, names=[host], routes=routes),
            log_config=None,
            log_level="error",  # strangers could fill the log with its warnings
            access_log=False,
            lifespan="off",
            ws="none",
            http=Connection,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        server, stopped = _Server(config), anyio.Event()

        async def serve() -> None:
            try:
                await server.serve(sockets=[listening])
            finally:
                stopped.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_guarded, page.run)
            tasks.start_soon(_guarded, feed.run)
            tasks.start_soon(_guarded, serve)
            say(f"Watch it at {link(listening, host, token)}")
            try:
                yield
            finally:
                server.should_exit = True
                feed.close()
                with anyio.move_on_after(STOP_S, shield=True):
                    await stopped.wait()
                tasks.cancel_scope.cancel()


async def _guarded(work: Callable[[], Awaitable[None]]) -> None:
    """Do the work, again if a defect of it has come to light: it is not what the program is for."""
    while True:
        try:
            return await work()
        except Exception:
            log.exception("dashboard_failed")
        await anyio.sleep(RETRY_S)
