"""The page about a run, from its folder alone."""

import builtins
import json
import re
import struct
from types import SimpleNamespace

import pytest

from coordinator.cli import run as coordinator
from coordinator.report.figures import FIGURES, empty_times, time_by_stage
from coordinator.report.page import MAX_EVENTS, write_report
from coordinator.report.run_folder import read_run
from coordinator.watch.metrics_file import MetricsFile, StageShares, ValidationLoss, metrics_line
from coordinator.watch.run_file import write_run_file
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError

BEGIN = 1_795_000_000.0
MANIFEST = RunManifest.model_validate(
    {
        "name": "told",
        "model": {"config": {"model_type": "gpt2"}},
        "stages": {"count": 2},
        "data": {"sequence_length": 10},
        "training": {"steps": 40, "global_batch_size": 8, "microbatch_size": 2},
        "optimizer": {"learning_rate": 0.1},
    }
)


@pytest.fixture
def unrendered(monkeypatch):
    """Figures are drawn, and not made a file of, which takes most of the time."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: file.write(b"a PNG"))


def write_run(folder, steps=30, events=(), seconds=4.0, shares=True):
    """The files of a run of two stages with 2 and 1 peers, of which each step takes so long."""
    now = [BEGIN]
    metrics = MetricsFile(folder, unix_s=lambda: now[0])
    for step in range(1, steps + 1):
        now[0] += seconds
        line = metrics_line(
            optimizer_step=step,
            round_number=step - 1,
            loss=5 - step / 10,
            samples=8,
            seconds=seconds,
            sequence_length=10,
            peers=[2, 1],
            validation=ValidationLoss(4.5, 4) if step % 10 == 0 else None,
            shares=StageShares([0.5, 0.9], [0.25, 0.05], [0.0, None if step == 1 else 0.01]) if shares else None,
        )
        metrics.write(line)
    metrics.close()
    write_run_file(folder, "12D3KooWrun", MANIFEST)
    if events:
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def event(kind, after_s=0.0, **fields):
    return {"time": BEGIN + after_s, "kind": kind, "stage": None, "peer": None, "name": None, "text": ""} | fields


def facts_of(page):
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))


def test_peers_cost_nothing_while_a_run_is_stopped(tmp_path):
    write_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[15:]:
        line["time"] += 60 * 3600.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert facts_of(write_report(tmp_path).read_text())["Peer-hours"] == "0.10"


def test_the_page_has_the_figures_and_needs_nothing_else(tmp_path):
    write_run(tmp_path, events=[event("joined", stage=0, name="vol"), event("unheard of", 5)])
    page = write_report(tmp_path, price_per_peer_hour=0.5, pngs=True).read_text()
    assert page.count('src="data:image/png;base64,') == len(FIGURES)
    assert not re.search(r'(src|href)="(?!data:)', page)
    for name in FIGURES:
        png = (tmp_path / f"report-{name}.png").read_bytes()
        width, height = struct.unpack(">II", png[16:24])
        assert png.startswith(b"\x89PNG")
        assert width > 1000 < height * 5
    assert facts_of(page) == {
        "Optimizer steps": "30",
        "Training loss at the end": "2.0000",
        "Validation loss at the end": "4.5000",
        "Tokens": "2,400",
        "Time": "2 min 0 s",
        "Tokens per second": "20",
        "Busy share of all peers": "70%",
        "Peer-hours": "0.10",
        "Cost at 0.5 per peer-hour": "0.05",
        "Cost of a million tokens": "20.8333",
    }
    assert "made step 30 of 40 at 2026-" in page
    assert str(tmp_path.parent) not in page, "who reads it need not know the folders of whoever wrote it"
    assert "<td>unheard of</td>" in page
    for words in ("Run told", MANIFEST.hash, "torch", "&#34;global_batch_size&#34;: 8"):
        assert words in page


def test_where_the_time_went_is_summed_over_the_lines_that_tell_it(tmp_path):
    by_stage = time_by_stage(read_run(write_run(tmp_path)))
    assert by_stage[0] == pytest.approx([0.5, 0.25, 0.0, 0.25])
    assert by_stage[1] == pytest.approx([0.9, 0.05, 0.01, 0.04])


def test_times_without_peers_are_read_from_the_events(tmp_path):
    events = [
        event("stage_empty", 6, stage=1),
        event("stage_empty", 9, stage=1),
        event("stage_served", 12, stage=1),
        event("stage_served", 13, stage=0),
        event("stage_empty", 60, stage=0),
        event("ended", 180),
    ]
    first, last = empty_times(read_run(write_run(tmp_path, events=events)))
    assert (*first, *last) == pytest.approx((0.1, 0.2, 1, 3))


def test_a_run_of_the_first_versions_has_a_report(tmp_path):
    """Without times, shares, events and manifest."""
    line = {"optimizer_step": 1, "loss": 5.0, "samples": 8, "tokens": 80, "tokens_per_s": 40.0, "seconds": 2.0}
    lines = [line | {"peers": [1], "round": 0}, line | {"optimizer_step": 2, "peers": [1], "round": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines) + '{"optimizer_st')
    page = write_report(tmp_path).read_text()
    assert page.count("data:image/png") == len(FIGURES) - 2, "but those of the shares of time"
    assert facts_of(page)["Tokens per second"] == "40"
    for words in ("no events.jsonl", "no run.json", "1 lines of its files could not be read"):
        assert words in page


@pytest.mark.parametrize(
    "fields",
    [
        {"seconds": float("inf")},
        {"time": float("nan")},
        {"time": float("inf")},
        {"tokens": 10**400},
        {"peers": [-1]},
        {"peers": [10**30]},
    ],
)
def test_a_line_that_no_run_can_have_made_is_left_out(tmp_path, fields, unrendered):
    write_run(tmp_path, steps=2, events=[event("died", float("nan")), event("left", float("inf"))])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    wrong = json.dumps(json.loads(lines[0]) | fields)
    (tmp_path / "metrics.jsonl").write_text("\n".join([wrong, *lines]))
    page = write_report(tmp_path).read_text()
    assert "3 lines of its files could not be read" in page
    assert facts_of(page)["Tokens"] == "160"


def test_a_run_that_diverged_or_counted_no_peers_has_a_report(tmp_path):
    lines = (write_run(tmp_path, steps=2) / "metrics.jsonl").read_text().splitlines()
    odd = [json.loads(line) | {"loss": float("nan"), "peers": []} for line in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in odd))
    assert facts_of(write_report(tmp_path).read_text())["Training loss at the end"] == "nan"


def test_what_others_wrote_is_text_on_the_page(tmp_path, unrendered):
    attack = "<script>alert(1)</script>"
    fields = {"peer": attack, "name": attack, "text": attack}
    write_run(tmp_path, steps=1, events=[event(attack, **fields), event("died", 1, text='"><img src=x>'), ["no event"]])
    about = json.loads((tmp_path / "run.json").read_text())
    about["versions"]["torch"] = about["manifest"]["name"] = about["manifest_hash"] = attack
    (tmp_path / "run.json").write_text(json.dumps(about))
    page = write_report(tmp_path).read_text()
    assert "<script" not in page
    assert "<img src=x>" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 6


@pytest.mark.parametrize(
    "text", ["null", "[]", '{"manifest": 7, "versions": []}', '{"manifest": {"training": 3}}', "{"]
)
def test_a_run_file_of_another_form_is_no_error(tmp_path, text, unrendered):
    (write_run(tmp_path, steps=2) / "run.json").write_text(text)
    assert "Optimizer steps" in write_report(tmp_path).read_text()


def test_a_long_run_makes_no_huge_page(tmp_path):
    events = [event("joined", number, stage=0, text=f"number {number}.") for number in range(MAX_EVENTS + 50)]
    page = write_report(write_run(tmp_path, steps=1500, events=events)).read_text()
    assert len(page) < 1_500_000
    assert page.count("<td>joined</td>") == MAX_EVENTS
    assert "number 49." not in page
    assert f"{MAX_EVENTS + 50} joined, the newest {MAX_EVENTS} are listed" in page


def test_a_loss_that_is_no_number_is_drawn_around(tmp_path):
    write_run(tmp_path, steps=3)
    text = (tmp_path / "metrics.jsonl").read_text().replace('"loss": 4.8', '"loss": NaN')
    (tmp_path / "metrics.jsonl").write_text(text)
    assert facts_of(write_report(tmp_path).read_text())["Optimizer steps"] == "3"


def test_a_run_file_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    write_run_file(tmp_path / "gone", "12D3KooWrun", MANIFEST)
    assert "run_file_not_written" in caplog.text


def test_a_folder_of_no_run_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["swarm-coordinator", "report", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        coordinator()
    assert ended.value.code == 2
    assert f"{tmp_path / 'metrics.jsonl'} has no optimizer step" in capsys.readouterr().err


def test_without_a_folder_the_newest_run_has_its_report(tmp_path, monkeypatch, unrendered, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "demo-1"
    folder.mkdir(parents=True)
    write_run(folder)
    monkeypatch.setattr("sys.argv", ["swarm-coordinator", "report"])
    coordinator()
    assert capsys.readouterr().out == "Report: runs/demo-1/report.html\n"
    assert (folder / "report.html").exists()


@pytest.fixture
def no_matplotlib(monkeypatch):
    real_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)


def test_without_matplotlib_the_extra_is_named(tmp_path, no_matplotlib):
    write_run(tmp_path, steps=1)
    with pytest.raises(UserError, match=re.escape("swarm-train[figures]")):
        write_report(tmp_path)


def test_a_page_that_cannot_be_written_is_named(tmp_path, unrendered):
    with pytest.raises(UserError, match="--to"):
        write_report(write_run(tmp_path, steps=1), tmp_path / "gone" / "page.html")


def local_run(tmp_path, monkeypatch):
    """What `local` does with a run that has come to its end."""

    def run_local(manifest, peers_by_stage, devices, options, log_to, *, restart):
        options.output.mkdir()
        write_run(options.output)
        watch = SimpleNamespace(lines=[{"optimizer_step": 30, "loss": 2.0}], validation_loss=4.5)
        return SimpleNamespace(watch=watch, manifest=manifest, model_folder=options.output / "model")

    monkeypatch.setattr("coordinator.run.local.run_local", run_local)
    options = ["--output", str(tmp_path / "out"), "--no-dashboard"]
    monkeypatch.setattr("sys.argv", ["swarm-coordinator", "local", "demo", *options])
    coordinator()


def test_a_run_on_one_machine_ends_with_its_report(tmp_path, monkeypatch, capsys):
    local_run(tmp_path, monkeypatch)
    report = tmp_path / "out" / "report.html"
    assert capsys.readouterr().out.splitlines()[-1] == f"Report: {report}"
    assert "Run told" in report.read_text()


def test_a_run_that_has_no_report_ends_well_and_says_what_it_needs(tmp_path, monkeypatch, capsys, no_matplotlib):
    local_run(tmp_path, monkeypatch)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("No report: a report needs matplotlib: pip install 'swarm-train[figures]'; then ")
    assert last.endswith(f"swarm-coordinator report {tmp_path / 'out'}")
