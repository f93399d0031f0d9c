"""Ways to train: how many steps each takes to the same loss, and which one `plan` recommends."""

from __future__ import annotations

from io import StringIO
from math import log
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from coordinator.config_files import load_manifest
from coordinator.planning import step_factors as known
from coordinator.planning.boundaries import num_trained, with_boundary
from coordinator.planning.plan import make_report
from coordinator.planning.plan_report import print_report
from coordinator.planning.step_factors import REFERENCE, Interval, StepFactor, Way, relative_steps, step_factors
from swarm_peer.config import RunManifest
from swarm_peer.policy.planning.resources import PeerGroup

ROOT = Path(__file__).parents[2]
PLAIN = ("wire={activations: none, gradients: none}", "averaging.compression=none", "stages.peers_to_start=2")
# Eight peers in two stages. Between them a microbatch takes longer than it is computed, and averages take longer yet.
HOME = PeerGroup(
    name="home", count=8, flops_per_s=5e12, memory_bytes=16e9, upload_bytes_per_s=25e6, download_bytes_per_s=25e6
)


def manifest_of(*overrides: str) -> RunManifest:
    return load_manifest(ROOT / "configs" / "gpt2-124m.yaml", (*PLAIN, *overrides))


def way(parameters: float = 2e6, members: int = 2, outer: tuple[float, float] = (0.7, 0.9), **parts: str) -> Way:
    return Way({**REFERENCE, **parts}, outer, members, parameters)


def entry(**fields: object) -> StepFactor:
    return StepFactor.model_validate({"parameters": 2e6, "source": "here", **fields})


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> list[StepFactor]:
    """What is known, in the place of the file's entries; empty."""
    entries: list[StepFactor] = []
    for module in ("coordinator.planning.step_factors", "coordinator.planning.ways_to_train"):
        monkeypatch.setattr(f"{module}.step_factors", lambda: entries)
    return entries


def test_all_that_is_known_says_where_it_is_from() -> None:
    pages = ROOT / "benchmarks"
    for each in step_factors():
        assert each.steps.low <= each.steps.value <= each.steps.high
        page = each.source.split(",")[0].split(":")[0]
        assert (pages / page).exists() if each.seeds else "arXiv" in each.source
        assert set(each.beside) <= set(REFERENCE)
        assert (each.outer is not None) == each.value.startswith("periodic-")


def test_a_difference_in_loss_becomes_steps_by_the_slope() -> None:
    """Where twice the steps halve the loss, a fourteenth more of it takes a fourteenth more of them."""
    assert entry(part="mode", value="delayed", loss=1 / 14, slope=1.0).steps.value == pytest.approx(15 / 14)
    found = entry(part="mode", value="delayed", loss=0.1, low=0.0, high=0.21, slope=0.5).steps
    assert found == pytest.approx((1.21, 1.0, 1.4641))


def test_a_figure_without_an_interval_may_be_a_tenth_off() -> None:
    assert entry(part="optimizer", value="muon", factor=0.5).steps == pytest.approx((0.5, 0.45, 0.55))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "give factor, or loss and slope"),
        ({"factor": 1.0, "loss": 0.1, "slope": 1.0}, "give factor, or loss and slope"),
        ({"loss": 0.1}, "give factor, or loss and slope"),
        ({"factor": 1.0, "slope": 1.0}, "give factor, or loss and slope"),
        ({"factor": 1.0, "low": 0.9}, "give both of low and high"),
        ({"factor": 1.0, "low": 1.1, "high": 1.2}, "1.0 is not between low=1.1 and high=1.2"),
        ({"loss": 0.0, "low": -0.2, "high": -0.1, "slope": 1.0}, "0.0 is not between low=-0.2 and high=-0.1"),
    ],
)
def test_an_entry_is_one_figure_within_its_interval(fields: dict[str, float], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        entry(part="mode", value="delayed", **fields)


def test_what_was_measured_nearest_in_size_counts(table: list[StepFactor]) -> None:
    table += [entry(part="optimizer", value="muon", factor=f, parameters=n) for f, n in ((0.5, 1e6), (0.9, 1e9))]
    for parameters, factor in ((1e3, 0.5), (3.1e7, 0.5), (3.2e7, 0.9), (1e12, 0.9)):
        steps, _ = relative_steps(way(parameters, optimizer="muon"), way(parameters))
        assert steps is not None
        assert steps.value == factor
    assert log(3.2e7) - log(1e6) > log(1e9) - log(3.2e7)


def test_figures_of_as_few_members_as_do_count_before_the_size(table: list[StepFactor]) -> None:
    for members, parameters, factor in ((2, 2e9, 1.1), (4, 2e9, 1.3), (4, 2e3, 1.2), (16, 2e6, 1.9)):
        table.append(entry(part="mode", value="delayed", factor=factor, parameters=parameters, members=members))
    for members, factor in ((2, 1.1), (3, 1.3), (4, 1.3), (5, 1.9), (16, 1.9)):
        steps, _ = relative_steps(way(2e7, members, mode="delayed"), way(2e7, members))
        assert steps is not None
        assert steps.value == factor
    assert relative_steps(way(2e7, 17, mode="delayed"), way(2e7, 17))[0] is None


def test_periods_come_with_the_outer_steps_that_they_were_measured_with(table: list[StepFactor]) -> None:
    for value, parameters, members, outer in (
        ("periodic-30", 2e6, 2, (1.0, 0.0)),
        ("periodic-30", 2e8, 2, (0.7, 0.9)),
        ("periodic-30", 2e9, 4, (0.6, 0.5)),
        ("periodic-10", 2e9, 2, (0.9, 0.0)),
    ):
        fields = {"factor": 1.0, "parameters": parameters, "members": members, "outer": outer}
        table.append(entry(part="mode", value=value, **fields))
    for parameters, members, outer in ((1e6, 2, (1.0, 0.0)), (1e8, 2, (0.7, 0.9)), (1e6, 3, (0.6, 0.5))):
        found = known.known_periods(way(parameters, members))
        assert found == {"periodic-30": outer, "periodic-10": (0.9, 0.0)}


def test_factors_of_parts_are_multiplied_and_what_both_ways_have_is_left_out(table: list[StepFactor]) -> None:
    delayed = entry(part="mode", value="delayed", factor=1.5, low=1.2, high=2.0)
    muon = entry(part="optimizer", value="muon", factor=0.5, low=0.4, high=0.8)
    table += [delayed, muon]
    both, one, other = way(mode="delayed", optimizer="muon"), way(mode="delayed"), way(optimizer="muon")
    assert relative_steps(both, way()) == (pytest.approx((0.75, 0.48, 1.6)), [delayed, muon])
    assert relative_steps(both, one) == (pytest.approx((0.5, 0.4, 0.8)), [muon])
    assert relative_steps(one, other) == (pytest.approx((3.0, 1.5, 5.0)), [delayed, muon])
    assert relative_steps(way(), both) == (pytest.approx((4 / 3, 0.625, 1 / 0.48)), [delayed, muon])
    assert relative_steps(both, both) == (Interval(1.0, 1.0, 1.0), [])


def test_what_holds_for_other_ways_or_fewer_members_is_not_known(table: list[StepFactor]) -> None:
    beside = {"optimizer": "adamw", "mode": "periodic"}
    table.append(entry(part="averaging", value="topk_2bit", factor=2.0, members=4, beside=beside))
    table.append(entry(part="mode", value="periodic-10", factor=3.0, outer=(1.0, 0.0)))
    means = {"outer": (1.0, 0.0), "mode": "periodic-10", "averaging": "topk_2bit"}
    for members, optimizer, outer, factor in (
        (4, "adamw", (1.0, 0.0), 6.0),
        (4, "adamw_8bit", (1.0, 0.0), 6.0),
        (5, "adamw", (1.0, 0.0), None),
        (4, "sgd", (1.0, 0.0), None),
        (4, "adamw", (0.7, 0.9), None),
    ):
        changed = way(**{**means, "members": members, "optimizer": optimizer, "outer": outer})
        steps, _ = relative_steps(changed, way(members=members, optimizer=optimizer))
        assert (None if steps is None else steps.value) == factor


def test_a_part_that_is_not_known_matters_where_the_other_way_has_not_the_same() -> None:
    unknown = way(optimizer="sgd", activations="int5_hadamard")
    assert relative_steps(unknown, way())[0] is None
    assert relative_steps(way(), unknown)[0] is None
    steps, _ = relative_steps(way(optimizer="sgd", activations="int5_hadamard", gradients="int4_hadamard"), unknown)
    assert steps is not None
    assert steps.value == pytest.approx(1.0, abs=0.01)


def test_time_to_a_loss_is_steps_over_speed(table: list[StepFactor]) -> None:
    table.append(entry(part="mode", value="periodic-50", factor=1.2, low=1.1, high=1.3, outer=(0.7, 0.9)))
    eight_bit = (
        "wire={activations: blockwise_8bit, gradients: blockwise_8bit}",
        "averaging.compression=blockwise_8bit",
    )
    own, *rows = make_report(manifest_of(*eight_bit), [HOME], num_stages=4)["ways"]
    assert (own["changes"], own["set"], own["speed"], own["time"]) == ({}, [], 1.0, 1.0)
    (periodic,) = [row for row in rows if row["changes"] == {"mode": "periodic-50"}]
    mode = ("averaging.mode=periodic", "averaging.inner_steps=50")
    other = make_report(manifest_of(*eight_bit, *mode), [HOME], num_stages=4)
    speed = other["tokens_per_s"] / own["tokens_per_s"]
    assert speed > 1.01
    assert periodic["speed"] == pytest.approx(speed)
    assert periodic["tokens_per_s"] == pytest.approx(other["tokens_per_s"])
    times = [periodic[name] for name in ("time", "time_low", "time_high")]
    assert times == pytest.approx([1.2 / speed, 1.1 / speed, 1.3 / speed])
    assert periodic["known_from"] == ["published, 2 M"]
    assert periodic["sources"] == ["here"]
    unknown = [row for row in rows if row["changes"] != {"mode": "periodic-50"}]
    assert unknown
    assert all(row["steps"] is None and row["time"] is None and not row["recommended"] for row in unknown)


@pytest.mark.parametrize(
    ("factor", "low", "high", "is_recommended"),
    [(0.9, 0.85, 0.95, True), (0.9, 0.85, 0.985, False), (0.9, 0.5, 1.5, False), (1.1, 1.0, 1.2, False)],
)
def test_a_way_is_recommended_if_even_the_worse_end_of_what_is_known_saves_time(
    table: list[StepFactor], factor: float, low: float, high: float, is_recommended: bool
) -> None:
    """Muon takes no other time for a step, as far as the prediction goes."""
    table.append(entry(part="optimizer", value="muon", factor=factor, low=low, high=high))
    report = make_report(manifest_of(), [HOME], num_stages=2)
    found = [row["changes"] for row in report["ways"] if row["recommended"]]
    assert found == ([{"optimizer": "muon"}] if is_recommended else [])
    out = StringIO()
    print_report(report, Console(file=out, width=80))
    told = " ".join(out.getvalue().split())
    assert ("Way to train: muon comes to the same loss in 0.90 (0.85-0.95) of" in told) is is_recommended
    assert ("Way to train: as configured." in told) is not is_recommended


def test_changes_are_recommended_together_as_long_as_each_saves_time(table: list[StepFactor]) -> None:
    exactly = {"low": 1.0, "high": 1.0, "factor": 1.0}
    for part in ("activations", "gradients", "averaging"):
        table.append(entry(part=part, value="blockwise_8bit", **exactly))
    table.append(entry(part="gradients", value="int4_hadamard", factor=3.0))
    report = make_report(manifest_of(), [HOME], num_stages=2)
    (best,) = [row for row in report["ways"] if row["recommended"]]
    assert best["changes"] == dict.fromkeys(("activations", "gradients", "averaging"), "blockwise_8bit")
    assert best["time"] == pytest.approx(1 / best["speed"])
    assert best["speed"] > 2
    settings = ["averaging.compression=blockwise_8bit"]
    settings += [f"wire.{name}=blockwise_8bit" for name in ("activations", "gradients")]
    assert best["set"] == settings


def test_the_settings_of_a_recommended_way_make_the_run_that_was_planned(table: list[StepFactor]) -> None:
    table.append(entry(part="mode", value="periodic-30", factor=1.0, low=1.0, high=1.0, outer=(0.6, 0.5)))
    table.append(entry(part="boundary", value="d/4", factor=1.0, low=1.0, high=1.0))
    table.append(entry(part="optimizer", value="muon", factor=0.5, low=0.5, high=0.5))
    steps = ("training.steps=100", "training.validation_every=25", "recovery.snapshot_every=0")
    own = manifest_of(*steps)
    (best,) = [row for row in make_report(own, [HOME], num_stages=2)["ways"] if row["recommended"]]
    assert best["changes"] == {"mode": "periodic-30", "boundary": "d/4", "optimizer": "muon"}
    changed = manifest_of(*steps, *best["set"])
    assert changed.averaging.inner_steps == 30
    assert (changed.averaging.outer_learning_rate, changed.averaging.outer_momentum) == (0.6, 0.5)
    assert (changed.training.steps, changed.training.validation_every) == (120, 30)
    assert changed.model.boundary is not None
    assert changed.model.boundary.rank == 192
    assert changed.optimizer.momentum == 0.95
    report = make_report(changed, [HOME], num_stages=2)
    assert report["tokens_per_s"] > 0.999 * best["tokens_per_s"], "peers are given to stages anew, at least as well"


def test_a_boundary_has_mlps_as_much_wider_as_layers_write_less() -> None:
    own = manifest_of()
    changed = with_boundary(own, [8, 4], {"rank": 192}, 64)
    config = changed.model.config
    assert isinstance(config, dict)
    assert config["n_inner"] % 64 == 0
    assert config["n_inner"] > 4 * 768
    assert changed.stages.layers == (8, 4)
    assert num_trained(changed) == pytest.approx(num_trained(own), rel=0.005)


def test_all_ways_of_a_peer_alone_in_its_stage_are_about_wires_and_the_optimizer() -> None:
    alone = PeerGroup(name="alone", count=2, flops_per_s=5e12, memory_bytes=16e9)
    rows = make_report(manifest_of("stages.peers_to_start=1"), [alone], num_stages=2)["ways"]
    assert not any({"mode", "averaging"} & set(row["changes"]) for row in rows)
    assert any("optimizer" in row["changes"] for row in rows)
