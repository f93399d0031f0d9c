"""TensorBoard and Weights & Biases, read back from the files that they write; and what happens when they fail."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
import yaml
from memory_transport import MemoryNetwork

from coordinator.checkpoints.writer import NO_CHECKPOINTS
from coordinator.cli import app
from coordinator.run import local, service
from coordinator.run.agreeing import EpochsFile, Kept
from coordinator.run.context import CoordinatorContext
from coordinator.run.events import RunEvents
from coordinator.run.run_options import RunOptions
from coordinator.run.service import RunService
from coordinator.watch import loggers
from coordinator.watch.loggers import BackgroundLogger, StepLogger, check_installed, open_loggers, scalars
from coordinator.watch.metrics_file import ValidationLoss, metrics_line
from coordinator.watch.promises import Promises
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.protocol.epochs import BEGINNING, COORDINATORS, Certified, Epoch, Place
from swarm_peer.protocol.statements import EpochId, KeySigned, Seat
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.network.pass_checker import PassChecker
from swarm_peer.wire.agreement import Statements
from swarm_peer.wire.identity import Identity

ROOT = Path(__file__).parents[2]

MANIFEST = RunManifest.model_validate(
    {
        "name": "logged",
        "model": {
            "config": {
                "model_type": "gpt2",
                "vocab_size": 256,
                "n_positions": 16,
                "n_embd": 8,
                "n_layer": 2,
                "n_head": 2,
                "tie_word_embeddings": False,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
                "bos_token_id": None,
                "eos_token_id": None,
            }
        },
        "stages": {"count": 2},
        "data": {"sequence_length": 8},
        "training": {"steps": 3, "global_batch_size": 4, "microbatch_size": 2, "validation_every": 3},
        "optimizer": {"learning_rate": 0.1},
    }
)


def a_line(step, validation_loss=None, *, num_given_up=0):
    """The line of a run that had given up some optimizer steps before."""
    return metrics_line(
        optimizer_step=step,
        round_number=step - 1 + num_given_up,
        loss=4.0 / step,
        samples=8,
        seconds=0.5,
        sequence_length=16,
        peers=[2, 3],
        validation=None if validation_loss is None else ValidationLoss(validation_loss, 4),
    )


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """Nothing of these tests leaves this machine, whatever its user has set up."""
    for name, value in (
        ("WANDB_MODE", "offline"),
        ("WANDB_BASE_URL", "http://127.0.0.1:9"),
        ("WANDB_ERROR_REPORTING", "false"),
        ("WANDB_SILENT", "true"),
    ):
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def _event_files_in_order(monkeypatch):
    """They are read by name, where the tenth of a process comes before its second if both are of the same second."""
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


# --- what is logged ---------------------------------------------------------------------------------------------------


def test_scalars_of_a_line():
    expected = {"loss": 2.0, "samples": 8, "tokens_per_s": 256.0, "seconds": 0.5, "peers/stage0": 2, "peers/stage1": 3}
    assert scalars(a_line(2)) == expected
    assert scalars(a_line(2, 1.5)) == expected | {"validation_loss": 1.5}
    assert scalars(a_line(2) | {"busy_share": [0.75, None]}) == expected | {"busy_share/stage0": 0.75}


def read_tensorboard(output):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard_holds_every_line(tmp_path):
    with open_loggers(["tensorboard"], MANIFEST, tmp_path / "output") as write:
        for step in (1, 2, 3):
            write(a_line(step, 1.25 if step == 3 else None))
    events = read_tensorboard(tmp_path / "output")
    assert set(events.Tags()["scalars"]) == set(scalars(a_line(1, 1.0)))
    for name, value in scalars(a_line(2)).items():
        assert [event.step for event in events.Scalars(name)] == [1, 2, 3]
        assert events.Scalars(name)[1].value == value
    assert [(event.step, event.value) for event in events.Scalars("validation_loss")] == [(3, 1.25)]
    [text] = events.Tensors("manifest/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert json.loads(shown) == MANIFEST.model_dump(mode="json")
    assert all(line.startswith("    ") for line in shown.splitlines()), "markdown shows it as it is"


def test_tensorboard_has_a_step_as_soon_as_it_is_written(tmp_path):
    logger = loggers.TensorBoardLogger(MANIFEST, tmp_path, False)
    logger.write(a_line(1))
    assert [event.step for event in read_tensorboard(tmp_path).Scalars("loss")] == [1]
    logger.close()


@pytest.mark.parametrize(("resume", "expected"), [(True, [1, 2, 3]), (False, [3])])
def test_a_resumed_run_goes_on_in_tensorboard(tmp_path, monkeypatch, resume, expected):
    with open_loggers(["tensorboard"], MANIFEST, tmp_path) as write:
        write(a_line(1))
        write(a_line(2))
    with open_loggers(["tensorboard"], MANIFEST, tmp_path, resume=resume) as write:
        write(a_line(3))
    assert [event.step for event in read_tensorboard(tmp_path).Scalars("loss")] == expected


@pytest.mark.parametrize("resume", [False, True], ids=["at once", "in another life of the coordinator"])
def test_tensorboard_forgets_what_the_run_gave_up(tmp_path, resume):
    with open_loggers(["tensorboard"], MANIFEST, tmp_path) as write:
        for step in (1, 2, 3, 4):
            write(a_line(step))
        if not resume:
            write(a_line(2, num_given_up=3))
            write(a_line(3, num_given_up=3))
    if resume:
        with open_loggers(["tensorboard"], MANIFEST, tmp_path, resume=True) as write:
            write(a_line(2, num_given_up=3))
            write(a_line(3, num_given_up=3))
    events = read_tensorboard(tmp_path)
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    assert "manifest/text_summary" in events.Tags()["tensors"]


def wandb_records(path):
    """What wandb's own `sync` reads: protocol buffers in LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, block = path.read_bytes(), 32768
    assert data.startswith(b":W&B")
    at, body = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        body += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield Record.FromString(body)
            body = b""


def read_wandb(output):
    """Of each offline run in the folder, oldest first: its run record and its history."""
    import wandb

    wandb.teardown()  # its process writes on after a run's end, as this one's exit would wait for
    found = []
    for path in sorted(output.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        records = list(wandb_records(path))
        [run] = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        history = [
            {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.WhichOneof("record_type") == "history"
        ]
        found.append((run, history))
    return found


def test_wandb_holds_every_line(tmp_path):
    import wandb

    output = tmp_path / "output"
    with open_loggers(["wandb"], MANIFEST, output) as write:
        assert wandb.run.settings.console == "off", "the live view draws there"
        for step in (1, 2, 3):
            write(a_line(step, 1.25 if step == 3 else None))
    [(run, history)] = read_wandb(output)
    assert (run.project, run.display_name) == ("swarm", "logged")
    assert (output / "wandb-id").read_text() == f"{run.run_id}\n"
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    expected = MANIFEST.model_dump(mode="json") | {"manifest_hash": MANIFEST.hash}
    assert {key: value for key, value in config.items() if not key.startswith("_")} == expected
    for step, row in enumerate(history, 1):
        line = a_line(step, 1.25 if step == 3 else None)
        assert {key: value for key, value in row.items() if not key.startswith("_")} == scalars(line) | {
            "optimizer_step": step
        }
    assert [row["_step"] for row in history] == [0, 1, 2]
    [path] = output.glob("wandb/offline-run-*/*.wandb")
    metrics = [record.metric for record in wandb_records(path) if record.WhichOneof("record_type") == "metric"]
    assert [(metric.glob_name, metric.step_metric) for metric in metrics if metric.glob_name] == [
        ("*", "optimizer_step")
    ]


def test_wandb_keeps_what_the_run_gave_up(tmp_path):
    """The rows after it would be dropped if their own steps did not grow."""
    steps = [(1, 0), (2, 0), (3, 0), (2, 2), (3, 2)]
    with open_loggers(["wandb"], MANIFEST, tmp_path) as write:
        for step, num_given_up in steps:
            write(a_line(step, num_given_up=num_given_up))
    [(_, history)] = read_wandb(tmp_path)
    assert [row["optimizer_step"] for row in history] == [1, 2, 3, 2, 3]
    assert [row["_step"] for row in history] == [0, 1, 2, 3, 4]


def test_a_resumed_run_goes_on_under_its_wandb_id(tmp_path):
    for resume, step in ((True, 1), (True, 2), (False, 1)):
        with open_loggers(["wandb"], MANIFEST, tmp_path, resume=resume) as write:
            write(a_line(step))
    first, second, other = [run.run_id for run, _ in read_wandb(tmp_path)]
    assert first == second != other
    assert [row["optimizer_step"] for _, history in read_wandb(tmp_path) for row in history] == [1, 2, 1]
    assert (tmp_path / "wandb-id").read_text() == f"{other}\n"


# --- what cannot begin ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
@pytest.mark.parametrize("spec", [None, ModuleSpec("a mere folder", None)], ids=["missing", "folder"])
def test_a_missing_package_is_named(monkeypatch, name, spec):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    with pytest.raises(UserError) as caught:
        check_installed([name])
    text = f"--log-to {name} needs a package that is not installed: pip install 'swarm-train[{name}]'"
    assert str(caught.value) == text


@pytest.mark.parametrize("command", ["serve", "local", "baseline"])
def test_the_commands_complain_before_they_begin(monkeypatch, tmp_path, command):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    options = {"serve": [], "local": ["--peers", "1,1"], "baseline": []}[command]
    words = [command, "no-such.yaml", "--output", str(tmp_path / "output"), *options, "--log-to", "wandb"]
    with pytest.raises(UserError, match=r"pip install 'swarm-train\[wandb\]'"):
        app(words, exit_on_error=False, print_error=False, result_action="return_value")
    assert not (tmp_path / "output").exists()


def test_both_extras_exist():
    from importlib.metadata import metadata

    assert {"tensorboard", "wandb"} <= set(metadata("swarm-train").get_all("Provides-Extra"))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_wandb_without_a_login_is_one_line(tmp_path):
    """In a process of its own: wandb reads its settings once."""
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(MANIFEST.model_dump(mode="json")))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    words = ["baseline", str(config), "--output", str(tmp_path / "output"), "--device", "cpu", "--log-to", "wandb"]
    ended = subprocess.run(
        [sys.executable, "-m", "coordinator.cli", *words],
        env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert ended.returncode == 2
    [line] = [line for line in ended.stderr.splitlines() if not line.startswith("wandb:")]
    assert line.startswith("swarm-coordinator: --log-to wandb: cannot begin: ")
    assert line.endswith("WANDB_MODE=offline")
    assert not (tmp_path / "output" / "wandb-id").exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_folder_that_cannot_be_written(tmp_path, name):
    (tmp_path / {"tensorboard": "tensorboard", "wandb": "wandb-id"}[name]).symlink_to("/proc/nothing/there")
    with pytest.raises(UserError, match=f"^--log-to {name}: "), open_loggers([name], MANIFEST, tmp_path):
        pass


# --- what fails later -------------------------------------------------------------------------------------------------


class Recorder(StepLogger):
    def __init__(self, fail_at=(), hold=None):
        self.steps = []
        self.is_closed = False
        self._fail_at = fail_at
        self._hold = hold
        self.holding = threading.Event()

    def write(self, line):
        if self._hold is not None:
            self.holding.set()
            self._hold.wait()
        if line["optimizer_step"] in self._fail_at:
            raise OSError(28, "No space left\non device")
        self.steps.append(line["optimizer_step"])

    def close(self):
        if "close" in self._fail_at:
            raise OSError(28, "No space left on device")
        self.is_closed = True


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == loggers.__name__]


@pytest.fixture
def promises():
    return Promises()


def test_all_is_well(caplog, promises):
    recorder = Recorder()
    with BackgroundLogger("well", recorder, promises) as logger:
        for step in range(1, 6):
            logger.write(a_line(step))
    assert recorder.steps == [1, 2, 3, 4, 5]
    assert recorder.is_closed
    assert logger.num_lost == 0
    assert warnings_of(caplog) == []
    assert promises.unkept() == []


def test_a_failing_logger_is_told_of_once_and_tried_again(caplog, promises):
    recorder = Recorder(fail_at=(2, 3, 5))
    with BackgroundLogger("disk", recorder, promises) as logger:
        for step in range(1, 6):
            logger.write(a_line(step))
    assert recorder.steps == [1, 4]
    assert recorder.is_closed
    assert logger.num_lost == 3
    failed, incomplete = warnings_of(caplog)
    assert failed == ("log_failed logger=disk reason=OSError: [Errno 28] No space left on device; the run goes on")
    assert incomplete == "log_incomplete logger=disk lost_lines=3"
    assert promises.unkept() == ["--log-to disk lacks 3 lines (OSError: [Errno 28] No space left on device)"]


def test_a_logger_that_fails_to_close(caplog, promises):
    with BackgroundLogger("disk", Recorder(fail_at=("close",)), promises) as logger:
        logger.write(a_line(1))
    assert logger.num_lost == 0
    assert len(warnings_of(caplog)) == 1
    assert promises.unkept() == ["--log-to disk lacks its end (OSError: [Errno 28] No space left on device)"]


def test_a_logger_that_hangs_holds_nothing_up(caplog, monkeypatch, promises):
    monkeypatch.setattr(loggers, "MAX_WAITING_LINES", 2)
    monkeypatch.setattr(loggers, "CLOSE_S", 0.01)
    hold = threading.Event()
    recorder = Recorder(hold=hold)
    with BackgroundLogger("net", recorder, promises) as logger:
        logger.write(a_line(1))
        recorder.holding.wait()
        for step in range(2, 7):
            logger.write(a_line(step))
        assert logger.num_lost == 3
    assert [text.split()[0] for text in warnings_of(caplog)] == ["log_failed", "log_unfinished", "log_incomplete"]
    assert promises.unkept() == ["--log-to net lacks 3 lines (it did not end in 0 s)"]
    hold.set()
    logger._thread.join()
    assert recorder.steps == [1, 2, 3], "what waited is still written"


def test_a_disk_that_fails_under_tensorboard(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # tensorboard's own thread dies of it, too
    with open_loggers(["tensorboard"], MANIFEST, tmp_path) as write:
        shutil.rmtree(tmp_path / "tensorboard")
        (tmp_path / "tensorboard").write_text("no folder any more")
        for step in (1, 2, 3):
            write(a_line(step))
    failed, incomplete = warnings_of(caplog)
    assert failed.startswith("log_failed logger=tensorboard reason=")
    assert incomplete == "log_incomplete logger=tensorboard lost_lines=3"


def test_a_wandb_run_that_is_over(tmp_path, caplog):
    import wandb

    with open_loggers(["wandb"], MANIFEST, tmp_path) as write:
        wandb.run.finish()
        for step in (1, 2):
            write(a_line(step))
    failed, incomplete = warnings_of(caplog)
    assert failed.startswith("log_failed logger=wandb reason=")
    assert incomplete == "log_incomplete logger=wandb lost_lines=2"


def test_each_logger_gets_every_line_whatever_befalls_the_others(tmp_path, monkeypatch):
    recorders = {"tensorboard": Recorder(fail_at=(1, 2, "close")), "wandb": Recorder()}
    monkeypatch.setattr(loggers, "LOGGERS", {name: lambda *_, n=name: recorders[n] for name in recorders})
    with open_loggers(["tensorboard", "wandb", "wandb"], MANIFEST, tmp_path) as write:
        write(a_line(1))
        write(a_line(2))
    assert recorders["wandb"].steps == [1, 2], "each once, although named twice"
    assert recorders["wandb"].is_closed


def test_a_logger_that_cannot_begin_closes_those_before_it(tmp_path, monkeypatch):
    recorder = Recorder()

    def fail(*_):
        raise UserError("cannot begin")

    monkeypatch.setattr(loggers, "LOGGERS", {"tensorboard": lambda *_: recorder, "wandb": fail})
    with pytest.raises(UserError), open_loggers(["tensorboard", "wandb"], MANIFEST, tmp_path):
        pass
    assert recorder.is_closed


# --- who uses them ----------------------------------------------------------------------------------------------------


class FakeDHT:
    passes = PassChecker(None, clock=SystemClock())
    metrics = PeerMetrics()

    def __init__(self, folder):
        self.identity = Identity.load_or_create(folder / "identity")
        self.addresses = []

    async def watch(self):
        await anyio.sleep_forever()

    def keep_run(self, run_id, manifest):
        pass

    def dial_by(self, announced, can_be_dialled, has_left):
        pass

    async def store(self, *_, **__):
        return True

    async def fetch(self, *_):
        return {}

    async def fetch_coordination(self, run_id):
        return {}

    async def learn_revocations(self, run_id):
        pass


def note_epochs(folder):
    """Leave the note of a coordinator whose run has begun."""
    key = Identity.load_or_create(folder / "identity")
    seat = Seat(key.peer_id, 1, "")
    epoch = Epoch(EpochId(1, seat, 0), (Place(COORDINATORS, seat),), begun=(0,))
    certified = Certified(epoch, (Statements(key.peer_id, key).sign(KeySigned(epoch.hash)),))
    EpochsFile(folder, key.peer_id).write(Kept(BEGINNING, (certified,)))


class Acting:
    acts, term, newest, inherited = True, None, None, ()

    def __init__(self, *_, **__):
        pass

    async def run(self):
        await anyio.sleep_forever()

    async def assign(self, assignments, reason):
        assert not assignments


async def serve_three_steps(folder, monkeypatch, *, resume=False, told=None, on_look=lambda: None):
    """Have a service see three optimizer steps, which are all. Returns how often it has saved the model."""
    exports = []

    async def observe(dht, directory, watch):
        on_look()
        watch.lines += [a_line(step) for step in (1, 2, 3)]
        watch.has_finished = True
        return watch.lines

    async def export(*_):
        exports.append(1)
        return True

    @contextlib.asynccontextmanager
    async def open_transport(*_):
        async with MemoryNetwork() as network:
            yield network.transport("coordinator")

    monkeypatch.setattr(service, "observe", observe)
    monkeypatch.setattr(service, "RUN_LOOK_S", 0.0)
    monkeypatch.setattr(service, "Coordination", Acting)
    monkeypatch.setattr(RunService, "_export", export)
    run = RunService(
        ResolvedManifest.of(MANIFEST),
        FakeDHT(folder),
        RunOptions(output=folder, resume=resume),
        events=RunEvents(on_line=lambda line: None if told is None else told.append(line["optimizer_step"])),
        context=CoordinatorContext(open_transport=open_transport),
    )
    assert await run.run()
    return len(exports)


@pytest.mark.parametrize(("resume", "expected"), [(False, [1, 2, 3]), (True, [3])])
async def test_the_service_tells_of_new_lines_alone(tmp_path, monkeypatch, resume, expected):
    """A coordinator that comes back hears of old steps again."""
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(a_line(step)) + "\n" for step in (1, 2)))
    note_epochs(tmp_path)
    told = []
    assert await serve_three_steps(tmp_path, monkeypatch, resume=resume, told=told) == 1
    assert told == expected
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["optimizer_step"] for line in lines] == [1, 2, 3]


async def test_a_model_that_was_saved_by_the_killed_coordinator_is_not_saved_again(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(a_line(MANIFEST.training.steps) | {"time": 1e10}) + "\n")
    (tmp_path / "model").mkdir()
    note_epochs(tmp_path)
    assert await serve_three_steps(tmp_path, monkeypatch, resume=True) == 0


async def test_a_folder_that_appears_during_the_run_is_not_taken_for_its_model(tmp_path, monkeypatch):
    """Somebody may export a snapshot there."""
    model = tmp_path / "model"
    assert await serve_three_steps(tmp_path, monkeypatch, on_look=lambda: model.mkdir(exist_ok=True)) == 1


@pytest.mark.parametrize("resumes", [False, True])
def test_local_goes_on_with_its_loggers_where_it_goes_on_with_its_run(tmp_path, monkeypatch, resumes):
    asked = []

    def opened(names, manifest, output, resume, promises):
        assert promises is options.promises
        asked.append((names, resume))
        raise UserError("far enough")

    node = SimpleNamespace(identity=SimpleNamespace(peer_id="coordinator"))
    monkeypatch.setattr(local, "temporary_node", lambda *_: contextlib.nullcontext(node))
    monkeypatch.setattr(local, "open_loggers", opened)
    plan = dataclasses.replace(NO_CHECKPOINTS, resume=object() if resumes else None)
    options = RunOptions(output=tmp_path / "output", plan=plan)
    with pytest.raises(UserError, match="far enough"):
        local.run_local(MANIFEST, [1, 1], ("cpu",), options, ["tensorboard"])
    assert asked == [(["tensorboard"], resumes)]


def test_the_baseline_is_logged(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(MANIFEST.model_dump(mode="json")))
    words = ["baseline", str(config), "--output", str(tmp_path / "output"), "--device", "cpu"]
    app([*words, "--log-to", "tensorboard"], exit_on_error=False, print_error=False, result_action="return_value")
    lines = [json.loads(line) for line in (tmp_path / "output" / "metrics.jsonl").read_text().splitlines()]
    losses = [(event.step, event.value) for event in read_tensorboard(tmp_path / "output").Scalars("loss")]
    assert losses == [(line["optimizer_step"], pytest.approx(line["loss"])) for line in lines]
    assert len(losses) == 3


def test_the_baseline_leaves_the_lines_of_another_run(tmp_path):
    config, metrics = tmp_path / "run.yaml", tmp_path / "metrics.jsonl"
    config.write_text(yaml.safe_dump(MANIFEST.model_dump(mode="json")))
    metrics.write_text(json.dumps(a_line(1)) + "\n")
    words = ["baseline", str(config), "--output", str(tmp_path), "--device", "cpu"]
    with pytest.raises(UserError, match=r"a run has begun in .*name another --output"):
        app(words, exit_on_error=False, print_error=False, result_action="return_value")
    assert json.loads(metrics.read_text()) == a_line(1)


def test_help_imports_neither():
    code = "import sys, coordinator.cli; assert not {'wandb', 'tensorboard', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=50)
