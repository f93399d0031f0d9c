"""A run that stands still says so wherever it is watched: terminal, table, page, journal, metrics and JSON."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console
from watched_runs import make_watch, peer, record, report

from coordinator.dashboard.snapshot import Background, make_snapshot
from coordinator.watch.happenings import TELL_AGAIN_S
from coordinator.watch.journal import Journal
from coordinator.watch.live_view import LiveView, peers_table, run_table
from coordinator.watch.metrics import CoordinatorMetrics
from coordinator.watch.standstill_words import WHAT, in_words
from coordinator.watch.summary import summarise
from swarm_peer.policy.standstill import STANDS_S
from swarm_peer.policy.trouble import Trouble
from swarm_peer.policy.view import PeerState, SwarmView
from swarm_peer.protocol.epochs import COORDINATORS, Epoch, Place
from swarm_peer.protocol.statements import EpochId, Seat
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.network.electorate import PATIENCE_S, Electorate

WORDS = "every microbatch fails: the loss is not finite"
FAILING = replace(peer("12D3KooWabcdefgh", 0), name="anna", note=WORDS, trouble=Trouble.FAILING, trouble_since_s=100.0)
OTHER = replace(peer("c", 1), note="")
TOLD = f"stage 0 brings no microbatch through: anna (…abcdefgh) says: {WORDS}"


def seen(*peers, now_s=100.0 + STANDS_S, watch=None):
    watch = watch or make_watch()
    watch.observe(SwarmView(2, (*peers, OTHER)), {}, now_s)
    return watch


class Told:
    """A journal that has begun, and what it tells as it happens."""

    def __init__(self, folder):
        self.events = []
        self.journal = Journal(folder, on_event=lambda event: self.events.append((event["kind"], event["text"])))
        self.journal.begin(lifetime_s=10.0, now_s=0.0)

    def look(self, watch, now_s):
        self.events.clear()
        self.journal.look(watch, now_s)
        kinds = ("stands_still", "goes_on", "trouble")
        return [event for event in self.events if event[0] in kinds]


def test_it_is_told_once_and_again_after_a_while_and_when_it_goes_on(tmp_path):
    told = Told(tmp_path)
    assert told.look(seen(FAILING, now_s=99.0 + STANDS_S), 0.0) == []
    assert told.look(seen(FAILING), 1.0) == [("stands_still", f"The run stands still: {TOLD}.")]
    newer = replace(FAILING, note="every microbatch fails: unreachable")
    assert told.look(seen(newer), 2.0) == []
    [(kind, text)] = told.look(seen(newer), 2.0 + TELL_AGAIN_S)
    assert kind == "stands_still"
    assert "unreachable" in text, "the newest cause"
    diverged = replace(FAILING, trouble=Trouble.DIVERGED)
    [(kind, text)] = told.look(seen(diverged), 3.0 + TELL_AGAIN_S)
    assert "no number is finite" in text, "another trouble"
    assert told.look(seen(peer("12D3KooWabcdefgh", 0)), 700.0) == [("goes_on", "The run goes on.")]
    assert told.look(seen(peer("12D3KooWabcdefgh", 0)), 800.0) == []
    written = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert written.count("stands_still") == 3


def test_what_one_peer_cannot_do_is_told_once_though_the_run_goes_on(tmp_path):
    told = Told(tmp_path)
    cut = replace(FAILING, trouble=Trouble.DATA_UNREAD, trouble_since_s=100.0, note="the rest of slice 3 is left out")
    text = "anna (…abcdefgh) of stage 0 is in trouble: the rest of slice 3 is left out."
    assert told.look(seen(cut), 1.0) == [("trouble", text)]
    assert told.look(seen(cut), 2.0) == []
    well = replace(cut, trouble=None, trouble_since_s=None, note="")
    for now_s in (3.0, 4.0):  # a hostile peer comes into trouble with each announcement
        assert told.look(seen(well), now_s) == []
        assert told.look(seen(cut), now_s + 0.5) == []
    told.look(seen(well), 5.0 + TELL_AGAIN_S)
    assert told.look(seen(cut), 6.0 + TELL_AGAIN_S) == [("trouble", text)]


@pytest.mark.parametrize("trouble", [each for each in Trouble if each.holds_up])
def test_each_trouble_that_holds_up_a_stage_is_told_in_words(trouble):
    watch = seen(replace(FAILING, trouble=trouble))
    watch.observe(watch.view, {}, 100.0 + 2 * STANDS_S)
    assert in_words(watch.standstill) == f"stage 0 {WHAT[trouble]}: anna (…abcdefgh) says: {WORDS}"


def test_those_that_the_run_stands_still_for_are_not_told_of_one_by_one(tmp_path):
    told = Told(tmp_path)
    others = [replace(FAILING, peer_id=f"12D3KooWother{number}") for number in range(20)]
    assert [kind for kind, _ in told.look(seen(FAILING, *others), 1.0)] == ["stands_still"]


def test_the_terminal_prints_it_in_one_line_with_the_time(capsys):
    live = LiveView(10)
    live._console = Console(width=40, file=io.StringIO())
    hostile = replace(FAILING, note="\x1b[2Jred [bold]" + "x" * 500)
    journal = Journal(on_event=live.tell)
    journal.begin(lifetime_s=10.0, now_s=0.0)
    journal.look(seen(hostile), 1.0)
    [line] = [line for line in live._console.file.getvalue().splitlines() if "stands still" in line]
    assert "\x1b" not in line
    assert "red [bold]" in line
    assert len(line) < 450
    assert line[:2] == "20"
    assert "joins" not in live._console.file.getvalue(), "the table shows that"


def shown(*tables):
    console = Console(width=300, record=True, file=io.StringIO())
    for table in tables:
        console.print(table)
    return " ".join(console.export_text().split())


def test_status_shows_it_at_one_look():
    watch = seen(FAILING)
    text = shown(run_table(watch), peers_table(watch))
    assert f"the run stands still, for {STANDS_S:.0f} s: {TOLD}" in text
    assert text.count(WORDS) == 2, "and beside the peer"
    summary = summarise(watch)
    assert summary["standstill"] == {
        "seconds": STANDS_S,
        "stage": 0,
        "trouble": "failing",
        "reason": TOLD,
        "peer": FAILING.peer_id,
    }
    assert summary["stages"][0]["peers"][0]["trouble"] == "failing"
    assert json.loads(json.dumps(summary)) == summary
    assert summarise(seen(peer("a", 0)))["standstill"] is None


def test_status_says_what_a_stage_waits_for_whose_peers_only_join():
    joining = replace(peer("b", 1, PeerState.JOINING), note="waits to join stage 1: nobody gave it", since_s=0.0)
    watch = make_watch()
    watch.observe(SwarmView(2, (peer("a", 0), joining)), {}, 100.0)
    text = shown(run_table(watch))
    assert "the run waits: nobody serves stage 1" in text
    assert "those that join cannot: peer (…b) says: waits to join stage 1: nobody gave it" in text


def test_status_says_how_many_peers_the_first_round_waits_for():
    watch = make_watch()
    stages = watch.manifest.stages.model_copy(update={"peers_to_start": 2})
    watch.manifest = watch.manifest.model_copy(update={"stages": stages})
    watch.observe(SwarmView(2, (peer("a", 0), peer("b", 0), peer("c", 1))), {}, 0.0)
    assert "the run begins once each stage has 2 peers; stage 1 has fewer" in shown(run_table(watch))
    watch.observe(SwarmView(2, (peer("a", 0), peer("c", 1))), {"a": record(report(1), round_number=1)}, 1.0)
    assert "begins once" not in shown(run_table(watch))


def test_the_page_shows_it():
    state = make_snapshot(seen(FAILING), Background(given={}, labels={}), unix_s=1000.0)
    assert state["run"]["state"] == "standing"
    assert state["run"]["standstill"] == f"for {STANDS_S:.0f} s: {TOLD}"
    assert state["peers"][FAILING.peer_id]["note"] == WORDS
    assert "why" not in state["peers"][FAILING.peer_id], "its note says it"
    ended = make_snapshot(seen(FAILING), Background(given={}, labels={}, ended="over"), unix_s=1000.0)
    assert (ended["run"]["state"], "standstill" in ended["run"]) == ("ended", False)


def test_prometheus_sees_it(tmp_path):
    metrics = CoordinatorMetrics(tmp_path, SimpleNamespace(addresses=[], metrics=PeerMetrics()))

    def value():
        return metrics.registry.get_sample_value("swarm_run_standstill_seconds", {"trouble": "failing"})

    metrics.update(seen(peer("a", 0)))
    assert value() is None
    metrics.update(seen(FAILING))
    assert value() == STANDS_S
    metrics.update(seen(peer("a", 0)))
    assert value() is None


def test_a_run_that_has_made_its_steps_does_not_stand_still():
    watch = make_watch(steps=1)
    watch.observe(SwarmView(2, (FAILING, OTHER)), {FAILING.peer_id: record(report(1), round_number=1)}, 500.0)
    assert watch.has_finished
    assert (watch.standstill, watch.troubled) == (None, [])


@pytest.mark.parametrize(("counts", "stands"), [(True, False), (False, True)])
def test_samples_that_count_speak_for_a_run_whose_other_peer_is_idle(counts, stands):
    watch, idle = make_watch(), replace(peer("b", 0), queue=0, note="")
    for number in range(10):
        progress = {"b": record(round_number=1, samples=number if counts else 0)}
        watch.observe(SwarmView(2, (FAILING, idle, OTHER)), progress, 100.0 + 10 * number)
    assert (watch.standstill is not None) == stands


# --- waiting for those who vote


ME, ANNA, BEA = (Seat(f"12D3KooW{name}", 1, "") for name in ("coordinator", "annaanna", "beabeabea"))
BEGUN = Epoch(EpochId(1, ME, 0), (Place(COORDINATORS, ME), Place(0, ANNA), Place(1, BEA)))


def view_of(*seats):
    """The peers of these seats, as they announce themselves."""
    found = [replace(peer(seat.peer, stage), name=seat.peer[8:12]) for stage, seat in enumerate((ANNA, BEA))]
    return SwarmView(2, tuple(each for each in found if each.peer_id in {seat.peer for seat in seats}))


def test_voters_that_are_gone_are_named_once_they_have_been_silent_for_a_while():
    electorate = Electorate(ME.peer)
    assert electorate.look(BEGUN, view_of(ANNA, BEA), 0.0, lacks_voters=False) == ""
    assert electorate.look(BEGUN, view_of(), 1.0, lacks_voters=True) == ""
    gone = electorate.look(BEGUN, view_of(), 1.0 + PATIENCE_S, lacks_voters=True)
    assert gone == "most of those who vote are gone: anna (…annaanna), beab (…eabeabea)"
    assert electorate.look(BEGUN, view_of(), 2.0 + PATIENCE_S, lacks_voters=False) == ""
    assert electorate.look(BEGUN, view_of(), 3.0 + PATIENCE_S, lacks_voters=True) == "", "anew"


def test_voters_that_still_announce_themselves_are_only_silent():
    electorate = Electorate(ME.peer)
    electorate.look(BEGUN, view_of(ANNA, BEA), 0.0, lacks_voters=True)
    words = electorate.look(BEGUN, view_of(ANNA, BEA), PATIENCE_S, lacks_voters=True)
    assert words == "most of those who vote are silent"


def test_another_coordinator_and_a_peer_that_was_never_seen_have_no_names():
    other = Seat("12D3KooWthe-other", 1, "")
    epoch = replace(
        BEGUN, places=(*BEGUN.places, Place(COORDINATORS, other), Place(0, Seat("12D3KooWnever-seen", 1, "")))
    )
    electorate = Electorate(ME.peer)
    electorate.look(epoch, view_of(ANNA, BEA), 0.0, lacks_voters=True)
    words = electorate.look(epoch, view_of(ANNA, BEA), PATIENCE_S, lacks_voters=True)
    assert words == "most of those who vote are gone: a coordinator (…he-other), peer (…ver-seen)"


def test_it_is_told_for_whom_the_run_waits(tmp_path):
    told, watch = Told(tmp_path), make_watch()
    watch.observe(SwarmView(2, (replace(peer("a", 0), note=""), OTHER)), {}, 1.0)
    watch.observe_waiting("most of those who vote are silent")
    text = "The run waits: most of those who vote are silent."
    assert told.look(watch, 1.0) == [("stands_still", text)]
    assert told.look(watch, 2.0) == []
    run = make_snapshot(watch, Background(given={}, labels={}), 2.0)["run"]
    assert (run["state"], run["standstill"]) == ("standing", "waiting: most of those who vote are silent")
    output = io.StringIO()
    Console(file=output, width=120).print(run_table(watch))
    assert "the run waits: most of those who vote are silent" in output.getvalue()
    watch.observe_waiting("")
    assert told.look(watch, 3.0) == [("goes_on", "The run goes on.")]
