"""When a coordinator has the decay of its run begin, and what becomes of its word."""

import json
import logging

import anyio
import pytest

from coordinator.run.asked_decay import ask_for_decay
from coordinator.run.decay_file import DECAY, DecayFile, DecayNote
from coordinator.run.decaying import Decaying, Standing, begins_at, why_not
from coordinator.run.run_options import RunOptions
from coordinator.watch.metrics_file import METRICS, metrics_line
from coordinator.watch.run_file import MODEL, write_run_file
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.policy.decay import Decay
from swarm_peer.runtime.host.machine import SystemThreads


def manifest(**sections):
    defaults = {
        "model": {"config": {}},
        "stages": {"count": 2},
        "data": {"sequence_length": 8},
        "optimizer": {"learning_rate": 1.0},
        "training": {"steps": 1000, "global_batch_size": 2, "microbatch_size": 1, "validation_every": 0},
        "schedule": {"name": "wsd", "warmup_steps": 25, "decay_steps": 100},
    }
    content = {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections}
    return RunManifest.model_validate({"name": "test"} | content)


class Run:
    """An AgreedRun: what was said."""

    def __init__(self, *, decay=None):
        self.decay = decay
        self.is_settled = True

    def say_decay(self, decay):
        self.decay = decay


class Desk:
    """A coordinator's part in the decay of a run."""

    def __init__(self, folder, run, **sections):
        self.run = run
        self.file = DecayFile(folder)
        self._decaying = Decaying(manifest(**sections), folder, SystemThreads())

    def look(self, optimizer_step, *, step_s=3.0, acts=True):
        async def look():
            return await self._decaying.look(self.run, Standing(optimizer_step, step_s, acts))

        return anyio.run(look)


def test_a_decay_begins_once_all_have_heard_of_it(tmp_path):
    desk = Desk(tmp_path, Run())
    assert desk.look(40) == ""
    assert desk.run.decay is None, "nobody has asked for it"
    desk.file.write(DecayNote(steps=20))
    assert desk.look(43) == "The learning rate decays from optimizer step 48 on, and the run ends at 68."
    assert desk.run.decay == Decay(48, 20)
    assert desk.file.read() == DecayNote(steps=20, begins_at=48)
    assert desk.look(44) == "", "once"


@pytest.mark.parametrize("unsettled", ["stage lost", "no step seen", "stands by"])
def test_a_decay_waits(tmp_path, unsettled):
    desk = Desk(tmp_path, Run())
    desk.file.write(DecayNote(steps=20))
    desk.run.is_settled = unsettled != "stage lost"
    assert desk.look(43, step_s=0.0 if unsettled == "no step seen" else 3.0, acts=unsettled != "stands by") == ""
    assert desk.run.decay is None
    desk.run.is_settled = True
    assert "from optimizer step 55 on" in desk.look(50)


def test_no_decay_begins_in_the_warm_up(tmp_path):
    desk = Desk(tmp_path, Run())
    desk.file.write(DecayNote(steps=20))
    assert "from optimizer step 25 on" in desk.look(5)


@pytest.mark.parametrize(
    ("step_s", "inner_steps", "expected"), [(0.3, 1, 150), (20.0, 1, 102), (0.0, 1, 102), (3.0, 10, 110), (3.0, 5, 105)]
)
def test_where_a_decay_begins(step_s, inner_steps, expected):
    mode = {"mode": "periodic", "inner_steps": inner_steps} if inner_steps > 1 else {}
    assert begins_at(manifest(averaging=mode), Standing(100, step_s, acts=True)) == expected


def test_what_another_coordinator_has_said_is_noted(tmp_path):
    """Of two that say a decay at once, all follow the later epoch; this one stands by, and may take over."""
    desk = Desk(tmp_path, Run(decay=Decay(50, 20)))
    desk.file.write(DecayNote(steps=30, begins_at=40))
    assert desk.look(55, acts=False) == ""
    assert desk.file.read().decay == Decay(50, 20)


def test_a_run_that_its_key_has_begun_anew_has_no_decay(tmp_path):
    desk = Desk(tmp_path, Run())
    desk.file.write(DecayNote(steps=20, begins_at=50))
    assert desk.look(61, acts=False) == ""
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
    assert told.startswith("The coordinator has the decay begin in a little while")
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
