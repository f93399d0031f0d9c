"""Room for the states of a checkpoint: in memory, or on the disk meanwhile."""

import os
import shutil
import tempfile
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace

import anyio
import numpy as np
import pytest
from checkpoint_worlds import manifest_of

from coordinator.checkpoints import state_receiver
from coordinator.checkpoints.state_receiver import StateReceiver
from swarm_peer.errors import InvalidMessage, NoRoom
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.host.machine import SystemThreads


@pytest.fixture
def small_machine(tmp_path, monkeypatch):
    """A machine with 50 kB of memory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(state_receiver, "host_memory", lambda: (50_000, 50_000))
    monkeypatch.setattr(state_receiver, "is_in_memory", lambda path: False)

    def is_mapped():
        return str(tmp_path) in Path("/proc/self/maps").read_text()

    return SimpleNamespace(is_mapped=is_mapped, folder=tmp_path)


def test_room_for_states_is_on_the_disk_where_memory_has_none_and_leaves_no_file(small_machine):
    room = state_receiver.room_for(10_000, 40_000, 40_000, None)
    assert not small_machine.is_mapped()
    room = state_receiver.room_for(10_001, 40_000, 40_000, None)
    room[10_000] = 7
    assert (room.dtype, room.shape, room[10_000]) == (np.uint8, (10_001,), 7)
    assert small_machine.is_mapped()
    assert list(small_machine.folder.iterdir()) == []
    del room
    assert not small_machine.is_mapped()


def full(*args):
    raise OSError(ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("module", "name", "value", "reason"),
    [
        (os, "posix_fallocate", full, "[Errno 28] No space left on device"),
        (state_receiver, "is_in_memory", lambda path: True, " is on no disk"),
        (shutil, "disk_usage", lambda path: SimpleNamespace(free=89_999), "89999 bytes are free on the disk of "),
    ],
)
def test_room_for_states_is_memory_where_no_disk_has_it(
    monkeypatch, caplog, small_machine, module, name, value, reason
):
    monkeypatch.setattr(module, name, value)
    assert state_receiver.room_for(20_000, 45_000, 45_000, None).shape == (20_000,)
    assert not small_machine.is_mapped()
    assert "state_is_in_memory bytes=20000 reason=" in caplog.text
    assert reason in caplog.text
    with pytest.raises(NoRoom, match=r"no room for states of 45001 bytes: 50000 bytes of memory are free, and .*TMP"):
        state_receiver.room_for(20_000, 45_001, 45_001, None)


def test_memory_for_a_state_is_taken_at_once():
    """The next state must find less."""

    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    room = state_receiver.room_for(2**27, 2**27, 2**27, None)
    assert resident_bytes() - before > 0.9 * room.nbytes


def test_the_disk_keeps_room_for_what_is_written_there(small_machine, monkeypatch):
    monkeypatch.setattr(state_receiver, "host_memory", lambda: (0, 0))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=99_999))
    assert len(state_receiver.room_for(10_000, 50_000, 50_000, Path("/proc/1"))) == 10_000
    for folder in (small_machine.folder, small_machine.folder / "not" / "yet", None):
        with pytest.raises(NoRoom, match=r"99999 bytes are free on the disk of .*, of 100000 for them and what"):
            state_receiver.room_for(10_000, 50_000, 50_000, folder)


class SmallMachine:
    """A machine whose memory has no room for states, and a run whose stages have different states."""

    def __init__(self, folder, monkeypatch, **options):
        self.free = 0
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setattr(state_receiver, "host_memory", lambda: (0, 0))
        monkeypatch.setattr(state_receiver, "is_in_memory", lambda path: False)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=self.free))
        config = {
            "model_type": "gpt2",
            "n_embd": 8,
            "n_head": 2,
            "n_layer": 9,
            "vocab_size": 300,
            "tie_word_embeddings": False,
        }
        manifest = manifest_of(model={"config": config}, stages={"count": 2, "layers": [1, 8]})
        self.receiver = StateReceiver(ResolvedManifest.of(manifest), SystemThreads(), folder, **options)

    async def sizes(self):
        """The bytes of each stage's tensors."""
        return [
            [tensor.numel() * tensor.element_size() for tensor in template.values()]
            for template in await self.receiver.templates()
        ]

    async def allocate(self, stage):
        before = sum(room.nbytes for room in self.receiver._held.values())
        tensors = await self.receiver.of_stage(stage).allocate((await self.sizes())[stage])
        self.free -= sum(room.nbytes for room in self.receiver._held.values()) - before
        return tensors


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await anyio.sleep(0.001)


async def test_the_first_state_has_no_room_where_all_have_none(tmp_path, monkeypatch):
    """Peers would send what there is room for in vain. What the first ones have taken is not asked for once more."""
    machine = SmallMachine(tmp_path, monkeypatch)
    first, second = (sum(-(-size // 64) * 64 for size in sizes) for sizes in await machine.sizes())
    assert first != second
    machine.free = 2 * (first + second) - 1
    with pytest.raises(NoRoom):
        await machine.allocate(0)
    machine.free += 1
    held = [await machine.allocate(0)]
    assert [len(tensor) for tensor in held[0]] == (await machine.sizes())[0]
    held.append(await machine.allocate(1))
    assert machine.free == first + second
    del held
    await until(lambda: not machine.receiver._held)  # a worker thread lets go just after it has given its result


async def test_of_a_model_the_weights_alone_are_written(tmp_path, monkeypatch):
    machine = SmallMachine(tmp_path, monkeypatch, only_weights=True)
    first, second = (sum(-(-size // 64) * 64 for size in sizes) for sizes in await machine.sizes())
    machine.free = int(1.3 * (first + second))
    with pytest.raises(NoRoom):
        await machine.allocate(0)
    machine.free = int(1.4 * (first + second))
    assert len([await machine.allocate(0), await machine.allocate(1)]) == 2


async def test_a_state_that_is_too_large_for_its_stage_takes_no_room(tmp_path, monkeypatch):
    """Who offers it lies: where room is short, it must not be what there is no room for."""
    receiver = SmallMachine(tmp_path, monkeypatch).receiver
    with pytest.raises(InvalidMessage, match=r"offered 1048576 bytes; a state of stage 0 takes \d{6}$"):
        await receiver.of_stage(0).allocate([2**20])
