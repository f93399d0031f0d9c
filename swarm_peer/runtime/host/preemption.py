"""Spot notices: asks the cloud's metadata service whether the cloud is about to take this instance away.

This module knows how three clouds give notice. It does not know how a peer reacts. Whatever the service answers or
fails to answer, the peer goes on: only a well-formed notice about this very instance counts.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeVar

import anyio
import httpx2
from pydantic import BaseModel, Field, StringConstraints, ValidationError

log = logging.getLogger(__name__)

Cloud = Literal["aws", "gcp", "azure"]

# Pause between two requests. Azure and Google give 30 s of notice, AWS two minutes.
POLL_S = 3.0
# Longest pause between tries that fail. A service that comes back must still be asked within the shortest notice.
MAX_BACKOFF_S = 15.0
# The services are one hop away.
CONNECT_S = 2.0
ANSWER_S = 5.0
# Google's service holds a request that waits for a change this long.
LONG_POLL_S = 60
# Azure turns scheduled events on with the first request, which then takes up to two minutes.
AZURE_FIRST_ANSWER_S = 130.0
# The longest lifetime that AWS gives a token, in seconds. A token that has expired is renewed.
TOKEN_LIFETIME_S = 21600
# Real answers have a few hundred bytes, but Azure lists the events of a whole scale set.
MAX_BODY_BYTES = 2**18

# Text from a service that goes into a log line.
ShortText = Annotated[str, StringConstraints(max_length=80, pattern=r"^[\x20-\x7e]*$")]


class _NoAnswer(Exception):
    """The service gave no answer, or one that the real service never gives."""


@dataclass(frozen=True)
class _Reply:
    status: int
    headers: Mapping[str, str]  # the case of names does not matter
    body: str


class _Watch(ABC):
    """How to ask one cloud's metadata service for a notice; it gets one request at a time.

    Args:
        base_url: address of the service

    Attributes:
        usual_url: address of the cloud's own service
    """

    usual_url: ClassVar[str]

    def __init__(self, client: httpx2.AsyncClient, base_url: str):
        self._client = client
        self._base_url = base_url

    @abstractmethod
    async def look(self) -> str | None:
        """Ask the cloud once. Returns its notice for this instance, in words; None if there is no notice.

        Raises:
            _NoAnswer: the service did not say
        """

    async def ask(self, method: str, path: str, headers: dict[str, str], answer_s: float | None = None) -> _Reply:
        """Send a request and wait for the reply.

        Args:
            answer_s: deadline for the reply; ANSWER_S if None

        Raises:
            _NoAnswer: no reply, a late one, or one that is too long
        """
        answer_s = ANSWER_S if answer_s is None else answer_s
        timeout = httpx2.Timeout(answer_s, connect=CONNECT_S)
        body = bytearray()
        try:
            with anyio.fail_after(CONNECT_S + answer_s):
                async with self._client.stream(
                    method, self._base_url + path, headers=headers, timeout=timeout
                ) as response:
                    async for chunk in response.aiter_raw():
                        body += chunk
                        if len(body) > MAX_BODY_BYTES:
                            raise _NoAnswer(f"{path} answered more than {MAX_BODY_BYTES} bytes")
        except (httpx2.HTTPError, TimeoutError) as error:
            raise _NoAnswer(f"{path} failed with {type(error).__name__}: {error}") from error
        return _Reply(response.status_code, response.headers, body.decode(errors="replace"))


class _InstanceAction(BaseModel):
    """AWS's notice."""

    action: Literal["terminate", "stop", "hibernate"]
    time: ShortText


class _Aws(_Watch):
    """AWS, by IMDSv2: docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html.

    If the peer runs in a container, the instance's PUT response hop limit must be 2 or more. Otherwise the token never
    arrives.
    """

    usual_url = "http://169.254.169.254"

    _token: str | None = None
    _hinted = False

    async def look(self) -> str | None:
        body = await self._get("/latest/meta-data/spot/instance-action")
        if body is not None:
            notice = _parse(_InstanceAction, body)
            return f"aws will {notice.action} this instance at {notice.time}"
        # A recommendation only says that a notice is more likely than usual. A peer that obeyed would leave good
        # instances, too.
        if not self._hinted and await self._get("/latest/meta-data/events/recommendations/rebalance") is not None:
            log.info("rebalance_recommended cloud=aws")
            self._hinted = True
        return None

    async def _get(self, path: str) -> str | None:
        """The body at a path, or None if there is nothing at the path."""
        known = self._token is not None
        if self._token is None:
            self._token = await self._new_token()
        reply = await self.ask("GET", path, {"X-aws-ec2-metadata-token": self._token})
        if reply.status == 401:
            self._token = None
            if known:  # the token has expired
                return await self._get(path)
        return None if reply.status == 404 else _body_of(reply, path)

    async def _new_token(self) -> str:
        path = "/latest/api/token"
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_LIFETIME_S)}
        token = _body_of(await self.ask("PUT", path, headers), path).strip()
        if not (0 < len(token) <= 1024 and token.isascii() and token.isprintable()):
            raise _NoAnswer(f"{path} answered no token")
        return token


class _Gcp(_Watch):
    """Google: cloud.google.com/compute/docs/instances/create-use-spot and .../metadata/querying-metadata.

    A request that waits for a change names the ETag of the known value. Then the service answers as soon as the value
    is another one, even if it changed between two requests. Without an ETag such a change would be missed.
    """

    usual_url = "http://metadata.google.internal"

    _etag: str | None = None

    async def look(self) -> str | None:
        path, answer_s = "/computeMetadata/v1/instance/preempted", None
        if self._etag is not None:
            path += f"?wait_for_change=true&timeout_sec={LONG_POLL_S}&last_etag={self._etag}"
            answer_s = LONG_POLL_S + ANSWER_S
        reply = await self.ask("GET", path, {"Metadata-Flavor": "Google"}, answer_s)
        value = _body_of(reply, path).strip()
        if reply.headers.get("Metadata-Flavor") != "Google":
            raise _NoAnswer(f"{path} is not answered by Google's metadata server")
        if value not in ("TRUE", "FALSE"):
            raise _NoAnswer(f"{path} answered {value[:40]!r}, neither TRUE nor FALSE")
        etag = reply.headers.get("ETag", "")
        self._etag = etag if etag.isascii() and etag.isalnum() else None
        return "gcp preempts this instance" if value == "TRUE" else None


class _ScheduledEvent(BaseModel):
    """One of Azure's notices."""

    kind: str = Field(alias="EventType")
    resources: list[str] = Field(alias="Resources")
    not_before: ShortText | None = Field(None, alias="NotBefore")  # empty when the event has begun


class _ScheduledEvents(BaseModel):
    events: list[_ScheduledEvent] = Field(alias="Events")


class _Azure(_Watch):
    """Azure: learn.microsoft.com/azure/virtual-machines/linux/scheduled-events.

    Every machine of a scale set sees the events of all its machines. Peers never acknowledge an event: Azure would then
    carry it out at once, on all the machines that it names.
    """

    usual_url = "http://169.254.169.254"

    _name: str | None = None
    _answer_s: float | None = AZURE_FIRST_ANSWER_S

    async def look(self) -> str | None:
        if self._name is None:
            self._name = await self._own_name()
        body = await self._get("/metadata/scheduledevents?api-version=2020-07-01", self._answer_s)
        self._answer_s = None
        for event in _parse(_ScheduledEvents, body).events:
            names = [name.casefold() for name in event.resources]
            if event.kind in ("Preempt", "Terminate") and self._name.casefold() in names:
                return f"azure schedules {event.kind} of this instance, not before {event.not_before or 'now'}"
        return None

    async def _own_name(self) -> str:
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        name = (await self._get(path)).strip()
        if not 0 < len(name) <= 256:
            raise _NoAnswer(f"{path} answered no name")
        return name

    async def _get(self, path: str, answer_s: float | None = None) -> str:
        return _body_of(await self.ask("GET", path, {"Metadata": "true"}, answer_s), path)


_WATCHES: dict[Cloud, type[_Watch]] = {"aws": _Aws, "gcp": _Gcp, "azure": _Azure}

_Model = TypeVar("_Model", bound=BaseModel)


def _body_of(reply: _Reply, path: str) -> str:
    if reply.status != 200:
        raise _NoAnswer(f"{path} answered with HTTP status {reply.status}")
    return reply.body


def _parse(model: type[_Model], body: str) -> _Model:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _NoAnswer(f"malformed answer: {body[:80]!r}") from error


async def wait_for_notice(
    cloud: Cloud, *, failed: Callable[[], None] = lambda: None, poll_s: float = POLL_S, base_url: str | None = None
) -> str:
    """Wait until the cloud says that it will take this instance away. Returns its notice in words, for the log.

    If the service does not answer, it is asked again less often. The log has one warning when it stops answering, and
    one line when it answers again. Any await may be cancelled.

    Args:
        failed: called after each request without an answer, to count it
        poll_s: pause between two requests
        base_url: address of the metadata service, if it is not the cloud's own
    """
    kind = _WATCHES[cloud]
    # The services are link-local, so there is no proxy and no redirect. No connection is kept: the service may close it
    # between two requests.
    async with httpx2.AsyncClient(
        trust_env=False,
        follow_redirects=False,
        headers={"Accept-Encoding": "identity"},
        limits=httpx2.Limits(max_keepalive_connections=0),
    ) as client:
        watch = kind(client, base_url or kind.usual_url)
        failures = 0
        while True:
            try:
                notice = await watch.look()
            except _NoAnswer as error:
                if failures == 0:
                    log.warning("spot_notices_unknown cloud=%s reason=%s", cloud, error)
                failures += 1
                failed()
                await anyio.sleep(min(poll_s * 2 ** min(failures, 10), MAX_BACKOFF_S))
                continue
            if failures:
                log.info("spot_notices_known cloud=%s failures=%d", cloud, failures)
            failures = 0
            if notice is not None:
                return notice
            await anyio.sleep(poll_s)
