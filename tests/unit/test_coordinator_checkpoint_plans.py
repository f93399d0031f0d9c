"""Which checkpoints a run writes, and the settings with which it may go on from one."""

import pytest
from checkpoint_worlds import MANIFEST, manifest_of, states_of

from coordinator.checkpoints.store import CheckpointStore
from coordinator.checkpoints.writer import plan_checkpoints
from coordinator.run.coordinator_options import CheckpointOptions
from swarm_peer.errors import UserError


@pytest.mark.parametrize(
    ("section", "setting", "other"), [("averaging", "mode", "delayed"), ("optimizer", "name", "adamw_8bit")]
)
def test_a_run_goes_on_with_the_settings_that_its_states_are_of(tmp_path, section, setting, other):
    url = str(tmp_path / "checkpoints")
    CheckpointStore(url).save(3, MANIFEST, states_of(3))
    options = CheckpointOptions(resume=url)
    assert plan_checkpoints(MANIFEST, tmp_path, options).resume.optimizer_step == 3
    its = getattr(MANIFEST, section)
    changed = MANIFEST.model_copy(update={section: its.model_copy(update={setting: other})})
    with pytest.raises(UserError, match=rf"resume with --set {section}\.{setting}={getattr(its, setting)}"):
        plan_checkpoints(changed, tmp_path, options)


@pytest.mark.parametrize("options", [{"checkpoints": "memory://elsewhere"}, {"keep_checkpoints": 2}])
@pytest.mark.parametrize(
    ("every", "snapshot_every", "reason"),
    [
        (None, 0, r"recovery\.snapshot_every=0 has them keep none: change it"),
        (0, 10, "no checkpoint is written with --checkpoint-every 0: give another number"),
    ],
)
def test_where_no_checkpoint_is_written_none_is_asked_for(tmp_path, options, every, snapshot_every, reason):
    manifest = manifest_of(recovery={"snapshot_every": snapshot_every})
    with pytest.raises(UserError, match=rf"^--(keep-)?checkpoints \S+: .*{reason}, or leave --\S+ out$"):
        plan_checkpoints(manifest, tmp_path, CheckpointOptions(checkpoint_every=every, **options))
    assert plan_checkpoints(manifest, tmp_path, CheckpointOptions(checkpoint_every=every)).store is None


def test_a_momentum_may_change_when_a_run_goes_on_but_not_end(tmp_path):
    def with_momentum(momentum):
        optimizer = MANIFEST.optimizer.model_copy(update={"name": "sgd", "momentum": momentum})
        return MANIFEST.model_copy(update={"optimizer": optimizer})

    url = str(tmp_path / "checkpoints")
    CheckpointStore(url).save(3, with_momentum(0.9), states_of(3))
    options = CheckpointOptions(resume=url)
    assert plan_checkpoints(with_momentum(0.5), tmp_path, options).resume.optimizer_step == 3
    with pytest.raises(UserError, match=r"resume with --set optimizer\.momentum=0\.9$"):
        plan_checkpoints(with_momentum(0.0), tmp_path, options)
