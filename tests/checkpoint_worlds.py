"""A made-up run, its states, and stores that keep its checkpoints on a disk or in memory."""

import dataclasses
import json

import fsspec
import pytest
import torch

from coordinator.checkpoints import file_store as checkpoint_files
from coordinator.checkpoints.store import CheckpointStore
from swarm_peer.config import RunManifest
from swarm_peer.policy.timeline import Timeline
from swarm_peer.runtime.state.index import StageState

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64)


def manifest_of(**changes):
    return RunManifest.model_validate(
        {
            "name": "test",
            "model": {"config": {"model_type": "gpt2"}},
            "stages": {"count": 2},
            "data": {"sequence_length": 12},
            "training": {"steps": 30, "global_batch_size": 2, "microbatch_size": 2},
            "optimizer": {"learning_rate": 0.01},
        }
        | changes
    )


MANIFEST = manifest_of()


def state_of(stage, round_number):
    generator = torch.Generator().manual_seed(100 * round_number + stage)
    tensors = {
        f"layer.{stage}.weight": torch.randn(5, 7, generator=generator),
        f"optimizer/layer.{stage}.weight/exp_avg": torch.randn(5, 7, generator=generator).T,  # not contiguous
        f"optimizer/layer.{stage}.weight/step": torch.tensor(float(round_number)),
        "empty": torch.zeros(0, 4),
    }
    for dtype in DTYPES:
        tensors[f"as {dtype}"] = torch.randint(0, 100, (3, 4), generator=generator).to(dtype)
    history_hash, ledger = (
        f"history_hash of stage {stage} at {round_number}",
        b"" if stage else b"\x00\xff of any bytes",
    )
    return StageState(
        round_number=round_number,
        history_hash=history_hash,
        tensors=tensors,
        timeline=Timeline(2, 1, 1),
        ledger=ledger,
    )


def states_of(round_number):
    return [state_of(stage, round_number) for stage in range(2)]


def assert_same(state, expected):
    for field in dataclasses.fields(StageState):
        if field.name != "tensors":
            assert getattr(state, field.name) == getattr(expected, field.name)
    assert state.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert state.tensors[name].dtype == tensor.dtype
        assert state.tensors[name].shape == tensor.shape
        assert torch.equal(state.tensors[name], tensor), name


class World:
    """A store, and a way around it to its files."""

    def __init__(self, url, path, fs):
        self.url, self.path, self.fs = url, path, fs

    def store(self, keep=3):
        return CheckpointStore(self.url, keep)

    def save(self, *steps, keep=9):
        for round_number in steps:
            self.store(keep).save(round_number, MANIFEST, states_of(round_number))

    def file(self, round_number, name):
        return f"{self.path}/step-{round_number:08d}/{name}"

    def names(self):
        return sorted(path.rpartition("/")[2] for path in self.fs.ls(self.path, detail=False))

    def change(self, path, change):
        self.fs.pipe_file(path, change(self.fs.cat_file(path)))

    def forge(self, round_number, name, content):
        """Change a file, and its entry in checkpoint.json with it."""
        self.fs.pipe_file(self.file(round_number, name), content)
        entry = checkpoint_files.FileStore(self.url).describe(self.file(round_number, name)).model_dump()

        def change(text):
            contents = json.loads(text)
            contents["files"][name] = entry
            return json.dumps(contents).encode()

        self.change(self.file(round_number, "checkpoint.json"), change)


@pytest.fixture(params=["disk", "memory"])
def world(request, tmp_path):
    fs = fsspec.filesystem("file" if request.param == "disk" else "memory")
    path = str(tmp_path / "checkpoints")
    yield World(path if request.param == "disk" else f"memory:/{path}", path, fs)
    if request.param == "memory":
        fs.rm(str(tmp_path), recursive=True) if fs.exists(str(tmp_path)) else None


def one_line(caught):
    assert "\n" not in str(caught.value)
    return str(caught.value)


def flip(world):
    """Damage the checkpoint of step 8."""
    world.change(world.file(8, "stage-000.safetensors"), lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])


def remove(name):
    """Damage the checkpoint of step 8 by taking one of its files away."""
    return lambda world: world.fs.rm_file(world.file(8, name))
