import pytest
import torch
from every_second_round import EverySecondRound
from tiny_models import LENGTH, LLAMA, VOCABULARY

from coordinator.checkpoints.store import CheckpointStore
from swarm_peer.config import RunManifest
from swarm_peer.errors import InvalidMessage
from swarm_peer.model.costs import stage_costs
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.round_strategy import is_weight
from swarm_peer.model.strategies import STRATEGIES
from swarm_peer.model.training import StageTrainer
from swarm_peer.runtime.state.index import StageState

MANIFEST = RunManifest.model_validate(
    {
        "name": "test",
        "model": {"config": LLAMA},
        "stages": {"count": 1},
        "data": {"sequence_length": LENGTH},
        "training": {"steps": 10, "global_batch_size": 6, "microbatch_size": 3},
        "optimizer": {"name": "adamw", "learning_rate": 0.1},
    }
)
RESOLVED = ResolvedManifest.of(MANIFEST)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "synchronous", EverySecondRound)


def make_trainer():
    return StageTrainer(RESOLVED, RESOLVED.specs[0])


def train(trainer, *seeds):
    for seed in seeds:
        tokens = torch.randint(0, VOCABULARY, (3, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
        trainer.backward(trainer.forward(tokens))
        trainer.apply(trainer.mean_gradients())


def weights(trainer):
    return {name: value for name, value in trainer.state().items() if is_weight(name)}


def assert_same(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_the_weights_change_at_the_end_of_every_second_round():
    trainer = make_trainer()
    before = weights(trainer)
    train(trainer, 1)
    assert_same(weights(trainer), before)
    assert trainer.optimizer_step == 1, "the round counts all the same"
    train(trainer, 2)
    assert not any(torch.equal(value, before[name]) for name, value in weights(trainer).items())


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_who_takes_a_state_over_goes_on_as_its_giver(rounds):
    giver, newcomer = make_trainer(), make_trainer()
    train(giver, *range(rounds))
    newcomer.load_state(giver.state(), giver.optimizer_step)
    for trainer in (giver, newcomer):
        train(trainer, 7, 8, 9)
    assert_same(newcomer.state(), giver.state())


def test_a_rewind_takes_back_what_was_kept():
    trainer = make_trainer()
    train(trainer, 1, 2, 3)
    snapshot = trainer.state()
    train(trainer, 4, 5)
    after = trainer.state()
    train(trainer, 6)
    trainer.load_state(snapshot, 3)
    train(trainer, 4, 5)
    assert_same(trainer.state(), after)
    trainer.restart()
    assert_same(trainer.state(), make_trainer().state())


def test_a_state_without_what_was_kept_is_refused():
    trainer = make_trainer()
    train(trainer, 1)
    state = {name: value for name, value in trainer.state().items() if not name.startswith("round/kept")}
    with pytest.raises(InvalidMessage, match="the state lacks"):
        make_trainer().load_state(state, 1)


def test_a_checkpoint_holds_what_was_kept(tmp_path):
    trainer = make_trainer()
    train(trainer, 1, 2, 3)
    state = StageState(round_number=3, history_hash="h", tensors=trainer.state())
    store = CheckpointStore(str(tmp_path), 3)
    store.save(3, MANIFEST, [state])
    loaded = store.newest(MANIFEST).load_stage(0)
    resumed = make_trainer()
    resumed.load_state(loaded.tensors, 3)
    train(trainer, 4)
    train(resumed, 4)
    assert_same(resumed.state(), trainer.state())


def test_what_is_kept_counts_as_memory_of_the_host(monkeypatch):
    [kept] = stage_costs(RESOLVED, "cpu")
    monkeypatch.undo()
    [none] = stage_costs(RESOLVED, "cpu")
    assert kept.memory.host_bytes - none.memory.host_bytes == 2 * 4 * kept.parameters, "itself, and its copy in a state"
