"""What a terminal or a log shows of a run."""

import io
import re
from dataclasses import replace
from types import SimpleNamespace

from contexts import make_context, unparsed
from rich.console import Console
from watched_runs import VIEW, make_watch, peer

from coordinator.watch.happenings import make_event
from coordinator.watch.live_view import LiveView, note_of, peers_table, run_table
from coordinator.watch.reached import missing_ways_line
from coordinator.watch.run_watch import RunWatch
from swarm_peer.peer_options import PeerOptions
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.view import Neighbour, PeerState, SwarmView


def test_a_status_says_which_stage_the_run_waits_for_and_nothing_of_balance():
    def caption(view, begun_at=0):
        watch = make_watch()
        watch.begun_at = begun_at
        watch.observe(view, {}, 0.0)
        watch.coordination = Term(1, "a"), SimpleNamespace(reason="no move pays: it does 0 samples/s", assignments=())
        return run_table(watch).caption.plain.splitlines()[1:]

    assert caption(VIEW) == ["rebalancing: no move pays: it does 0 samples/s"]
    assert caption(SwarmView(2, (peer("a", 0),))) == ["the run waits: nobody serves stage 1"]
    assert caption(SwarmView(2, ())) == ["the run waits: nobody serves stage 0, 1"]
    assert caption(SwarmView(2, ()), 3) == ["rebalancing: no move pays: it does 0 samples/s"], "nobody is seen yet"


def test_a_coordinator_commands_no_terminal():
    watch = make_watch()
    watch.begun_at = 1
    reason = "[/b] [red]\x1b[2J\nrun over"
    watch.coordination = Term(1, "a"), SimpleNamespace(reason=reason, assignments=())
    console = Console(width=200, file=io.StringIO(), force_terminal=False)
    console.print(run_table(watch))
    assert "rebalancing: [/b] [red] [2J run over" in console.file.getvalue()
    assert "\x1b" not in console.file.getvalue()


def test_a_log_says_once_that_the_run_waits_for_a_stage(capsys):
    """Where there is no terminal, a line comes with each step, and none with a run that stands still."""
    watch, live = make_watch(), LiveView(10)
    empty = SwarmView(2, (peer("a", 0),))
    for begun_at, view in ((0, empty), (3, VIEW), (3, empty), (3, empty), (3, VIEW), (3, empty)):
        watch.begun_at = begun_at
        watch.observe(view, {}, 0.0)
        live.update(watch)
    said = capsys.readouterr().out
    assert said.count("The run waits: nobody serves stage 1.") == 2
    assert said.count("The run waits for its first peer of stage 1.") == 1


def test_a_run_that_begins_waits_for_no_peer_that_is_joining(capsys):
    watch, live = make_watch(), LiveView(10)
    joining = replace(peer("b", 1), state=PeerState.JOINING)
    for peers in ((peer("a", 0), joining), (peer("a", 0),), (peer("a", 0),), (peer("a", 0), joining)):
        watch.observe(SwarmView(2, peers), {}, 0.0)
        live.update(watch)
    assert [line for line in capsys.readouterr().out.splitlines() if "waits" in line] == [
        "The run waits for its first peer of stage 1."
    ]


def test_a_coordinator_that_is_started_again_says_nothing_before_it_has_looked(capsys):
    """Its files say how far the run is, and nothing of who serves it."""
    watch, live = make_watch(), LiveView(10)
    watch.begun_at = 3
    watch.observe(SwarmView(2), {}, 0.0)
    live.update(watch)
    assert capsys.readouterr().out == ""
    watch.observe(VIEW, {}, 1.0)
    live.update(watch)
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  step 3/10 .* peers 2,1\n$", capsys.readouterr().out)


def test_who_looks_on_is_told_that_the_run_went_back(capsys):
    live = LiveView(10)
    live.tell(make_event("rewound", "The run has gone back from optimizer step 7 to 5.", 0.0))
    live.tell(make_event("joined", "anna joins stage 0.", 0.0))
    assert re.fullmatch(r"[-\d]+ [:\d]+  The run has gone back from optimizer step 7 to 5\.\n", capsys.readouterr().out)


def test_a_note_gives_a_terminal_no_commands():
    note = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\u202e[red]\nnote"
    view = SwarmView(2, (replace(peer("a", 0), note=note, is_reachable=False),))
    terminal = io.StringIO()
    Console(width=160, file=terminal, color_system=None, force_terminal=True).print(
        peers_table(RunWatch(make_watch().manifest, view))
    )
    assert "]52;c;ZXZpbA== [2J [red] note" in terminal.getvalue()
    assert not {"\x1b", "\x07", "\u202e"} & set(terminal.getvalue())


def test_the_table_shows_how_peers_are_reached_and_whose_port_would_help():
    bob = replace(
        peer("b", 1), name="bob", is_reachable=True, neighbours=(Neighbour("a", "", 40, 9), Neighbour("c", "", 7, 9))
    )
    ann = replace(peer("a", 0), name="ann", is_reachable=False, unreached=("b",), state=PeerState.JOINING)
    watch = RunWatch(make_watch().manifest, SwarmView(2, (ann, bob)))
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(run_table(watch))
    console.print(peers_table(watch))
    text = " ".join(console.export_text().split())
    assert "directly, 40 ms" in text
    assert "with others' help, not by bob" in text
    line = "1 pair of peers without a way: what would help most is a port that is forwarded to"
    assert f"{line} ann or bob" in text
    cleo = replace(peer("c", 0), name="cleo", unreached=("b",))
    watch = RunWatch(make_watch().manifest, SwarmView(2, (ann, bob, cleo)))
    assert missing_ways_line(watch) == f"{line.replace('1 pair', '2 pairs')} bob"
    assert missing_ways_line(RunWatch(make_watch().manifest, SwarmView(2, (bob,)))) == ""


def test_a_note_says_what_a_peer_lends_of_its_link():
    options = PeerOptions(initial_peers=("x",), max_upload_mbps=8, max_download_mbps=40)
    up, down = make_context(unparsed("m"), options=options).lent_bytes_per_s
    lends = replace(peer("a", 0), note="", upload_bytes_per_s=up, download_bytes_per_s=down)
    assert note_of(lends) == "lends 8 Mb/s up, 40 Mb/s down"
    assert note_of(replace(lends, note="busy", upload_bytes_per_s=0.0)) == "busy; lends 40 Mb/s down"
    assert note_of(peer("a", 0)) == "busy"
