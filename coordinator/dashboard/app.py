"""The page over HTTP: three files, one stream of events, and a guard in front of all of them.

The page shows what peers say of themselves, and the line with which machines join. So it is shown only to those who
have its link, which holds a token; the browser gets it as a cookie then.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.dashboard.feed import GZIP_HEADER, MAX_VIEWERS, Feed

STATIC = Path(__file__).parent / "static"
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NO_TOKEN = "Open the link that the program printed when it began to show this page: it holds the token.\n"


class Guard:
    """Lets nobody in but those who have the token, from pages of this server alone, and to read alone.

    A name of a stranger's that is made to lead to this machine (DNS rebinding) does not get in either: the Host that
    the browser names must be an address, or a name of this machine.

    Args:
        token: that the link or the cookie must hold
        names: under which this machine is reached, beside its addresses, localhost and its own name
    """

    def __init__(self, app: ASGIApp, *, token: str, names: Sequence[str] = ()):
        self._app = app
        self._token = token
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or have the app answer, with headers that keep the browser from doing anything but showing it."""
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY_HEADERS)
                if comes_by_link:
                    cookie = f"{self._cookie(scope)}={self._token}; Path=/; HttpOnly; SameSite=Strict"
                    headers.append("Set-Cookie", cookie)
            await send(message)

        comes_by_link = False
        app: ASGIApp | None = self._refusal(scope)
        if app is None:
            linked = QueryParams(scope["query_string"]).get("token", "")
            comes_by_link = secrets.compare_digest(linked.encode(), self._token.encode())
            app = self._app if comes_by_link or self._has_cookie(scope) else PlainTextResponse(NO_TOKEN, 401)
        await app(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This page is for reading alone.\n", 405)
        host = headers.get("host", "")
        if not self._is_own(host):
            return PlainTextResponse("Reach this page by an address of its machine, or by localhost.\n", 421)
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return PlainTextResponse("Another page may not read this one.\n", 403)
        return None

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True

    def _has_cookie(self, scope: Scope) -> bool:
        # Not by a parser of cookies: some Python versions take seconds to undo the quoting of a long one.
        wanted = f"{self._cookie(scope)}={self._token}".encode()
        sent = Headers(scope=scope).get("cookie", "").encode().split(b";")
        return any(secrets.compare_digest(cookie.strip(), wanted) for cookie in sent)

    @staticmethod
    def _cookie(scope: Scope) -> str:
        # Browsers keep the cookies of all ports of a machine together. A tunnel may lead here from another port.
        port = Headers(scope=scope).get("host", "").rpartition(":")[2]
        return f"swarm-{port if port.isascii() and port.isdigit() else 80}"


def make_app(feed: Feed, *, token: str, names: Sequence[str] = (), routes: Sequence[BaseRoute] = ()) -> ASGIApp:
    """The page and its stream of events, behind the guard.

    Args:
        token, names: see Guard
        routes: more routes, behind the same guard
    """

    async def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def events(request: Request) -> Response:
        if feed.is_full:
            return PlainTextResponse(f"{MAX_VIEWERS} people look already; come back later.\n", 503)
        if request.method == "HEAD":  # a page whose stream has ended asks why
            return Response()

        is_packed = "gzip" in request.headers.get("accept-encoding", "")

        async def sent() -> AsyncIterator[bytes]:
            if is_packed:
                yield GZIP_HEADER
            async with feed.viewer() as stream:
                async for event in stream:
                    yield event.packed if is_packed else event.plain

        headers = {"Content-Encoding": "gzip"} if is_packed else {}
        return StreamingResponse(sent(), headers=headers, media_type="text/event-stream")

    static = Mount("/static", StaticFiles(directory=STATIC))
    app = Starlette(routes=[Route("/", page), Route("/events", events), static, *routes])
    return Guard(app, token=token, names=names)
