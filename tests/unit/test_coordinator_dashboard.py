"""The page on which people watch a run: its state, its patches, and who gets in."""

import gc
import json
import re
import time
import zlib
from dataclasses import replace

import anyio
import pytest
from made_up_run import made_up_page
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from coordinator.dashboard import feed as feed_module
from coordinator.dashboard.app import STATIC, make_app
from coordinator.dashboard.feed import GZIP_HEADER, MAX_PAUSE_S, PUSH_S, Feed, pause_s
from coordinator.dashboard.history import MAX_POINTS, History
from coordinator.dashboard.merge_patch import merge_patch
from coordinator.dashboard.place import parse_place
from coordinator.dashboard.server import bind, kept_token, link
from coordinator.watch import contributions as contributions_module
from coordinator.watch.contributions import ContributionEstimates
from coordinator.watch.metrics_file import ValidationLoss, metrics_line
from swarm_peer.errors import UserError
from swarm_peer.policy.view import Neighbour, PeerState, SwarmView, TimeShares

TOKEN = "a-token-of-the-tests"
HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\u202egnp.exe\0"


def line(optimizer_step, round_number=None, loss=2.0, validation=None):
    return metrics_line(
        optimizer_step=optimizer_step,
        round_number=optimizer_step - 1 if round_number is None else round_number,
        loss=loss,
        samples=8,
        seconds=3.6,
        sequence_length=8,
        peers=[1, 1],
        validation=None if validation is None else ValidationLoss(validation, 4),
    )


def applied(target, patch):
    """RFC 7386, as the page has it."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            applied(target[key], value)
        else:
            target[key] = value
    return target


def data_of(event):
    kind, data, *rest = event.plain.decode().split("\n")
    assert rest == ["", ""]
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


# --- What the page shows


def test_a_patch_makes_the_new_state_of_the_old_one():
    old = {"a": 1, "b": {"c": [1, None], "d": "x"}, "e": {}}
    new = {"b": {"c": [2], "f": {"g": 0}}, "e": 5, "h": ""}
    patch = merge_patch(old, new)
    assert patch == {"a": None, "b": {"c": [2], "d": None, "f": {"g": 0}}, "e": 5, "h": ""}
    assert applied(old, patch) == new
    assert merge_patch(new, new) == {}


def test_an_empty_stage_says_what_it_waits_for():
    made = made_up_page(num_peers=12)
    assert made.page.state()["run"]["state"] == "training"
    assert "eta_s" in made.page.state()["run"]
    made.watch.view = SwarmView(4, tuple(peer for peer in made.watch.view.peers if peer.stage != 2))
    made.page.look()
    state = made.page.state()
    assert state["run"]["state"] == "waiting"
    assert "eta_s" not in state["run"], "nobody knows how long it waits"
    assert state["stages"]["2"]["is_empty"]
    assert "the run waits until" in state["stages"]["2"]["limit"]
    assert state["stages"]["0"]["limit"] == "waits for stage 2"
    serving = [row for row in state["peers"].values() if row["state"] == "serving"]
    assert {row["why"] for row in serving} == {"waits: no peer serves stage 2"}
    gone = [row for row in state["peers"].values() if row["state"] == "gone"]
    assert len(gone) == 3
    assert {row["stage"] for row in gone} == {2}
    joining = replace(made.watch.view.peers[0], stage=2, state=PeerState.JOINING, note="no snapshot of stage 2 is left")
    made.watch.view = SwarmView(4, (*made.watch.view.peers[1:], joining))
    assert "is joining: no snapshot of stage 2 is left" in made.page.state()["stages"]["2"]["limit"]
    made.watch.view = SwarmView(4)
    assert made.page.state()["run"]["state"] == "no peers"


def test_a_paused_peer_is_none_that_comes():
    made = made_up_page(num_peers=12)
    [away, *_] = [peer for peer in made.watch.view.peers if peer.stage == 2]
    paused = replace(away, state=PeerState.PAUSED, name="anna", note="paused until 22:00 (hours)", samples_per_s=0.0)
    others = [peer for peer in made.watch.view.peers if peer.peer_id != away.peer_id]
    made.watch.view = SwarmView(4, (paused, *others))
    row = made.page.state()["stages"]["2"]
    serving = len(made.watch.view.serving(2))
    assert (row["serving"], row["paused"], row["is_empty"]) == (serving, 1, False)
    assert made.page.state()["peers"][away.peer_id]["note"] == "paused until 22:00 (hours)"
    made.watch.view = SwarmView(4, (paused, *(peer for peer in others if peer.stage != 2)))
    assert made.page.state()["stages"]["2"]["limit"] == "no peer serves it; anna is paused until 22:00 (hours)"


def test_a_run_that_has_made_its_steps_trains_and_waits_no_more():
    made = made_up_page(num_peers=4)
    last = made.watch.lines[-1] | {"optimizer_step": made.watch.manifest.training.steps}
    made.watch.lines.append(last)
    assert made.page.state()["run"]["state"] == "done"
    assert "eta_s" not in made.page.state()["run"]
    made.watch.view = SwarmView(4)
    assert made.page.state()["run"]["state"] == "done", "its peers may leave now"


def test_the_busy_share_of_the_devices_is_shown_where_it_is_known():
    made = made_up_page(num_peers=12)
    del made.watch.lines[-1]["busy_share"]
    assert "busy" not in made.page.state()["run"]
    made.watch.lines[-1]["busy_share"] = [0.5, None, 0.75, None]
    assert made.page.state()["run"]["busy"] == 0.62


def test_peers_are_told_why_they_compute_little():
    made = made_up_page(num_peers=8)
    one, *others = (replace(peer, state=PeerState.SERVING, note="") for peer in made.watch.view.peers)
    slow = [replace(peer, samples_per_s=0.1 if peer.stage == 3 else 5.0, time_shares=None) for peer in others]

    def row(**fields):
        made.watch.view = SwarmView(4, (*slow, replace(one, **fields)))
        return made.page.state()["peers"][one.peer_id]

    idle = TimeShares(computing=33, ending=10)
    assert row(stage=0, time_shares=idle)["why"] == "mostly waits: stage 3 is slower"
    assert (row(time_shares=idle)["busy"], row(time_shares=idle)["waits"]) == (35, 55)
    assert row(stage=3, samples_per_s=0.1, time_shares=idle)["why"] == "mostly waits: few samples come"
    assert "why" not in row(stage=0, time_shares=TimeShares(computing=90))
    assert "why" not in row(stage=0, time_shares=None)
    assert row(stage=0, state=PeerState.JOINING)["why"] == "gets the weights of its stage"
    assert "why" not in row(stage=0, state=PeerState.JOINING, note="downloads")
    assert row(stage=0, state=PeerState.DRAINING)["why"].startswith("finishes what it has begun")
    assert row(stage=-1, state=PeerState.JOINING)["why"] == "chooses its stage"
    assert row(stage=0, state=PeerState.PAUSED)["why"] == "is paused by its owner"
    assert "why" not in row(stage=0, state=PeerState.PAUSED, note="paused until 22:00 (hours)")
    assert row(is_reachable=False)["reached"] == "with others' help"
    assert row(is_reachable=True)["reached"] == "directly"
    assert row(is_reachable=False, relays=(others[0].peer_id,))["reached"] == f"through {others[0].name}"
    assert row(is_reachable=False, relays=("QmNobody12345678",))["reached"] == "through …12345678"
    assert row(is_reachable=True, unreached=(others[0].peer_id,))["reached"] == f"directly, not by {others[0].name}"
    assert "reached" not in row(is_reachable=None)
    told = row(
        neighbours=(Neighbour(others[0].peer_id[-8:], "", 40, 1_200_000), Neighbour("12345678", "87654321", 9, 0))
    )
    assert told["neighbours"] == [
        f"{others[0].name}: answers within 40 ms, 1.2 MB/s",
        "…12345678 through …87654321: answers within 9 ms, 0 MB/s",
    ]


def test_the_time_of_a_stages_devices_is_shown_where_it_is_known():
    made = made_up_page(num_peers=8)
    told = [replace(peer, time_shares=TimeShares(computing=60, ending=25)) for peer in made.watch.view.in_stage(1)]
    others = [replace(peer, time_shares=None) for peer in made.watch.view.peers if peer.stage != 1]
    made.watch.view = SwarmView(4, (*told, *others))
    stages = made.page.state()["stages"]
    assert (stages["1"]["busy"], stages["1"]["waits"]) == (60, 15)
    assert "busy" not in stages["0"]


def test_the_slowest_stage_is_marked():
    made = made_up_page(num_peers=12)
    slow = [replace(peer, samples_per_s=0.5 if peer.stage == 1 else 5.0) for peer in made.watch.view.peers]
    made.watch.view = SwarmView(4, tuple(slow))
    stages = made.page.state()["stages"]
    assert [stage for stage, row in stages.items() if row["is_bottleneck"]] == ["1"]
    assert "the slowest" in stages["1"]["limit"]
    assert stages["0"]["limit"] == "900% faster than the slowest stage"


def test_words_of_peers_are_made_fit_to_be_shown():
    made = made_up_page(num_peers=4)
    bad = replace(made.watch.view.peers[0], name=HOSTILE, note=HOSTILE * 99, device=HOSTILE, version=HOSTILE)
    made.watch.view = SwarmView(4, (bad, *made.watch.view.peers[1:]))
    text = json.dumps(made.page.state(), ensure_ascii=False)
    for character in ("\x1b", "\u202e", "\0", "\\u0000", "\\u001b"):
        assert character not in text
    assert len(made.page.state()["peers"][bad.peer_id]["note"]) <= 200


def test_no_value_is_none_for_a_patch_would_take_it_away():
    def check(value):
        if isinstance(value, dict):
            for inner in value.values():
                assert inner is not None
                check(inner)

    made = made_up_page(num_peers=4)
    check(made.page.state())
    made.watch.coordination = None
    made.watch.lines.clear()
    check(made.page.state())


def test_curves_keep_to_their_bound_and_follow_rewinds():
    history = History()
    history.add(line(step, loss=step / 1000) for step in range(1, 5001))
    points = history.points()
    assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS
    assert points["3200"][:2] == [pytest.approx(3.2, abs=0.02), pytest.approx(3.2, abs=0.02)]
    history.add([line(2001, round_number=9000, loss=7.0, validation=6.5)])
    after = history.points()
    assert max(map(int, after)) <= 2001
    assert [point[2] for point in after.values() if point[2]] == [6.5]
    history.add([line(2001, round_number=9000)])
    assert history.points() == after, "it is known already"


def test_samples_are_divided_among_the_peers_of_each_stage(tmp_path):
    made = made_up_page(num_peers=8)
    fast, slow = made.watch.view.in_stage(3)
    others = [peer for peer in made.watch.view.peers if peer.stage != 3]
    fast = replace(fast, samples_per_s=3.0, state=PeerState.SERVING)
    slow = replace(slow, samples_per_s=1.0, state=PeerState.SERVING)
    made.watch.view = SwarmView(4, (*others, fast, slow))
    made.watch.lines = [line(1)]
    contributions = ContributionEstimates(tmp_path)
    contributions.look(made.watch, 100.0)
    assert contributions.given[fast.peer_id].samples == 0, "nobody has seen who computed that step"
    made.watch.lines.append(line(2))
    contributions.look(made.watch, 102.0)
    moved = replace(slow, stage=0)
    made.watch.view = SwarmView(4, (*others, fast, moved))
    contributions.look(made.watch, 104.0)
    given = contributions.given
    assert (given[fast.peer_id].samples, given[slow.peer_id].samples) == (6.0, 2.0)
    assert (given[fast.peer_id].served_s, given[slow.peer_id].moves) == (4.0, 1)
    assert sum(each.samples for each in given.values()) == 4 * 8, "each sample passes each stage once"
    contributions.save(104.0)
    again = ContributionEstimates(tmp_path)
    again.begin(resume=True)
    assert again.given == given
    given[fast.peer_id].served_s = 9.0
    contributions.look(made.watch, 4.0)
    again.begin(resume=True)
    assert again.given[fast.peer_id].served_s == 9.0, "it is saved also when the clock is set back"
    (tmp_path / "contributions.json").write_text('{"x": ')
    again.begin(resume=True)
    assert again.given == {}


@pytest.mark.parametrize("counted", [2, None])
def test_after_a_restart_what_peers_tell_once_more_is_not_shared_again(counted):
    """Before the first look at its peers, a coordinator knows of no step."""
    made = made_up_page(num_peers=8)
    made.watch.lines = []
    contributions = ContributionEstimates()
    contributions.begin(resume=True, round_number=counted and line(counted)["round"])
    contributions.look(made.watch, 100.0)
    made.watch.lines = [line(1), line(2)]
    contributions.look(made.watch, 102.0)
    assert sum(each.samples for each in contributions.given.values()) == 0
    made.watch.lines.append(line(3))
    contributions.look(made.watch, 104.0)
    assert sum(each.samples for each in contributions.given.values()) == 4 * 8


def test_shares_are_kept_of_so_many_peers_alone(monkeypatch):
    """Also when more have been seen than are remembered, and several come between two looks."""
    made = made_up_page(num_peers=8)
    monkeypatch.setattr(contributions_module, "MAX_PEERS", 6)
    made.watch.lines = [line(1)]
    contributions = ContributionEstimates()
    contributions.look(made.watch, 100.0)
    made.watch.lines.append(line(2))
    contributions.look(made.watch, 102.0)
    assert len(contributions.given) == 6


def test_a_peer_that_has_come_back_is_not_gone():
    made = made_up_page(num_peers=4)
    here = made.watch.view
    made.page.look()
    made.watch.view = SwarmView(4, here.peers[1:])
    made.page.look()
    assert made.page.state()["peers"][here.peers[0].peer_id]["state"] == "gone"
    made.watch.view = here
    assert made.page.state()["peers"][here.peers[0].peer_id]["state"] == here.peers[0].state.value


# --- How it gets to those who look


async def test_viewers_get_the_state_and_then_patches():
    states = [{"n": 1, "same": "x"}, {"n": 2, "same": "x"}]
    feed = Feed(lambda: dict(states[0]))
    async with feed.viewer() as stream:
        assert data_of(stream.receive_nowait()) == ("state", states[0])
        states.pop(0)
        feed.push()
        assert data_of(stream.receive_nowait()) == ("patch", {"n": 2})
        async with feed.viewer() as late:
            assert data_of(late.receive_nowait()) == ("state", states[0])


async def test_a_viewer_that_does_not_read_is_cut_off():
    feed = Feed(lambda: {"n": time.monotonic()})
    async with feed.viewer() as slow, feed.viewer() as quick:
        quick.receive_nowait()
        for _ in range(feed_module.BACKLOG + 1):
            feed.push()
            quick.receive_nowait()
        for _ in range(feed_module.BACKLOG):
            slow.receive_nowait()
        with pytest.raises(anyio.EndOfStream):
            slow.receive_nowait()


@pytest.mark.parametrize(("num_bytes", "pause"), [(2, PUSH_S), (40_000, 10.0), (400_000, MAX_PAUSE_S)])
def test_large_patches_come_less_often_but_no_viewer_takes_the_page_for_dead(num_bytes, pause):
    assert pause_s(num_bytes) == pause
    silence_ms = re.search(r"SILENCE_MS = (\d+)", (STATIC / "page.js").read_text())[1]
    assert pause_s(num_bytes) * 1000 <= int(silence_ms) / 2


async def test_nothing_is_made_while_nobody_looks():
    made = []
    feed = Feed(lambda: made.append(1) or {})
    with anyio.move_on_after(0.05):
        await feed.run()
    assert made == []
    async with feed.viewer():
        assert len(made) == 1
    with anyio.move_on_after(0.05):
        await feed.run()
    assert len(made) == 1


async def test_a_full_house_and_its_end(monkeypatch):
    monkeypatch.setattr(feed_module, "MAX_VIEWERS", 1)
    feed = Feed(dict)
    async with feed.viewer() as stream:
        assert feed.is_full
        answer = client(feed=feed, cookie=True).get("/events")
        assert answer.status_code == 503
        assert client(feed=feed, cookie=True).head("/events").status_code == 503, "the page asks why it is shut out"
        stream.receive_nowait()
        feed.close()
        with pytest.raises(anyio.EndOfStream):
            stream.receive_nowait()
    assert not feed.is_full
    assert client(feed=feed, cookie=True).head("/events").status_code == 200


@pytest.fixture
def no_garbage_collection():
    """A collection goes through all that other tests have left here, and takes longer than what is measured."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
def test_300_peers_cost_little():
    """All of them announce themselves anew before each push; in truth that takes 7.5 s, and a push comes earlier."""
    made = made_up_page(num_peers=300, steps=600)
    before = made.page.state()
    sent_bytes = len(feed_module._event("state", before).packed)
    at_s, slowest_s = 0.0, 0.0
    while at_s < 60:
        made.advance()
        begun_s = time.thread_time()
        after = made.page.state()
        event = feed_module._event("patch", merge_patch(before, after))
        slowest_s = max(slowest_s, time.thread_time() - begun_s)
        sent_bytes, before = sent_bytes + len(event.packed), after
        at_s += pause_s(len(event.plain))
    assert sent_bytes < 300_000
    assert slowest_s < 0.05


async def test_events_are_packed_and_can_be_read_at_once():
    feed = Feed(lambda: {"n": time.monotonic(), "always": "the same" * 99})
    unpack = zlib.decompressobj(16 + zlib.MAX_WBITS).decompress
    assert unpack(GZIP_HEADER) == b""
    async with feed.viewer() as stream:
        for _ in range(3):
            event = stream.receive_nowait()
            assert unpack(event.packed) == event.plain
            feed.push()


# --- Who gets in


def client(feed=None, cookie=False, host="127.0.0.1:8470", **options):
    app = make_app(feed or Feed(lambda: {"n": 1}), token=TOKEN, **options)
    made = TestClient(app, base_url=f"http://{host}")
    if cookie:
        assert made.get("/", params={"token": TOKEN}).status_code == 200
    return made


def test_the_link_gives_the_page_and_a_cookie():
    browser = client()
    assert browser.get("/").status_code == 401
    assert browser.get("/", params={"token": "guessed"}).status_code == 401
    assert browser.get("/events").status_code == 401
    answer = browser.get("/", params={"token": TOKEN})
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "set-cookie" not in browser.get("/").headers
    assert browser.get("/static/page.js").status_code == 200
    assert browser.get("/static/../app.py").status_code == 404
    assert browser.get("/static/%2e%2e/app.py").status_code == 404


def test_pages_that_tunnels_lead_to_share_no_cookie():
    """Browsers keep the cookies of all ports of a machine together, and the servers may all listen on the same one."""
    named = []
    for host in ("127.0.0.1:8470", "127.0.0.1:9000", "[::1]", "[::1]:9000"):
        headers = {"host": host}
        cookie = client().get("/", params={"token": TOKEN}, headers=headers).headers["set-cookie"].partition(";")[0]
        assert client().get("/", headers=headers | {"cookie": cookie}).status_code == 200
        named.append(cookie.partition("=")[0])
    assert named == ["swarm-8470", "swarm-9000", "swarm-80", "swarm-9000"]


@pytest.mark.parametrize("path", ["/", "/static/page.js", "/nothing"])
def test_the_browser_is_told_to_be_strict(path):
    for browser in (client(), client(cookie=True)):
        headers = browser.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8470", 200),
        ("localhost:1234", 200),
        ("[::1]:8470", 200),
        ("10.1.2.3", 200),
        ("named.example.org:8470", 200),
        ("evil.example.org", 421),
        ("127.0.0.1.evil.example.org", 421),
        ("", 421),
        ("[", 421),
    ],
)
def test_the_host_is_an_address_or_this_machines_name(host, status):
    """A name that somebody else has made to lead here could read the page by a script of his."""
    browser = client(cookie=True, names=["named.example.org"])
    answer = browser.get("/", params={"token": TOKEN}, headers={"host": host})
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8470", 200),
        ("https://127.0.0.1:8470", 200),
        ("http://127.0.0.1:9999", 403),
        ("http://evil.example.org", 403),
        ("null", 403),
    ],
)
def test_other_pages_may_not_read_this_one(origin, status):
    assert client(cookie=True).get("/static/page.js", headers={"origin": origin}).status_code == status


def test_no_cookie_holds_up_the_program():
    """Python 3.11.7 takes ten seconds to undo the quoting of this one."""
    quoted = 'x="' + "\\0" * 30_000 + '"'
    begun_s = time.process_time()
    for token, status in ((TOKEN, 200), (TOKEN[:-1], 401)):
        cookies = f"{quoted}; swarm-80={TOKEN};swarm-8470={token}"
        assert client().get("/", headers={"cookie": cookies}).status_code == status
    assert time.process_time() - begun_s < 2


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_is_for_reading_alone(method):
    assert client(cookie=True).request(method, "/").status_code == 405


def test_one_more_route_is_behind_the_same_guard():
    route = Route("/more", lambda request: PlainTextResponse("more"))
    assert client(routes=[route]).get("/more").status_code == 401
    assert client(routes=[route], cookie=True).get("/more").text == "more"


def test_nothing_comes_from_elsewhere():
    assert {path.name for path in STATIC.iterdir()} >= {"index.html", "page.css", "page.js", "uPlot.iife.min.js"}
    for path in STATIC.iterdir():
        if path.suffix in (".html", ".css", ".js") and not path.name.startswith("uPlot"):
            text = path.read_text()
            assert "//" not in text.replace("// ", "").replace('"http://www.w3.org', ""), path.name
            for unsafe in ("innerHTML", "insertAdjacentHTML", "document.write", "eval(", "style=", 'onclick="'):
                assert unsafe not in text, f"{path.name}: {unsafe}"


# --- Where it is shown


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("8470", ("127.0.0.1", 8470)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:80", ("::1", 80)),
        ("gpu.example.org:8470", ("gpu.example.org", 8470)),
    ],
)
def test_places(text, place):
    assert parse_place(text) == place


@pytest.mark.parametrize("text", ["", "x", ":80", "host:", "1.2.3.4:99999", "８０"])
def test_what_is_no_place(text):
    with pytest.raises(UserError, match=r"expected PORT or HOST:PORT"):
        parse_place(text)


def test_a_port_that_is_taken_gives_way_to_the_next_one():
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            assert port < second.getsockname()[1] < port + 20
            assert link(second, "127.0.0.1", "t") == f"http://127.0.0.1:{second.getsockname()[1]}/?token=t"
    with pytest.raises(UserError, match="cannot listen there"):
        bind("203.0.113.1", 8470)


def test_the_token_outlives_a_restart(tmp_path):
    token = kept_token(tmp_path)
    assert len(token) >= 20
    assert kept_token(tmp_path) == token
    assert (tmp_path / "dashboard-token").stat().st_mode & 0o777 == 0o600
    (tmp_path / "dashboard-token").write_bytes(b"\xff" * 30)
    assert kept_token(tmp_path) != token
    (tmp_path / "dashboard-token").write_text("short")
    assert kept_token(tmp_path) not in ("short", token)
    assert kept_token(None) != kept_token(None)
    assert len(kept_token(tmp_path / "nowhere")) >= 20
