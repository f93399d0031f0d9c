"""When a coordinator has the decay of its run begin, and what becomes of its word."""

import json
import logging

import anyio
import pytest

from coordinator.run import decaying
from coordinator.run.asked_decay import ask_for_decay
from coordinator.run.decay_file import DECAY, DecayFile, DecayNote
from coordinator.run.decaying import Decaying, Standing, next_snapshot, why_not
from coordinator.run.run_options import RunOptions
from coordinator.watch.metrics_file import METRICS, metrics_line
from coordinator.watch.run_file import MODEL, write_run_file
from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, UserError
from swarm_peer.policy.decay import Decay, decay_in, with_decay
from swarm_peer.policy.view import SwarmView
from swarm_peer.protocol.epochs import BEGINNING, Restart
from swarm_peer.protocol.statements import EpochId, Seat
from swarm_peer.runtime.host.machine import SystemThreads

VIEW = SwarmView(2)
BY_KEY = EpochId(7, Seat("c", 1, ""), 0)


def manifest(**sections):
    defaults = {
        "model": {"config": {}},
        "stages": {"count": 2},
        "data": {"sequence_length": 8},
        "optimizer": {"learning_rate": 1.0},
        "training": {"steps": 1000, "global_batch_size": 2, "microbatch_size": 1, "validation_every": 0},
        "schedule": {"name": "wsd", "warmup_steps": 25, "decay_steps": 100},
        "recovery": {"snapshot_every": 10},
    }
    content = {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections}
    return RunManifest.model_validate({"name": "test"} | content)


class Run:
    """An AgreedRun of two stages: what was said, and the names of snapshots that its peers keep."""

    def __init__(self, *, kept=(), restart=BEGINNING):
        self.restart = restart
        self.kept_steps = set(kept)
        self.names = self
        self.asked = []

    @property
    def decay(self):
        return decay_in(self.restart.entries, 2)

    async def kept(self, optimizer_step, holders):
        self.asked.append(optimizer_step)
        if optimizer_step not in self.kept_steps:
            raise CallError("nobody has it yet")
        return f"{optimizer_step}/0", f"{optimizer_step}/1"

    def say_decay(self, decay, names, optimizer_step, known_round):
        self.restart = Restart(known_round + 100, optimizer_step, with_decay(names, decay), BY_KEY)


class Desk:
    """A coordinator's part in the decay of a run."""

    def __init__(self, folder, run, **sections):
        self.run = run
        self.file = DecayFile(folder)
        self._decaying = Decaying(manifest(**sections), folder, SystemThreads())

    def look(self, optimizer_step, *, acts=True):
        async def look():
            return await self._decaying.look(self.run, VIEW, Standing(optimizer_step, optimizer_step + 3, acts))

        return anyio.run(look)


def test_a_decay_begins_at_the_next_snapshot_that_all_stages_have(tmp_path):
    desk = Desk(tmp_path, Run())
    assert desk.look(40) == ""
    assert not desk.run.asked, "nobody has asked for it"
    desk.file.write(DecayNote(steps=20))
    assert desk.look(43) == desk.look(49) == ""
    assert not desk.run.asked, "the one of step 40 is of the time before, and so is work that would be lost"
    assert desk.look(50) == desk.look(52) == ""
    desk.run.kept_steps = {50}
    told = desk.look(52)
    assert told == "The learning rate decays from optimizer step 50 on, and the run ends at 70."
    assert desk.run.restart == Restart(155, 50, ("50/0", "50/1", "decay/50/20"), BY_KEY)
    assert desk.file.read() == DecayNote(steps=20, begins_at=50)
    assert desk.look(52) == "", "once"


def test_a_run_that_is_faster_than_looks_begins_with_the_newest_snapshots(tmp_path):
    desk = Desk(tmp_path, Run(kept=[80]))
    desk.file.write(DecayNote(steps=20))
    assert desk.look(43) == ""
    assert "from optimizer step 80 on" in desk.look(97)
    assert desk.run.asked == [90, 80]


def test_no_decay_begins_in_the_warm_up(tmp_path):
    desk = Desk(tmp_path, Run(kept=[10, 20, 30]))
    desk.file.write(DecayNote(steps=20))
    assert [desk.look(step) for step in (5, 12, 22)] == ["", "", ""]
    assert "from optimizer step 30 on" in desk.look(31)


def test_a_coordinator_that_does_not_act_says_nothing(tmp_path):
    desk = Desk(tmp_path, Run(kept=[50]))
    desk.file.write(DecayNote(steps=20))
    assert desk.look(40, acts=False) == desk.look(51, acts=False) == ""
    assert desk.run.decay is None


def test_what_another_coordinator_has_said_is_noted(tmp_path):
    """Of two that say a decay at once, all follow the later epoch; this one stands by, and may take over."""
    desk = Desk(tmp_path, Run(restart=Restart(9, 50, ("a", "b", "decay/50/20"), BY_KEY)))
    desk.file.write(DecayNote(steps=30, begins_at=40))
    assert desk.look(55, acts=False) == ""
    assert desk.file.read().decay == Decay(50, 20)


def test_a_run_that_has_lost_a_stage_goes_on_with_its_decay(tmp_path):
    """Voters have chosen a restart, and know nothing of decays."""
    desk = Desk(tmp_path, Run(restart=Restart(200, 60, ("60/0", "60/1"), BY_KEY._replace(number=4))))
    desk.file.write(DecayNote(steps=20, begins_at=50))
    assert desk.look(62, acts=False) == ""
    assert desk.look(62) == "The run has gone back, and goes on with its decay."
    assert desk.run.restart == Restart(165, 60, ("60/0", "60/1", "decay/50/20"), BY_KEY)


def test_it_decays_anew_where_its_coordinator_was_away_too_long(tmp_path):
    desk = Desk(tmp_path, Run(kept=[90], restart=Restart(200, 60, ("60/0", "60/1"), BY_KEY._replace(number=4))))
    desk.file.write(DecayNote(steps=20, begins_at=50))
    assert desk.look(85) == desk.look(86) == ""
    assert "from optimizer step 90 on, and the run ends at 110" in desk.look(91)


@pytest.mark.parametrize("restart", [BEGINNING, Restart(200, 60, ("60/0", "60/1"), BY_KEY)])
def test_a_run_that_its_key_has_begun_anew_has_no_decay(tmp_path, restart):
    desk = Desk(tmp_path, Run(restart=restart))
    desk.file.write(DecayNote(steps=20, begins_at=50))
    assert desk.look(61) == "The run has begun anew, without its decay."
    assert desk.file.read() is None


@pytest.mark.parametrize(
    ("sections", "decay", "reason"),
    [
        ({}, Decay(50, 20), ""),
        ({}, Decay(890, 110), ""),
        ({}, Decay(900, 20), "by its configuration, the run decays from 900 on and ends at 1000"),
        ({}, Decay(890, 111), "111 steps would end at optimizer step 1001"),
        ({"schedule": {"name": "cosine", "decay_steps": None}}, Decay(50, 20), "schedule.name is cosine"),
        ({"averaging": {"mode": "delayed"}}, Decay(50, 20), "with averaging.mode delayed, a run ends at"),
        ({"recovery": {"snapshot_every": 0}}, Decay(50, 20), "recovery.snapshot_every is 0"),
        (
            {"averaging": {"mode": "periodic", "inner_steps": 10}},
            Decay(50, 25),
            "25 steps are no multiple of averaging.inner_steps=10",
        ),
    ],
)
def test_a_decay_that_cannot_be_is_refused(tmp_path, sections, decay, reason):
    found = why_not(manifest(**sections), decay)
    assert reason in found
    assert bool(reason) == bool(found)


def test_a_decay_that_comes_too_late_is_given_up(tmp_path, caplog):
    desk = Desk(tmp_path, Run())
    desk.file.write(DecayNote(steps=20))
    with caplog.at_level(logging.WARNING):
        assert desk.look(895).startswith("The decay of 20 steps does not begin: 20 steps would end at")
    assert desk.file.read() is None
    assert "decay_refused" in caplog.text


def test_a_note_that_cannot_be_read_stops_no_coordinator(tmp_path, caplog):
    (tmp_path / DECAY).write_text("{")
    assert Desk(tmp_path, Run()).look(40) == ""
    assert "decay_not_noted" in caplog.text


def test_peers_that_never_answer_do_not_hold_it_up(tmp_path, monkeypatch):
    monkeypatch.setattr(decaying, "ASK_S", 0.01)

    class Silent(Run):
        async def kept(self, optimizer_step, holders):
            await anyio.sleep_forever()

    desk = Desk(tmp_path, Silent())
    desk.file.write(DecayNote(steps=20))
    assert desk.look(43) == desk.look(51) == ""


# --- the command


def served(folder, step, **sections):
    write_run_file(folder, "id", manifest(**sections))
    line = metrics_line(
        optimizer_step=step, round_number=step - 1, loss=1.0, samples=2, seconds=1.0, sequence_length=8, peers=[1]
    )
    (folder / METRICS).write_text(json.dumps(line | {"time": 0.0}) + "\n")


def test_an_operator_asks_for_a_decay(tmp_path):
    served(tmp_path, 43)
    told = ask_for_decay(tmp_path, 20)
    assert told.startswith("The coordinator has the decay begin at a snapshot, of optimizer step 50 or a later one")
    assert DecayFile(tmp_path).read() == DecayNote(steps=20)
    ask_for_decay(tmp_path, 30)
    assert DecayFile(tmp_path).read() == DecayNote(steps=30), "it has not begun"
    DecayFile(tmp_path).write(DecayNote(steps=30, begins_at=50))
    with pytest.raises(UserError, match="its run decays since optimizer step 50, for 30 steps: it ends at 80"):
        ask_for_decay(tmp_path, 20)


def test_what_cannot_be_is_refused_at_once(tmp_path):
    with pytest.raises(UserError, match="says nothing of its run yet: serve the run from there first"):
        ask_for_decay(tmp_path, 20)
    served(tmp_path, 43, schedule={"name": "linear", "decay_steps": None})
    with pytest.raises(UserError, match=r"^--steps 20: schedule\.name is linear, and only the decay of wsd"):
        ask_for_decay(tmp_path, 20)
    assert DecayFile(tmp_path).read() is None


def test_a_run_that_has_ended_with_its_decay_may_still_tell_its_peers(tmp_path):
    """Its coordinator was killed after it had saved the model."""
    served(tmp_path, 70)
    (tmp_path / MODEL).mkdir()
    options = RunOptions(output=tmp_path, resume=True)
    with pytest.raises(UserError, match="is there already"):
        options.check_output(manifest())
    DecayFile(tmp_path).write(DecayNote(steps=20, begins_at=50))
    options.check_output(manifest())


@pytest.mark.parametrize(("step", "expected"), [(0, 30), (24, 30), (30, 40), (39, 40), (40, 50)])
def test_the_next_snapshot(step, expected):
    assert next_snapshot(manifest(), step) == expected
