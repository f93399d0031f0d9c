"""Spot notices against stand-ins of the three metadata services, as strict about requests as the real ones."""

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

import anyio
import anyio.lowlevel
import pytest
from pydantic import ValidationError

from swarm_peer.peer_options import PeerOptions
from swarm_peer.runtime.host import preemption
from swarm_peer.runtime.host.preemption import MAX_BODY_BYTES, wait_for_notice

# As good as none: what is waited for is an event, never the clock.
POLL_S = 1e-4


class StandIn:
    """An HTTP server on the loopback interface. `answer` is a stand-in's own; `port` stays over restarts.

    Attributes:
        requests: (method, path) of each request so far
        raw: bytes to send instead of any answer, if set
    """

    def __init__(self):
        self.port = 0
        self.requests = []
        self.raw = None
        self.hung_up = anyio.Event()

    @asynccontextmanager
    async def serving(self):
        server = await asyncio.start_server(self._converse, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            server.close()

    async def _converse(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii")
            line, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
            method, target, version = line.split(" ")
            assert version == "HTTP/1.1"
            headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
            assert headers["host"] == f"127.0.0.1:{self.port}"
            self.requests.append((method, urlsplit(target).path))
            gone = asyncio.ensure_future(self._notice_end(reader))
            if self.raw is None:
                answering = asyncio.ensure_future(self._answer_checked(method, urlsplit(target), headers))
                await asyncio.wait([gone, answering], return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    answering.cancel()
                    return
                status, extra, body = answering.result()
                content = body.encode()
                fields = {"Content-Length": len(content), **extra}
                text = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
                writer.write(f"HTTP/1.1 {status} Status\r\n{text}\r\n".encode() + content)
            else:
                writer.write(self.raw)
            await writer.drain()
            if self.raw is not None:
                await gone
            gone.cancel()
        except ConnectionError:
            self.hung_up.set()
        finally:
            writer.close()

    async def _notice_end(self, reader):
        await reader.read()
        self.hung_up.set()

    async def _answer_checked(self, method, url, headers):
        if "x-forwarded-for" in headers or "via" in headers:
            return 403, {}, ""
        return await self.answer(method, url, headers)

    async def answer(self, method, url, headers):
        raise NotImplementedError


class Aws(StandIn):
    """IMDSv2 with tokens required."""

    INSTANCE_ACTION = "/latest/meta-data/spot/instance-action"
    REBALANCE = "/latest/meta-data/events/recommendations/rebalance"

    def __init__(self):
        super().__init__()
        self.tokens = set()
        self.num_tokens = 0
        self.items = {}
        self.looked = lambda count: None  # told after each look at the instance action

    async def answer(self, method, url, headers):
        if url.path == "/latest/api/token":
            if method != "PUT":
                return 405, {"Allow": "OPTIONS, PUT"}, ""
            lifetime = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
            if not lifetime.isdecimal() or not 1 <= int(lifetime) <= 21600:
                return 400, {}, ""
            self.num_tokens += 1
            self.tokens.add(f"AQAE{self.num_tokens}==")
            return 200, {"X-Aws-Ec2-Metadata-Token-Ttl-Seconds": lifetime}, f"AQAE{self.num_tokens}=="
        if method != "GET":
            return 405, {}, ""
        if headers.get("x-aws-ec2-metadata-token") not in self.tokens:
            return 401, {}, ""
        reply = (200, {}, self.items[url.path]) if url.path in self.items else (404, {}, "<h1>Not Found</h1>")
        if url.path == self.INSTANCE_ACTION:
            self.looked(self.requests.count(("GET", url.path)))
        return reply

    def take_away(self, action="terminate"):
        self.items[self.INSTANCE_ACTION] = json.dumps({"action": action, "time": "2026-02-03T04:05:06Z"})


class Gcp(StandIn):
    """Compute Engine's metadata server with the one value."""

    FLAVOR = {"Metadata-Flavor": "Google"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.value = "FALSE"
        self.flavor = self.FLAVOR
        self.changed = anyio.Event()
        self.is_waited_for = anyio.Event()
        self.seen_queries = []
        self.looked = lambda count: None
        self.odd_etag = None

    def set(self, value):
        self.value = value
        self.changed.set()
        self.changed = anyio.Event()

    async def answer(self, method, url, headers):
        if headers.get("metadata-flavor") != "Google":
            return 403, self.FLAVOR, "Missing Metadata-Flavor:Google header."
        if method != "GET":
            return 405, self.FLAVOR, ""
        if url.path != "/computeMetadata/v1/instance/preempted":
            return 404, self.FLAVOR, ""
        query = {name: values[0] for name, values in parse_qs(url.query, strict_parsing=bool(url.query)).items()}
        self.seen_queries.append(query)
        if not query.keys() <= {"wait_for_change", "timeout_sec", "last_etag"}:
            return 400, self.FLAVOR, ""
        if query.get("wait_for_change") == "true" and query.get("last_etag", self.etag) == self.etag:
            self.is_waited_for.set()
            with anyio.move_on_after(float(query.get("timeout_sec", 1e9))):
                await self.changed.wait()
        reply = (200, {"ETag": self.etag, **self.flavor}, self.value)
        self.looked(len(self.seen_queries))
        return reply

    @property
    def etag(self):
        return self.odd_etag if self.odd_etag is not None else f"411261ca6c9e{len(self.value)}"


class Azure(StandIn):
    """The Instance Metadata Service of a scale set's member."""

    def __init__(self, name="swarm_1"):
        super().__init__()
        self.name = name
        self.document = {"DocumentIncarnation": 1, "Events": []}
        self.looked = lambda count: None

    async def answer(self, method, url, headers):
        if headers.get("metadata") != "true":
            return 400, {}, '{"error": "Bad request. Required metadata header not specified"}'
        query = parse_qs(url.query, strict_parsing=True)
        if url.path == "/metadata/instance/compute/name":
            if method != "GET" or query != {"api-version": ["2021-02-01"], "format": ["text"]}:
                return 400, {}, '{"error": "Bad request."}'
            return 200, {}, self.name
        if url.path == "/metadata/scheduledevents":
            assert method == "GET", "an event is never acknowledged"
            if query != {"api-version": ["2020-07-01"]}:
                return 400, {}, '{"error": "Bad request. api-version is invalid"}'
            body = self.document if isinstance(self.document, str) else json.dumps(self.document)
            self.looked(self.requests.count(("GET", url.path)))
            return 200, {}, body
        return 404, {}, ""

    def schedule(self, kind, *resources, status="Scheduled", not_before="Mon, 19 Sep 2026 18:29:47 GMT"):
        self.document["Events"].append(
            {
                "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
                "EventStatus": status,
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": list(resources),
                "NotBefore": not_before,
                "Description": "",
                "EventSource": "Platform",
                "DurationInSeconds": -1,
            }
        )


@pytest.fixture(autouse=True)
def _watch_the_log(caplog):
    caplog.set_level(logging.INFO, "swarm_peer")


def events_of(caplog):
    return [record.getMessage().split()[0] for record in caplog.records if record.name == preemption.__name__]


@pytest.fixture
def patience_s(monkeypatch):
    """The deadlines of all requests, None for the usual one."""
    given = []
    ask = preemption._Watch.ask

    async def recorded(self, method, path, headers, answer_s=None):
        given.append(answer_s)
        return await ask(self, method, path, headers, answer_s)

    monkeypatch.setattr(preemption._Watch, "ask", recorded)
    return given


def at(number, action):
    """A `looked` that acts at the given look."""
    return lambda count: action() if count == number else None


# --- aws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
async def test_aws_says_nothing_until_it_gives_notice(caplog, action):
    aws = Aws()
    aws.looked = at(3, lambda: aws.take_away(action))
    async with aws.serving() as url:
        notice = await wait_for_notice("aws", base_url=url, poll_s=POLL_S)
    assert notice == f"aws will {action} this instance at 2026-02-03T04:05:06Z"
    assert aws.requests.count(("GET", Aws.INSTANCE_ACTION)) == 4
    assert aws.requests.count(("PUT", "/latest/api/token")) == 1
    assert events_of(caplog) == []


async def test_an_aws_token_that_ran_out_is_renewed(caplog):
    aws = Aws()
    aws.looked = lambda count: aws.tokens.clear() if count == 2 else aws.take_away() if count == 4 else None
    async with aws.serving() as url:
        await wait_for_notice("aws", base_url=url, poll_s=POLL_S)
    assert aws.num_tokens == 2
    assert events_of(caplog) == []


async def test_aws_tokens_that_are_never_accepted_are_not_asked_for_without_end():
    aws = Aws()
    failures = []

    def failed():
        failures.append((aws.num_tokens, len(aws.requests)))
        aws.tokens = {f"AQAE{number}==" for number in range(100)} if len(failures) == 3 else Refusing()
        aws.take_away()

    class Refusing(set):
        def __contains__(self, token):
            return False

    aws.tokens = Refusing()
    async with aws.serving() as url:
        await wait_for_notice("aws", base_url=url, poll_s=POLL_S, failed=failed)
    assert failures == [(1, 2), (2, 4), (3, 6)]


async def test_an_aws_rebalance_recommendation_is_a_hint(caplog):
    aws = Aws()
    aws.items[Aws.REBALANCE] = json.dumps({"noticeTime": "2026-02-03T04:00:00Z"})
    aws.looked = at(3, aws.take_away)
    async with aws.serving() as url:
        notice = await wait_for_notice("aws", base_url=url, poll_s=POLL_S)
    assert "terminate" in notice
    assert aws.requests.count(("GET", Aws.INSTANCE_ACTION)) == 4
    assert aws.requests.count(("GET", Aws.REBALANCE)) == 1
    assert events_of(caplog) == ["rebalance_recommended"]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "terminate",
        "[]",
        "null",
        '{"action": "terminate"}',
        '{"action": "reboot", "time": "2026-02-03T04:05:06Z"}',
        '{"action": "stop", "time": "now\\nlevel=error"}',
        '{"action": "stop", "time": "' + 100 * "9" + '"}',
        "[" * 10000,
        "\N{REPLACEMENT CHARACTER}\0",
    ],
)
async def test_a_malformed_aws_notice_is_none(caplog, body):
    aws = Aws()
    aws.items[Aws.INSTANCE_ACTION] = body
    failures = []

    def failed():
        failures.append(1)
        if len(failures) == 3:
            aws.take_away("stop")

    async with aws.serving() as url:
        notice = await wait_for_notice("aws", base_url=url, poll_s=POLL_S, failed=failed)
    assert "stop" in notice
    assert len(failures) == 3
    assert events_of(caplog) == ["spot_notices_unknown", "spot_notices_known"]
    assert all("\n" not in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("token", ["", "two\nlines", "t\N{LATIN SMALL LETTER O WITH DIAERESIS}ken", 2000 * "x"])
async def test_what_is_no_aws_token_is_not_sent_back(token):
    aws = Aws()
    answer = aws.answer
    failures = []

    async def answer_badly(method, url, headers):
        return await answer(method, url, headers) if failures else (200, {}, token)

    aws.answer = answer_badly
    aws.take_away()
    async with aws.serving() as url:
        await wait_for_notice("aws", base_url=url, poll_s=POLL_S, failed=lambda: failures.append(1))
    assert len(failures) == 1
    assert [method for method, _ in aws.requests] == ["PUT", "PUT", "GET"]


# --- gcp --------------------------------------------------------------------------------------------------------------


async def test_gcp_answers_when_it_preempts(caplog):
    gcp = Gcp()
    async with gcp.serving() as url, anyio.create_task_group() as tasks:

        async def preempt():
            await gcp.is_waited_for.wait()
            gcp.set("TRUE")

        tasks.start_soon(preempt)
        assert await wait_for_notice("gcp", base_url=url, poll_s=POLL_S) == "gcp preempts this instance"
    first, second = gcp.seen_queries
    assert first == {}, "what is so already is known at once"
    assert second == {"wait_for_change": "true", "timeout_sec": "60", "last_etag": "411261ca6c9e5"}
    assert events_of(caplog) == []


async def test_a_gcp_instance_that_is_being_preempted_already():
    gcp = Gcp()
    gcp.value = "TRUE"
    async with gcp.serving() as url:
        await wait_for_notice("gcp", base_url=url)
    assert len(gcp.requests) == 1


async def test_a_gcp_notice_between_two_requests_is_seen():
    gcp = Gcp()
    gcp.looked = at(1, lambda: gcp.set("TRUE"))
    async with gcp.serving() as url:
        await wait_for_notice("gcp", base_url=url, poll_s=POLL_S)
    assert [query.get("last_etag") for query in gcp.seen_queries] == [None, "411261ca6c9e5"]
    assert not gcp.is_waited_for.is_set()


async def test_gcp_is_asked_again_when_its_wait_is_over(monkeypatch, caplog, patience_s):
    monkeypatch.setattr(preemption, "LONG_POLL_S", 0)
    monkeypatch.setattr(preemption, "ANSWER_S", 7.0)
    gcp = Gcp()
    gcp.looked = at(3, lambda: gcp.set("TRUE"))
    async with gcp.serving() as url:
        await wait_for_notice("gcp", base_url=url, poll_s=POLL_S)
    assert len(gcp.seen_queries) == 4
    assert gcp.is_waited_for.is_set()
    assert patience_s == [None, 7.0, 7.0, 7.0]
    assert events_of(caplog) == []


@pytest.mark.parametrize("etag", ["", 'W/"5"', "5&timeout_sec=99999"])
async def test_gcp_is_not_waited_for_without_a_proper_etag(etag):
    """What changed between two requests would be waited past."""
    gcp = Gcp()
    gcp.odd_etag = etag
    gcp.looked = at(3, lambda: gcp.set("TRUE"))
    async with gcp.serving() as url:
        await wait_for_notice("gcp", base_url=url, poll_s=POLL_S)
    assert gcp.seen_queries == 4 * [{}]


@pytest.mark.parametrize("value", ["", "true", "TRUE FALSE", "<html>TRUE</html>", 70000 * "TRUE"])
async def test_a_malformed_gcp_value_is_no_notice(value):
    gcp = Gcp()
    gcp.value = value
    failures = []

    def failed():
        failures.append(1)
        if len(failures) == 2:
            gcp.set("TRUE")

    async with gcp.serving() as url:
        await wait_for_notice("gcp", base_url=url, poll_s=POLL_S, failed=failed)
    assert len(failures) == 2
    assert all("last_etag" not in query for query in gcp.seen_queries)


async def test_only_google_answers_for_google():
    gcp = Gcp()
    gcp.value = "TRUE"
    gcp.flavor = {}

    def failed():
        gcp.flavor = Gcp.FLAVOR

    async with gcp.serving() as url:
        await wait_for_notice("gcp", base_url=url, poll_s=POLL_S, failed=failed)
    assert len(gcp.requests) == 2


async def test_cancelling_the_wait_hangs_up():
    gcp = Gcp()
    async with gcp.serving() as url:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: wait_for_notice("gcp", base_url=url, poll_s=POLL_S))
            await gcp.is_waited_for.wait()
            tasks.cancel_scope.cancel()
        await gcp.hung_up.wait()


# --- azure ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Preempt", "Terminate"])
async def test_azure_schedules_the_end(caplog, kind):
    azure = Azure()
    azure.looked = at(3, lambda: azure.schedule(kind, "swarm_0", "SWARM_1"))
    async with azure.serving() as url:
        notice = await wait_for_notice("azure", base_url=url, poll_s=POLL_S)
    assert notice == f"azure schedules {kind} of this instance, not before Mon, 19 Sep 2026 18:29:47 GMT"
    assert azure.requests.count(("GET", "/metadata/scheduledevents")) == 4
    assert azure.requests.count(("GET", "/metadata/instance/compute/name")) == 1
    assert events_of(caplog) == []


@pytest.mark.parametrize("not_before", ["", None])
async def test_an_azure_event_that_has_begun(not_before):
    azure = Azure()
    azure.schedule("Preempt", "swarm_1", status="Started", not_before=not_before)
    async with azure.serving() as url:
        assert (await wait_for_notice("azure", base_url=url)).endswith("not before now")


async def test_azure_events_of_other_machines_and_kinds_are_ignored(caplog):
    azure = Azure()
    azure.schedule("Preempt", "swarm_0", "swarm_10", "warm_1", "")
    azure.schedule("Terminate")
    for kind in ("Freeze", "Reboot", "Redeploy", "SomethingNew"):
        azure.schedule(kind, "swarm_1")
    azure.looked = at(3, lambda: azure.schedule("Preempt", "swarm_1"))
    async with azure.serving() as url:
        assert "Preempt" in await wait_for_notice("azure", base_url=url, poll_s=POLL_S)
    assert azure.requests.count(("GET", "/metadata/scheduledevents")) == 4
    assert events_of(caplog) == []


@pytest.mark.parametrize(
    "document",
    [
        "",
        "not json",
        "[]",
        {"DocumentIncarnation": 1},
        {"Events": {}},
        {"Events": [{"EventType": "Preempt"}]},
        {"Events": [{"EventType": "Preempt", "Resources": "swarm_1"}]},
        {"Events": [{"EventType": "Preempt", "Resources": [["swarm_1"]]}]},
        {"Events": [{"EventType": "Preempt", "Resources": ["swarm_1"], "NotBefore": "\r\n"}]},
    ],
    ids=repr,
)
async def test_a_malformed_azure_document_is_no_notice(document):
    azure = Azure()
    azure.document = document
    failures = []

    def failed():
        failures.append(1)
        if len(failures) == 2:
            azure.document = {"Events": []}
            azure.schedule("Preempt", "swarm_1")

    async with azure.serving() as url:
        await wait_for_notice("azure", base_url=url, poll_s=POLL_S, failed=failed)
    assert len(failures) == 2


async def test_an_azure_machine_without_a_name_is_in_no_event():
    azure = Azure(name="")
    azure.schedule("Preempt", "")
    failures = []

    def failed():
        failures.append(1)
        if len(failures) == 2:
            azure.name = "swarm_1"
            azure.schedule("Preempt", "swarm_1")

    async with azure.serving() as url:
        await wait_for_notice("azure", base_url=url, poll_s=POLL_S, failed=failed)
    assert len(failures) == 2


async def test_azures_first_answer_may_be_late(patience_s):
    """It takes up to two minutes, in which scheduled events are being turned on."""
    azure = Azure()
    azure.looked = at(2, lambda: azure.schedule("Preempt", "swarm_1"))
    async with azure.serving() as url:
        await wait_for_notice("azure", base_url=url, poll_s=POLL_S)
    assert patience_s == [None, preemption.AZURE_FIRST_ANSWER_S, None, None]


# --- services that do not answer as they should -----------------------------------------------------------------------

STAND_INS = {
    "aws": (Aws, Aws.take_away),
    "gcp": (Gcp, lambda gcp: gcp.set("TRUE")),
    "azure": (Azure, lambda azure: azure.schedule("Preempt", "swarm_1")),
}


@pytest.fixture(params=STAND_INS)
def cloud(request):
    return request.param


async def test_a_service_that_is_down_is_asked_until_it_is_back(cloud, caplog):
    make, give_notice = STAND_INS[cloud]
    stand_in = make()
    give_notice(stand_in)
    async with stand_in.serving() as url:
        pass  # now nobody listens at this address
    failures = []
    enough = anyio.Event()

    def failed():
        failures.append(1)
        if len(failures) == 4:
            enough.set()

    async def come_back():
        await enough.wait()
        async with stand_in.serving():
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(come_back)
        await wait_for_notice(cloud, base_url=url, poll_s=POLL_S, failed=failed)
        tasks.cancel_scope.cancel()
    assert len(failures) >= 4
    assert events_of(caplog) == ["spot_notices_unknown", "spot_notices_known"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nTRUE",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nTRUE",
        b"HTTP/1.1 200 OK\r\nX: " + MAX_BODY_BYTES * b"x",
    ],
    ids=lambda raw: raw[:50].decode(),
)
async def test_a_service_that_answers_nonsense(cloud, raw, monkeypatch, caplog):
    """Answers that never come are given up, and the connection with them."""
    monkeypatch.setattr(preemption, "ANSWER_S", 0.1)
    make, give_notice = STAND_INS[cloud]
    stand_in = make()
    stand_in.raw = raw
    give_notice(stand_in)
    failures = []

    def failed():
        failures.append(1)
        if len(failures) == 2:
            monkeypatch.setattr(preemption, "ANSWER_S", 5.0)
            stand_in.raw = None

    async with stand_in.serving() as url:
        await wait_for_notice(cloud, base_url=url, poll_s=POLL_S, failed=failed)
        await stand_in.hung_up.wait()
    assert len(failures) == 2
    assert events_of(caplog) == ["spot_notices_unknown", "spot_notices_known"]


@pytest.mark.parametrize(
    "header", ["Content-Length: 100000000\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\nffffffff\r\n"]
)
async def test_a_body_that_is_too_long_is_not_read_on(cloud, header, caplog):
    make, give_notice = STAND_INS[cloud]
    stand_in = make()
    stand_in.raw = f"HTTP/1.1 200 OK\r\n{header}".encode() + (MAX_BODY_BYTES + 1) * b"x"
    give_notice(stand_in)

    def failed():
        stand_in.raw = None

    async with stand_in.serving() as url:
        await wait_for_notice(cloud, base_url=url, poll_s=POLL_S, failed=failed)
        await stand_in.hung_up.wait()
    assert f"answered more than {MAX_BODY_BYTES} bytes" in caplog.text


async def test_no_redirect_is_followed(cloud):
    make, give_notice = STAND_INS[cloud]
    stand_in, elsewhere = make(), make()
    give_notice(stand_in)
    give_notice(elsewhere)

    def failed():
        stand_in.raw = None

    async with stand_in.serving() as url, elsewhere.serving() as other:
        stand_in.raw = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {other}\r\nContent-Length: 0\r\n\r\n".encode()
        await wait_for_notice(cloud, base_url=url, poll_s=POLL_S, failed=failed)
    assert elsewhere.requests == []


async def test_each_outage_is_told_once(caplog):
    aws = Aws()
    aws.items[Aws.INSTANCE_ACTION] = "not json"
    num_failures = 0

    def failed():
        nonlocal num_failures
        num_failures += 1
        if num_failures in (2, 4):
            del aws.items[Aws.INSTANCE_ACTION]

    aws.looked = lambda count: aws.items.update({Aws.INSTANCE_ACTION: "not json"}) if count == 4 else None
    async with aws.serving() as url, anyio.create_task_group() as tasks:

        def is_back():
            return events_of(caplog).count("spot_notices_known") == 2

        tasks.start_soon(lambda: wait_for_notice("aws", base_url=url, poll_s=POLL_S, failed=failed))
        while not is_back():
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert num_failures == 4
    assert events_of(caplog) == 2 * ["spot_notices_unknown", "spot_notices_known"]


async def test_a_body_that_drips_is_given_up(monkeypatch):
    """Each byte comes in time; the answer as a whole does not."""
    monkeypatch.setattr(preemption, "ANSWER_S", 0.05)
    monkeypatch.setattr(preemption, "CONNECT_S", 0.05)
    given_up = anyio.Event()

    async def drip(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not reader.at_eof():
            writer.write(b"x")
            try:
                await asyncio.wait_for(reader.read(1), 0.005)
            except asyncio.TimeoutError:
                continue
            except ConnectionError:
                break
        writer.close()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: wait_for_notice("gcp", base_url=url, poll_s=POLL_S, failed=given_up.set))
        await given_up.wait()
        tasks.cancel_scope.cancel()
    server.close()


async def test_proxies_of_the_environment_are_not_asked(cloud, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    make, give_notice = STAND_INS[cloud]
    stand_in = make()
    give_notice(stand_in)
    async with stand_in.serving() as url:
        await wait_for_notice(cloud, base_url=url, failed=lambda: pytest.fail("no direct way"))


async def test_tries_become_rarer_within_a_bound(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 2000:
            raise KeyboardInterrupt

    async def fail(self, *args):
        raise preemption._NoAnswer

    monkeypatch.setattr(anyio, "sleep", sleep)
    monkeypatch.setattr(preemption._Watch, "ask", fail)
    with pytest.raises(KeyboardInterrupt):
        await wait_for_notice("aws")
    assert slept[0] == 2 * preemption.POLL_S
    assert slept == sorted(slept)
    assert slept[-1] == preemption.MAX_BACKOFF_S


# --- the option -------------------------------------------------------------------------------------------------------


def test_the_option_names_a_cloud_or_none():
    assert PeerOptions(initial_peers=("a",)).preemption_notice == "none"
    for cloud in STAND_INS:
        assert PeerOptions(initial_peers=("a",), preemption_notice=cloud).preemption_notice == cloud
    with pytest.raises(ValidationError, match="preemption_notice"):
        PeerOptions(initial_peers=("a",), preemption_notice="ibm")
