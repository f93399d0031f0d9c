import json
import resource
from dataclasses import replace

import pytest

from coordinator.run.run_files import RunFiles
from coordinator.watch import journal as journal_module
from coordinator.watch.contributions import ContributionEstimates
from coordinator.watch.happenings import MOVING_S, Happenings, make_event, standing
from coordinator.watch.journal import EVENTS, Journal, read_events
from coordinator.watch.metrics_file import metrics_line
from coordinator.watch.promises import Promises
from coordinator.watch.pulse import CoordinatorPulse
from coordinator.watch.run_watch import RunWatch
from swarm_peer.config import RunManifest
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.plain_text import plain_text
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.wire.records import Assignment, CoordinationRecord

LIFETIME_S = 30.0
MANIFEST = RunManifest.model_validate(
    {
        "name": "told",
        "model": {"config": "none"},
        "stages": {"count": 2},
        "data": {"sequence_length": 8},
        "training": {"steps": 100, "global_batch_size": 8, "microbatch_size": 2},
        "optimizer": {"learning_rate": 0.1},
    }
)


def peer(peer_id, stage=0, state=PeerState.SERVING, **fields):
    return PeerView(peer_id=peer_id, stage=stage, state=state, **fields)


A, B, C = peer("a", 0, name="alice", incarnation=5), peer("b", 0), peer("c", 1)


class Run:
    """A run that is looked at again and again."""

    def __init__(self, happenings=None):
        self.watch = RunWatch(MANIFEST, SwarmView(2))
        self.happenings = happenings or Happenings(lifetime_s=LIFETIME_S, begun_s=0.0)
        self.now_s = 0.0

    def look(self, *peers, left=(), after_s=2.0):
        self.now_s += after_s
        self.watch.view = SwarmView(2, peers, frozenset(left))
        return self.happenings.look(self.watch, self.now_s)

    def line(self, optimizer_step, round_number):
        self.watch.lines = [line for line in self.watch.lines if line["optimizer_step"] < optimizer_step]
        self.watch.lines.append(
            metrics_line(
                optimizer_step=optimizer_step,
                round_number=round_number,
                loss=1.0,
                samples=8,
                seconds=1.0,
                sequence_length=8,
                peers=[1, 1],
            )
        )


def kinds(events):
    return [(event["kind"], event["stage"], event["peer"]) for event in events]


def test_peers_come_and_are_told_once():
    run = Run()
    first = run.look(A, C)
    assert kinds(first) == [("joined", 0, "a"), ("joined", 1, "c")]
    assert first[0] == {
        "time": 2.0,
        "kind": "joined",
        "stage": 0,
        "peer": "a",
        "name": "alice",
        "text": "alice (…a) joins stage 0.",
    }
    assert first[1]["name"] is None
    assert run.look(A, C) == []


def test_a_peer_that_falls_silent_has_died_and_may_be_seen_again():
    run = Run()
    run.look(A, B, C)
    assert kinds(run.look(B, C)) == [("died", 0, "a")]
    assert "is seen again" in run.look(A, B, C)[0]["text"]
    run.look(B, C)
    assert "joins" in run.look(replace(A, incarnation=6), B, C)[0]["text"], "it is another life"
    assert "begins anew" in run.look(replace(A, incarnation=7), B, C)[0]["text"]


@pytest.mark.parametrize("tombstone", [True, False])
def test_a_peer_that_drains_has_left(tombstone):
    run = Run()
    run.look(A, B, C)
    if tombstone:
        assert run.look(B, C, left="a") == [], "it may be on its way to another stage"
    else:
        run.look(replace(A, state=PeerState.DRAINING), B, C)
        assert run.look(B, C) == []
    assert kinds(run.look(B, C, after_s=MOVING_S)) == [("left", 0, "a")]
    assert run.look(B, C, after_s=MOVING_S) == []


def test_a_move_is_told_with_its_reason():
    run = Run()
    order = Assignment(peer="a", announced=1, from_stage=0, to_stage=1, reason="stage 1 limits the run")
    run.watch.observe_coordinator((Term(3, "boss-peer"), CoordinationRecord(warrant=b"", beat=1, assignments=(order,))))
    assert kinds(run.look(A, B, C)) == [
        ("coordinator", None, None),
        ("joined", 0, "a"),
        ("joined", 0, "b"),
        ("joined", 1, "c"),
    ]
    run.watch.observe_coordinator((Term(3, "boss-peer"), CoordinationRecord(warrant=b"", beat=2)))
    assert run.look(B, C, left="a") == []
    (moved,) = run.look(replace(A, stage=1, moved_from=0), B, C)
    assert kinds([moved]) == [("moved", 1, "a")]
    assert moved["text"] == "alice (…a) moves from stage 0 to stage 1: stage 1 limits the run."
    (back,) = run.look(replace(A, stage=0, moved_from=1), B, C)
    assert "by itself" in back["text"]


def test_a_stage_without_peers_and_its_rescue():
    run = Run()
    assert ("stage_empty", 0, None) not in kinds(run.look(C)), "no peer has served it yet"
    run.look(A, B, C)
    assert kinds(run.look(A, B)) == [("died", 1, "c"), ("stage_empty", 1, None)]
    assert run.look(A, B) == []
    (moved,) = run.look(A, replace(B, stage=1, state=PeerState.JOINING, moved_from=0))
    assert moved["text"].endswith("that stage had lost all its peers.")
    (served,) = run.look(A, replace(B, stage=1))
    assert kinds([served]) == [("stage_served", 1, None)]


def test_a_rewind_is_told_with_the_first_step_after_it():
    run = Run()
    for step in range(1, 121):
        run.line(step, step - 1)
        assert all(event["kind"] != "rewound" for event in run.look(A, C))
    run.line(101, 124)
    run.line(102, 125)
    (rewound,) = run.look(A, C)
    assert rewound["kind"] == "rewound"
    assert "from optimizer step 120 to 100" in rewound["text"]
    assert run.look(A, C) == []


def test_a_rewind_to_the_step_before_the_last_one():
    run = Run()
    run.line(1, 0)
    run.look(A, C)
    run.line(1, 5)
    assert kinds(run.look(A, C)) == [("rewound", None, None)]


def test_a_restart_waits_for_the_peers_that_it_knows():
    former = Run()
    known = former.look(A, B, C)
    run = Run(Happenings(lifetime_s=LIFETIME_S, begun_s=0.0, known=known, optimizer_step=7, round_number=9))
    assert run.look() == [], "nothing is found yet"
    assert run.look(A) == [], "it is not told again"
    run.line(8, 10)
    assert kinds(run.look(A, after_s=LIFETIME_S)) == [("died", 0, "b"), ("died", 1, "c"), ("stage_empty", 1, None)]


def test_who_was_revoked_has_not_died():
    revoked = set()
    run = Run(Happenings(lifetime_s=LIFETIME_S, begun_s=0.0, is_revoked=revoked.__contains__))
    run.look(A, B, C)
    revoked.add("b")
    [event] = run.look(A, C)
    assert (event["kind"], event["peer"]) == ("left", "b")
    assert event["text"].endswith("of stage 0 is out: the run's operator has revoked it or its invite.")
    assert kinds(run.look(A))[0] == ("died", 1, "c")


def test_what_still_holds():
    run = Run()
    told = [*run.look(A, B, C), *run.look(A, B), *run.look(A, replace(B, stage=1, state=PeerState.JOINING))]
    assert kinds(standing(told)) == [("joined", 0, "a"), ("stage_empty", 1, None), ("moved", 1, "b")]
    assert standing([*told, make_event("ended", "over", 9.0)]) == []


def test_text_of_peers_is_made_fit_to_be_shown():
    assert plain_text("a\x1b[31mb\n\tc\u202ed\u2066e\u200bf\0", 40) == "a [31mb c d e f"
    assert plain_text("<b>x</b>", 40) == "<b>x</b>", "the page shows it as text"
    assert plain_text("x" * 100, 10) == "x" * 9 + "…"
    assert len(plain_text("e" + "\u0301" * 60, 40)) == 3
    assert plain_text("ю" * 10**6, 5) == "юююю…"


def begun(folder, **options):
    journal = Journal(folder)
    return journal, journal.begin(lifetime_s=LIFETIME_S, now_s=0.0, **options)


def test_a_journal_outlives_its_writer(tmp_path):
    run = Run()
    journal, is_known = begun(tmp_path)
    assert not is_known
    run.look(A, C)
    journal.look(run.watch, 2.0)
    journal.tell("checkpoint", "The checkpoint of optimizer step 5 is saved.", 3.0)
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"time": 4, "kind": "jo')
    again, is_known = begun(tmp_path)
    assert is_known
    again.look(run.watch, 5.0)
    again.tell("ended", "over", 6.0)
    assert [event["kind"] for event in read_events(tmp_path)] == ["joined", "joined", "checkpoint", "ended"]
    assert list(again.newest) == read_events(tmp_path)
    assert again.num_events == 4
    anew, is_known = begun(tmp_path, resume=False)
    assert not is_known
    assert read_events(tmp_path) == []
    assert not anew.newest


def test_lines_that_are_no_events_are_left_out(tmp_path):
    good = make_event("joined", "x", 1.0, stage=1, peer="p")
    bad = [{**good, "kind": "blessed"}, {**good, "time": "now"}, {"kind": "joined"}, [], 5]
    bad += [{**good, "time": time} for time in (float("nan"), float("inf"), -1e300, 10**400)]  # no browser shows them
    (tmp_path / EVENTS).write_text("".join(json.dumps(line) + "\n" for line in (*bad, good)) + "\n{]\xff")
    assert read_events(tmp_path) == [good]
    (tmp_path / EVENTS).write_text(json.dumps({**good, "stage": None}) + "\n")
    begun(tmp_path, resume=True)  # nobody knows where that peer is


def test_the_file_is_bounded_and_keeps_who_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "MAX_BYTES", 5000)
    run = Run()
    journal, _ = begun(tmp_path)
    run.look(A, C)
    journal.look(run.watch, 2.0)
    for number in range(300):
        journal.tell("checkpoint", f"number {number}", 3.0 + number)
        assert (tmp_path / EVENTS).stat().st_size < 5200
    kept = read_events(tmp_path)
    assert kinds(kept[:2]) == [("joined", 0, "a"), ("joined", 1, "c")]
    assert kept[-1]["text"] == "number 299"
    again, _ = begun(tmp_path)
    again.look(run.watch, 400.0)
    assert read_events(tmp_path) == kept, "nobody has joined again"


def test_a_journal_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    (tmp_path / EVENTS).mkdir()
    journal, is_known = begun(tmp_path)
    assert not is_known
    run = Run()
    run.look(A, C)
    journal.look(run.watch, 2.0)
    journal.look(run.watch, 4.0)
    assert len(journal.newest) == 2
    assert len([record for record in caplog.records if "events_not_written" in record.message]) == 1


def test_an_event_that_a_full_disk_has_cut_off_spoils_no_other(tmp_path):
    journal, _ = begun(tmp_path)
    journal.tell("checkpoint", "5", 1.0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / EVENTS).stat().st_size + 20, limits[1]))
    try:
        journal.tell("checkpoint", "10", 2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [event["text"] for event in read_events(tmp_path)] == ["5"]
    for number in (15, 20):
        journal.tell("checkpoint", str(number), 3.0)
    assert [event["text"] for event in read_events(tmp_path)] == ["5", "10", "15", "20"], "it is written late"
    assert journal.close() == ""


def test_events_that_a_disk_never_takes_are_told_when_the_journal_is_closed(tmp_path):
    journal, _ = begun(tmp_path)
    (tmp_path / EVENTS).unlink(missing_ok=True)
    (tmp_path / EVENTS).mkdir()
    journal.tell("checkpoint", "5", 1.0)
    assert journal.close() == "Is a directory"
    (tmp_path / EVENTS).rmdir()
    assert journal.close() == "", "once there is room"
    assert [event["text"] for event in read_events(tmp_path)] == ["5"]


def test_a_journal_without_a_folder_is_in_memory():
    journal, _ = begun(None)
    journal.tell("ended", "over", 1.0)
    assert [event["text"] for event in journal.newest] == ["over"]


def open_files(folder, *, resume, promises=None):
    written = []
    files = RunFiles(
        folder=folder,
        manifest=MANIFEST,
        resume=resume,
        journal=Journal(folder),
        contributions=ContributionEstimates(folder),
        clock=SystemClock(),
        on_line=written.append,
        promises=promises or Promises(),
    )
    return files, written


def test_what_the_disk_has_not_taken_when_the_files_are_closed_is_told(tmp_path):
    promises, run = Promises(), Run()
    files, _ = open_files(tmp_path, resume=False, promises=promises)
    for name in ("metrics.jsonl", EVENTS, "contributions.json"):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).mkdir()
    run.look(A, C)
    run.line(1, 0)
    files.write_lines(run.watch.lines, run.watch.returns)
    files.look(run.watch)
    files.close()
    assert promises.unkept() == [
        "metrics.jsonl lacks lines (Is a directory)",
        "events.jsonl lacks lines (Is a directory)",
        "contributions.json was not kept (Is a directory)",
    ]


def test_of_events_that_were_cut_off_together_none_comes_twice(tmp_path):
    journal, _ = begun(tmp_path)
    size = (tmp_path / EVENTS).stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    events = [make_event("checkpoint", text, 1.0) for text in ("5", "10")]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + len(json.dumps(events[0])) + 20, limits[1]))
    try:
        journal._add(events)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.tell("checkpoint", "15", 2.0)
    assert [event["text"] for event in read_events(tmp_path)] == ["5", "10", "15"]


def test_a_coordinator_goes_on_with_the_files_of_its_run(tmp_path):
    run = Run()
    run.look(A, C)
    run.line(1, 0)
    for resume in (False, True, True):
        files, written = open_files(tmp_path, resume=resume)
        files.write_lines(run.watch.lines, run.watch.returns)
        files.look(run.watch)
        files.close()
        assert len(written) == (0 if resume else 1)
    assert files.round_number == 0
    told = [event["kind"] for event in read_events(tmp_path)]
    assert told == ["started", "joined", "joined", "coordinator", "coordinator"]
    assert json.loads((tmp_path / "contributions.json").read_text()).keys() == {"a", "c"}
    files, _ = open_files(tmp_path, resume=False)
    assert [event["kind"] for event in read_events(tmp_path)] == ["started"]


def test_who_comes_to_a_run_under_way_is_told_who_was_there():
    run = Run(Happenings(lifetime_s=LIFETIME_S, begun_s=1000.0))
    before, after = replace(B, incarnation=999_000), replace(C, incarnation=1_001_000)
    texts = [event["text"] for event in run.look(before, after)]
    assert texts == ["Peer (…b) is there already, in stage 0.", "Peer (…c) joins stage 1."]


def test_a_restart_tells_no_term_of_before():
    known = [make_event("started", "Run told.", 1.0)]
    run = Run(Happenings(lifetime_s=LIFETIME_S, begun_s=0.0, known=known))
    run.watch.observe_coordinator((Term(3, "boss-peer"), CoordinationRecord(warrant=b"", beat=9)))
    assert run.look() == []
    run.watch.observe_coordinator((Term(4, "boss-peer"), CoordinationRecord(warrant=b"", beat=0)))
    assert kinds(run.look()) == [("coordinator", None, None)]


def test_a_coordinator_whose_beat_stands_still_lives_no_more():
    def said(term, beat):
        return Term(term, "boss"), CoordinationRecord(warrant=b"", beat=beat)

    pulse = CoordinatorPulse(lease_s=30)
    assert pulse.living(None, 0) is None
    assert pulse.living(said(3, 7), 100) == said(3, 7), "nobody can tell yet"
    assert pulse.living(said(3, 7), 129) == said(3, 7)
    assert pulse.living(said(3, 7), 130) is None
    assert pulse.living(said(3, 8), 131) == said(3, 8), "it was cut off"
    assert pulse.living(said(3, 8), 161) is None
    assert pulse.living(said(4, 0), 162) == said(4, 0), "another one, or this one anew"


def test_who_is_paused_is_told_with_the_reason_and_so_is_that_it_is_back():
    run, other = Run(), peer("d", 1)
    run.look(A, B, C, other)
    paused = replace(C, state=PeerState.PAUSED, note="paused until 22:00 (hours)")
    [event] = run.look(A, B, other, paused)
    assert kinds([event]) == [("paused", 1, "c")]
    assert event["text"].endswith(" of stage 1 is paused until 22:00 (hours).")
    assert run.look(A, B, other, replace(paused, note="paused by its owner")) == []
    assert kinds(run.look(A, B, other, replace(C, state=PeerState.JOINING))) == [("resumed", 1, "c")]
    assert run.look(A, B, other, C) == []
    run.look(A, B, other, paused)
    assert run.look(A, B, other, left=["c"]) == []
    assert kinds(run.look(A, B, other, left=["c"], after_s=MOVING_S)) == [("left", 1, "c")], (
        "it ends while it is paused"
    )
