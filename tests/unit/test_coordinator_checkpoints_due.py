"""Which checkpoints are due, what is told of those that were missed, and what is not saved again."""

import threading

import anyio
import pytest
from checkpoint_runs import run as run
from checkpoint_worlds import states_of

from coordinator.checkpoints import writer as checkpointing
from swarm_peer.errors import UserError
from swarm_peer.policy.timeline import Timeline
from swarm_peer.policy.trouble import Trouble
from swarm_peer.policy.view import PeerState, PeerView


async def test_what_is_being_saved_can_be_waited_for(run, monkeypatch):
    """It is what was due as the coordinator began: the one before it may have died while it wrote that."""
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 60)
    writer, may_save = run.writer(), threading.Event()
    save = run.store.save

    def save_late(*args):
        may_save.wait(10)
        return save(*args)

    monkeypatch.setattr(run.store, "save", save_late)
    monkeypatch.setattr(checkpointing, "SNAPSHOT_RETRY_S", 0.001)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.run, run.network.transport("coordinator"))
        await anyio.wait_all_tasks_blocked()
        with anyio.move_on_after(0.05) as waited:
            await writer.finish()
        assert waited.cancelled_caught
        for name, stage in (("c", 0), ("d", 1)):
            await run.add(name, stage, 70)
        run.reach(70)  # the run's last step: its checkpoint is due as the one before is still being written
        may_save.set()
        await writer.finish()
        assert run.saved == [60, 70]
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("is_saved", [True, False])
async def test_a_coordinator_that_comes_back_complains_of_nothing_that_was_due_before(
    run, monkeypatch, caplog, is_saved
):
    """Peers have no snapshots of that step any more."""
    if is_saved:
        run.store.save(30, run.manifest, states_of(30))
    run.begun_at = 55
    run.reach(55)
    async with run.written(monkeypatch, every=30) as looks:
        await looks()
        assert run.saved == [30] * is_saved
        run.reach(85)
    assert run.told == ["The checkpoint of optimizer step 60 was missed: the run went on too soon."]
    [told] = run.promises.unkept()
    assert told.startswith("1 checkpoint was not written, of optimizer step 60 (the run went on too soon)")


async def test_a_quick_run_gets_the_checkpoint_before_the_newest_and_is_told_of_those_before(run, monkeypatch):
    """Peers keep their last two snapshots."""
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 30)
        await run.add(f"{name}'", stage, 40)
    run.reach(1)
    async with run.written(monkeypatch, every=10) as looks:
        await looks()
        run.reach(41)
    assert run.saved == [30, 40]
    [told] = run.promises.unkept()
    assert told.startswith("2 checkpoints were not written, of optimizer steps 10 and 20 (the run makes steps faster")


async def test_the_newest_checkpoint_does_not_wait_for_the_one_before(run, monkeypatch):
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 40)
    run.reach(1)
    async with run.written(monkeypatch, every=10) as looks:
        await looks()
        run.reach(40)
    assert run.saved == [40]


async def test_a_peer_that_keeps_no_snapshots_says_why_there_is_no_checkpoint(run, monkeypatch):
    run.reach(1)
    async with run.written(monkeypatch, every=60) as looks:
        await looks()
        words = {"trouble": Trouble.NO_SNAPSHOTS, "trouble_since_s": 1.0, "note": "its disk is full", "name": "anna"}
        run.peers.append(PeerView(peer_id="12D3KooWabcdefgh", stage=0, state=PeerState.SERVING, **words))
        run.reach(60)
        await anyio.sleep(0.02)
        told = ["1 checkpoint was not written, of optimizer step 60 (anna (…abcdefgh) says: its disk is full)"]
        assert run.promises.unkept() == told, "as long as it waits"
        run.reach(85)
    assert run.promises.unkept() == told, "and when it is too late"


async def test_a_checkpoint_of_weights_that_are_given_up_was_not_promised(run, monkeypatch):
    run.reach(1)
    async with run.written(monkeypatch, every=30) as looks:
        await looks()
        run.reach(60)
        await anyio.sleep(0.02)
        assert run.promises.unkept()
        run.reach(20)
    assert run.promises.unkept() == []


async def test_a_coordinator_that_takes_over_complains_of_nothing_that_was_due_before(run, monkeypatch):
    run.acts = False
    run.reach(1)
    async with run.written(monkeypatch, every=30) as looks:
        await looks()
        run.reach(55)
        await looks()
        run.acts = True
    assert run.told == []
    assert run.promises.unkept() == []


async def test_a_checkpoint_whose_line_of_metrics_is_forgotten_is_not_missed(run, monkeypatch):
    """A coordinator remembers some thousand lines, and checkpoints may lie further apart."""
    run.store.save(30, run.manifest, states_of(30))
    run.reach(55)
    async with run.written(monkeypatch, every=30) as looks:
        await looks()
        run.watch.created_at_round = lambda step: None
    assert run.told == []


async def test_what_was_saved_is_not_fetched_again(run, monkeypatch):
    """A coordinator is started again soon after it has saved a checkpoint. Another round's would be another one."""
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 60)
    run.store.save(60, run.manifest, states_of(59))
    run.begun_at = 55
    run.reach(60)
    for told in (["The checkpoint of optimizer step 60 is saved."], []):
        run.told.clear()
        async with run.written(monkeypatch, every=10):
            pass
        assert run.told == told
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-00000060.1"]
    assert run.saved == [60, 60]


async def test_a_store_that_does_not_answer_has_nothing(run, monkeypatch, caplog):
    def newest_that(*_):
        raise UserError("no network")

    monkeypatch.setattr(run.store, "newest_that", newest_that)
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 60)
    run.begun_at = 55
    run.reach(60)
    async with run.written(monkeypatch, every=10):
        pass
    assert run.told == ["The checkpoint of optimizer step 60 is saved."]
    assert "checkpoints_not_seen reason=no network" in caplog.text


async def test_after_a_rewind_what_holds_is_not_saved_again_and_what_is_made_anew_is(run, monkeypatch):
    for name, stage, round_number in (("a", 0, 30), ("b", 1, 30), ("c", 0, 60), ("d", 1, 60)):
        await run.add(name, stage, round_number)
    run.reach(1)
    async with run.written(monkeypatch, every=30) as looks:
        for optimizer_step in (30, 60, 55):  # peers have no snapshots of step 30 any more when it is at 55
            await looks()
            run.peers = run.peers[-2:] if optimizer_step == 55 else run.peers
            run.reach(optimizer_step)
        await looks()
        assert run.told == [f"The checkpoint of optimizer step {step} is saved." for step in (30, 60)]
        run.told.clear()
        for name, stage in (("e", 0), ("f", 1)):
            await run.add(name, stage, 80, Timeline(75, 55, 55))
        run.reach(60, first_round=20)
    assert run.told == ["The checkpoint of optimizer step 60 is saved."]
    assert run.store.newest().round_number == 80


async def test_no_checkpoint_waits_for_one_that_the_run_has_gone_back_before(run, monkeypatch):
    """Until the run has come there again, there may be many, and its stages may be lost once more."""
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 30)
    run.reach(1)
    async with run.written(monkeypatch, every=30) as looks:
        await anyio.sleep(0.02)
        run.reach(60)
        await anyio.sleep(0.02)
        assert run.told == [], "peers have no snapshots of step 60 yet"
        run.reach(30)
        await looks()
        assert run.told == ["The checkpoint of optimizer step 30 is saved."]
        for name, stage in (("c", 0), ("d", 1)):
            await run.add(name, stage, 60)
        run.reach(60)
        await looks()
        assert run.told[1:] == ["The checkpoint of optimizer step 60 is saved."]
