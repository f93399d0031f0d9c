"""Real peers of a `wsd` run whose operator has the decay begin: all make the updates of one process at those rates."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm import LiveSwarm, run_swarm, tiny_manifest
from test_keystone import check_stage_mates, check_weights

from coordinator.run import decaying
from coordinator.run.baseline import Baseline
from coordinator.run.decay_file import DecayFile, DecayNote
from swarm_peer.model.optimizer import learning_rate
from swarm_peer.model.resolved import ResolvedManifest

STEPS = 6


@pytest.mark.parametrize(
    "averaging",
    [{}, pytest.param({"mode": "periodic", "inner_steps": 3, "outer_momentum": 0.0}, marks=pytest.mark.slow)],
    ids=["synchronous", "periodic"],
)
def test_a_swarm_whose_decay_is_said_equals_the_single_process(
    averaging: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with a newcomer that comes after the word, and learns it from the run's epochs."""
    monkeypatch.setattr(decaying, "LEAD_S", 5.0)
    alone = bool(averaging)  # where updates are made alone, one process is the reference of one peer in each stage
    manifest = tiny_manifest(
        stages={"count": 2, "peers_to_start": 1 if alone else 2},
        training={"steps": 999, "validation_every": 999},
        averaging=averaging,
        recovery={"snapshot_every": 3},
        schedule={"name": "wsd", "warmup_steps": 2, "decay_steps": 3, "final_fraction": 0.0},
    )

    async def ask(live: LiveSwarm) -> None:
        await live.reached(2)
        DecayFile(tmp_path).write(DecayNote(steps=STEPS))
        await live.until(lambda: DecayFile(tmp_path).read() != DecayNote(steps=STEPS), "the word")
        if not alone:
            live.start(1, "newcomer")
            await live.until(lambda: "serving stage=1" in live.log("newcomer"), "the newcomer serves")

    run = run_swarm(manifest, [1, 1] if alone else [2, 2], tmp_path, script=ask)

    note = DecayFile(tmp_path).read()
    assert note is not None
    decay = note.decay
    assert decay is not None
    assert decay.steps == STEPS
    assert [line["optimizer_step"] for line in run.lines] == list(range(1, decay.end + 1)), "it ends with its decay"
    assert "validation_loss" in run.lines[-1]
    check_stage_mates(run)
    baseline = Baseline(ResolvedManifest.of(manifest))
    for line in run.lines:
        for trainer in baseline.trainers:
            trainer.decay = decay if line["optimizer_step"] > decay.begins_at else None
        loss, _ = baseline.train_step(run.counted[line["round"]])
        assert line["loss"] == pytest.approx(loss, rel=1e-5)
    check_weights(run, baseline)
    assert learning_rate(manifest, decay.begins_at, decay) < learning_rate(manifest, decay.begins_at)
