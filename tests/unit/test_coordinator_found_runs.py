"""How a command finds its run: by addresses, by its folder, or the newest live one."""

import os

import pytest

from coordinator.commands.invites import invite
from coordinator.run import found_runs
from coordinator.run.found_runs import addresses_of_run, find_live_run, newest_folder
from coordinator.watch.journal import Journal
from swarm_peer.errors import UserError

ID = "12D3KooWQesj3rCQXBSXiQYgCbooCQU8No5gkgRdpAaK8ahDYgsJ"


def address(port):
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{ID}"


def make_run(folder, *, coordinator, peers=(), written_s):
    folder.mkdir(parents=True)
    (folder / "coordinator").write_text("\n".join(map(address, coordinator)))
    if peers:
        (folder / "peers").write_text("\n".join(map(address, peers)))
    for file in folder.iterdir():
        os.utime(file, (written_s, written_s))


@pytest.fixture
def runs(tmp_path):
    make_run(tmp_path / "old", coordinator=[1], written_s=100)
    make_run(tmp_path / "live", coordinator=[2], peers=[3, 4], written_s=200)
    make_run(tmp_path / "ended", coordinator=[5], peers=[6], written_s=300)
    (tmp_path / "baseline").mkdir()
    (tmp_path / "baseline" / "metrics.jsonl").write_text("{}\n")
    return tmp_path


def listening_at(*ports):
    async def answering(addresses):
        return [known for known in addresses if known in map(address, ports)]

    return answering


@pytest.mark.parametrize(
    ("ports", "name", "found"), [([1, 2, 4], "live", [2, 4]), ([1], "old", [1]), ([4, 6], "ended", [6])]
)
def test_the_newest_live_run_is_found_at_any_of_its_addresses(ports, name, found, runs):
    assert find_live_run(runs, listening_at(*ports)) == (runs / name, [address(port) for port in found])


def test_if_none_is_live_the_newest_is_named(runs, tmp_path):
    with pytest.raises(UserError, match=r"no run in .* answers \(the newest, .*ended, may be over\): name the folder"):
        find_live_run(runs, listening_at())
    with pytest.raises(UserError, match=r"there is no run in .*nowhere: name the folder"):
        find_live_run(tmp_path / "nowhere", listening_at(1))


@pytest.mark.parametrize(
    ("kept", "ways"),
    [
        ([], ""),
        (["metrics.jsonl"], r"; `swarm-coordinator report \S+ended` shows how far it came"),
        (
            ["metrics.jsonl", "checkpoints/step-00000020"],
            r"; `swarm-coordinator report \S+ended` shows how far it came, "
            r"and `swarm-coordinator serve CONFIG --resume \S+ended` goes on from its last checkpoint",
        ),
    ],
)
def test_a_run_that_died_is_named_with_what_to_do(runs, kept, ways):
    for name in ("checkpoints/notes", *kept):
        (runs / "ended" / name).mkdir(parents=True)
    with pytest.raises(UserError, match=rf"with --initial-peers{ways}$"):
        find_live_run(runs, listening_at())


def test_the_run_that_is_found_is_named_beside_the_output(runs, monkeypatch, capsys):
    monkeypatch.setattr(found_runs, "find_live_run", lambda folder: (folder / "live", [address(2)]))
    assert addresses_of_run(None, (), runs) == [address(2)]
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"The run in {runs / 'live'}:\n")


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        (["model", "checkpoints"], r": its model is in \S+ended/model"),
        (["checkpoints"], r": `export --checkpoint \S+ended/checkpoints` makes a model of its last checkpoint"),
        ([], ", and neither a model nor a checkpoint is left in that folder"),
    ],
)
def test_a_run_that_is_over_is_named_as_such_with_what_is_left_of_it(runs, kept, left):
    folder = runs / "ended"
    for name in kept:
        (folder / name).mkdir()
    journal = Journal(folder)
    journal.begin(lifetime_s=30.0, now_s=1.0)
    journal.tell("ended", "The run has made all its steps.", 2.0)
    with pytest.raises(UserError, match=rf"^the run in \S+ended is over{left}$"):
        addresses_of_run(folder, (), answering=listening_at())
    with pytest.raises(UserError, match=rf"no run in \S+ answers \(the run in \S+ended is over{left}\)"):
        find_live_run(runs, listening_at())
    with pytest.raises(UserError, match=rf"^the run in \S+ended is over{left}$"):
        invite(folder, label="late")
    assert addresses_of_run(folder, (), answering=listening_at(5)), "some of its peers may not have heard of it"
    journal.tell("coordinator", "A coordinator begins to write this journal again.", 3.0)
    assert addresses_of_run(folder, (), answering=listening_at()), "it has been resumed"


def test_the_newest_run_that_has_made_a_step_is_found_live_or_over(runs, tmp_path, capsys):
    for name, text, written_s in (("old", "{}", 400), ("live", "{}", 500), ("ended", "", 600), ("baseline", "{}", 300)):
        metrics = runs / name / "metrics.jsonl"
        metrics.write_text(text)
        os.utime(metrics, (written_s, written_s))
    assert newest_folder(None, runs) == runs / "live"
    assert capsys.readouterr().err == f"The run in {runs / 'live'}:\n"
    assert newest_folder(runs / "old", runs) == runs / "old"
    with pytest.raises(UserError, match=r"no run in \S+nowhere has made an optimizer step: name the folder of a run"):
        newest_folder(None, tmp_path / "nowhere")


def test_a_run_is_named_by_its_folder_or_by_addresses(runs, capsys):
    assert addresses_of_run(runs / "live", ()) == [address(port) for port in (2, 3, 4)]
    assert addresses_of_run(None, (f"127.0.0.1:7/{ID}", "@file")) == [f"127.0.0.1:7/{ID}", "@file"]
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match="leave one of them out"):
        addresses_of_run(runs / "live", (address(7),))
    with pytest.raises(UserError, match="no addresses of a run are kept there"):
        addresses_of_run(runs / "baseline", ())
