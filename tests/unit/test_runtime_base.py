"""A run's frozen weights as content: listed, kept, given and downloaded, with members that lie, die or have a part."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import pytest
import torch
from contexts import FixedRandom, MovedClock, make_context
from memory_transport import MemoryNetwork
from safetensors.torch import load_file, save_file
from tiny_adapters import resolved_of, write_base
from tiny_models import GPT2, LLAMA
from tiny_tokenizers import save_tokenizer

from coordinator.run.shared_base import base_giver, with_base
from swarm_peer.errors import InvalidMessage, NotServing, UserError
from swarm_peer.model.pretrained import ModelSource, WrongTensor
from swarm_peer.model.training import StageTrainer
from swarm_peer.peer_options import PeerOptions
from swarm_peer.runtime import replica
from swarm_peer.runtime.base import base_giver as base_giver_module
from swarm_peer.runtime.base import base_index, base_sources
from swarm_peer.runtime.base.base_cache import BaseCache, bases_folder
from swarm_peer.runtime.base.base_giver import BaseGiver, entries_in, numbers_in
from swarm_peer.runtime.base.base_index import Base, make_base, num_bytes
from swarm_peer.runtime.base.base_sources import BaseSources
from swarm_peer.runtime.host.machine import SystemThreads
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.runtime.network.transport import Reply, pack_fields
from swarm_peer.runtime.replica import Replica
from swarm_peer.runtime.state import chunks
from swarm_peer.runtime.state import index as index_module
from swarm_peer.wire.messages import BaseChunkCall, StateEntry

CHUNK_BYTES = 1024


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Tensors of many chunks, without many bytes; nobody waits for long."""
    for module in (base_giver_module, base_index, index_module, chunks):
        monkeypatch.setattr(module, "STATE_CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(base_sources, "PAUSE_S", 0.01)
    monkeypatch.setattr(base_sources, "CHUNKS_A_LOOK", 16)


@pytest.fixture
def model(tmp_path):
    return write_base(LLAMA, tmp_path / "elsewhere" / "model")


class World:
    """A run whose model one machine has, and peers on other machines."""

    def __init__(self, network: MemoryNetwork, model: Path, tmp_path: Path):
        resolved = resolved_of(model, num_stages=2)
        self.resolved, self.base = with_base(resolved, None)
        self.network = network
        self.tmp_path = tmp_path
        self.members: list[str] = []
        self.notes: list[str] = []

    async def add_giver(self, name: str, giver: BaseGiver) -> None:
        dispatcher = CallDispatcher(manifest_hash=self.resolved.hash, calls=giver.calls)
        await self.network.transport(name).serve(dispatcher)
        self.members.append(name)

    async def add_owner(self, name: str = "owner") -> None:
        await self.add_giver(name, base_giver(self.resolved, self.base, SystemThreads(), None))

    def peer(self, name: str, **options: object) -> BaseSources:
        options = {"initial_peers": ("/ip4/127.0.0.1/tcp/1",), "cache_dir": self.tmp_path / name} | options
        surroundings = {"clock": MovedClock(), "random": FixedRandom(name)}
        context = make_context(self.resolved, options=PeerOptions(**options), **surroundings)

        async def members() -> list[str]:
            return self.members

        transport = self.network.transport(name)
        return BaseSources(context=context, transport=transport, members=members, explain=self.notes.append)

    def cache_of(self, name: str) -> Path:
        return bases_folder(self.tmp_path / name) / self.base.sha256

    def tensors_of(self, name: str) -> dict[str, torch.Tensor]:
        files = self.cache_of(name).glob("*.safetensors")
        return {tensor: value for file in files for tensor, value in load_file(file).items()}


@pytest.fixture
async def world(model, tmp_path):
    async with MemoryNetwork() as network:
        yield World(network, model, tmp_path)


def stage_state(world: World, stage: int, source: ModelSource | None = None) -> dict[str, torch.Tensor]:
    module = StageTrainer(world.resolved, world.resolved.specs[stage], source=source).module
    return {name: value.clone() for name, value in module.state_dict().items()}


async def test_a_peer_gets_its_own_stage_and_nothing_else(world, model):
    await world.add_owner()
    source = await world.peer("peer").source(1)
    published = load_file(model / "model.safetensors")
    ours = world.tensors_of("peer")
    assert {name for name in ours if ".layers." in name} == {
        name for name in published if any(f".layers.{index}." in name for index in world.resolved.specs[1].layers)
    }
    assert "model.embed_tokens.weight" not in ours
    for name, value in ours.items():
        assert torch.equal(value, published[name])
    there, here = stage_state(world, 1), stage_state(world, 1, source)
    assert all(torch.equal(value, there[name]) for name, value in here.items())
    assert set(world.notes) == {"downloads the model's weights"}


async def test_what_is_here_is_not_downloaded_again(world):
    await world.add_owner()
    await world.peer("peer").source(0)
    calls = world.network.num_calls("base_chunk")
    assert calls > 20
    again = world.peer("peer")
    assert await again.source(0) == ModelSource(str(world.cache_of("peer")))
    assert world.network.num_calls("base_chunk") == calls


async def test_who_has_the_model_reads_it_where_it_is(world, model):
    await world.add_owner()
    peer = world.peer("peer", data_dir=model.parent)
    assert (await peer.source(0)).name == str(model)
    assert not world.tensors_of("peer")


async def test_a_folder_that_is_not_allowed_is_not_read(world, tmp_path):
    await world.add_owner()
    (tmp_path / "data").mkdir()
    peer = world.peer("peer", data_dir=tmp_path / "data")
    assert (await peer.source(0)).name == str(world.cache_of("peer"))


async def test_another_model_in_its_place_is_found_out(world, model):
    """The folder has the same files, and other weights in them."""
    await world.add_owner()
    other = write_base(LLAMA, model.parents[1] / "other", seed=6)
    elsewhere = model.with_name("kept")
    model.rename(elsewhere)
    shutil.copytree(other, model)
    world.network.kill("owner")
    await world.add_giver(
        "true",
        BaseGiver(
            threads=SystemThreads(), base=world.base, found=lambda base: entries_in(ModelSource(str(elsewhere)), base)
        ),
    )
    peer = world.peer("peer", data_dir=model.parent)
    source = await peer.source(1)
    assert source.name == str(model)
    with pytest.raises(UserError, match="another tensor") as failure:
        stage_state(world, 1, source)
    await peer.distrust(source, 1, failure.value)
    assert (await peer.source(1)).name == str(world.cache_of("peer"))


async def test_several_members_give_at_once_each_what_it_has(world):
    await world.add_owner()
    first, second = world.peer("first"), world.peer("second")
    await first.source(0)
    await second.source(1)
    for name, peer in (("first", first), ("second", second)):
        await world.add_giver(name, peer.giver)
    world.network.kill("owner")
    before = len(world.network.calls)
    newcomer = world.peer("newcomer")
    await newcomer.source(0)
    await newcomer.source(1)
    givers = {callee for _, callee, op in world.network.calls[before:] if op == "base_chunk"}
    assert givers == {"first", "second"}
    assert world.tensors_of("newcomer").keys() == world.tensors_of("first").keys() | world.tensors_of("second").keys()


async def test_a_liar_is_given_up_and_nothing_of_it_is_kept(world):
    await world.add_owner()
    await world.add_owner("liar")
    lie = Reply(tensors=(memoryview(bytes(CHUNK_BYTES)),))
    fault = world.network.fault(op="base_chunk", to="liar", times=1000, tamper=lambda reply: lie)
    source = await world.peer("peer").source(0)
    stage_state(world, 0, source)
    assert 0 < fault.fired == world.network.num_calls("base_chunk", "liar") <= chunks.CHUNKS_IN_FLIGHT


async def test_a_false_index_is_not_believed(world):
    await world.add_owner()
    false = Reply(tensors=(memoryview(world.base.packed + b"\0"), memoryview(bytes(10))))
    fault = world.network.fault(op="base_index", times=2, tamper=lambda reply: false)
    await world.peer("peer").source(0)
    assert fault.fired == 2
    assert "waits for a member to say what the model's weights are" in world.notes


async def test_it_waits_until_a_member_has_them(world):
    peer = world.peer("peer")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(peer.source, 0)
        while not world.notes:
            await anyio.lowlevel.checkpoint()
        await world.add_owner()
    assert world.tensors_of("peer")


async def test_a_giver_that_dies_does_not_end_it(world):
    await world.add_owner()
    release = anyio.Event()
    fault = world.network.fault(op="base_chunk", skip=5, before=release, times=100)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.peer("peer").source, 0)
        await fault.struck.wait()
        world.network.kill("owner")
        release.set()
        await world.add_owner("other")
    assert world.tensors_of("peer")


@pytest.mark.parametrize("damage", ["a byte", "cut off", "zeroed", "gone"])
async def test_damaged_files_are_downloaded_again(damage, world):
    await world.add_owner()
    peer = world.peer("peer")
    source = await peer.source(1)
    damaged = max(world.cache_of("peer").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    if damage == "gone":
        damaged.unlink()
    else:
        damaged.write_bytes({"a byte": content, "cut off": content[:100], "zeroed": bytes(len(content))}[damage])
    with pytest.raises(WrongTensor) as failure:
        stage_state(world, 1, source)
    await peer.distrust(source, 1, failure.value)
    assert not damaged.exists()
    stage_state(world, 1, await peer.source(1))


async def test_a_damaged_index_is_downloaded_again(world):
    await world.add_owner()
    await world.peer("peer").source(1)
    for file in ("index.msgpack", "config.json"):
        (world.cache_of("peer") / file).write_bytes(b"damaged")
    stage_state(world, 1, await world.peer("peer").source(1))


async def test_a_giver_without_what_it_says_is_not_asked_on_and_on(world, monkeypatch):
    monkeypatch.setattr(base_sources, "PAUSE_S", 0.05)
    await world.add_owner()
    world.network.fault(op="base_chunk", times=10**6, fail=NotServing("it is gone"))
    with anyio.move_on_after(0.5):
        await world.peer("peer").source(1)
    assert "waits for a member that has the model's weights" in world.notes
    assert world.network.num_calls("base_index") < 15


async def test_who_is_not_to_wait_hears_that_nobody_has_them(world):
    with pytest.raises(NotServing):
        await world.peer("peer").source(1, waits=False)


async def test_a_full_disk_is_told_in_one_line(world, monkeypatch):
    await world.add_owner()

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(UserError, match=r"cannot be kept in .*: "):
        await world.peer("peer").source(1)
    assert not list(world.cache_of("peer").glob(".*")), "nothing is left behind"


async def test_newcomers_that_come_at_once_give_to_each_other(world):
    await world.add_owner()
    peers = {name: world.peer(name) for name in ("a", "b", "c", "d")}
    for name, peer in peers.items():
        await world.add_giver(name, peer.giver)
    async with anyio.create_task_group() as tasks:
        for peer in peers.values():
            tasks.start_soon(peer.source, 0)
    given = {name: world.network.num_calls("base_chunk", name) for name in ("owner", *peers)}
    assert sum(given.values()) - given["owner"] > given["owner"] / 4, given


async def test_nothing_is_given_but_what_the_index_lists(world, tmp_path):
    """A run's operator writes the manifest, and must not read a volunteer's files with it."""
    private = tmp_path / "private"
    private.mkdir()
    for file in world.tmp_path.glob("elsewhere/model/*"):
        shutil.copy(file, private)
    (private / "config.json").write_text("a secret of the same length".ljust((private / "config.json").stat().st_size))
    save_file(
        {name: value + 1 for name, value in load_file(private / "model.safetensors").items()},
        private / "model.safetensors",
    )
    giver = BaseGiver(
        threads=SystemThreads(), base=world.base, found=lambda base: entries_in(ModelSource(str(private)), base)
    )
    for entry in (0, len(world.base.index.tensors)):
        with pytest.raises(NotServing):
            await giver.handle_chunk("anybody", BaseChunkCall(manifest=world.resolved.hash, entry=entry, chunk=0), ())


async def test_the_tokenizer_beside_the_weights_comes_with_them(tmp_path):
    model = write_base(GPT2, tmp_path / "model")
    save_tokenizer(model, {"<end>": 256})
    resolved = resolved_of(
        model, config=GPT2, data={"sequence_length": 8, "tokenizer": str(model), "foreign_tokenizer": True}
    )
    async with MemoryNetwork() as network:
        world = World(network, model, tmp_path)
        world.resolved, world.base = with_base(resolved, None)
        await world.add_owner()
        manifest = await world.peer("peer").manifest()
    folder = world.cache_of("peer")
    assert manifest.data.tokenizer == str(folder)
    assert (folder / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


# --- the index


def test_an_index_lists_all_that_there_is(model):
    base = make_base(ModelSource(str(model)))
    published = load_file(model / "model.safetensors")
    assert [entry.name for entry in base.index.tensors] == sorted(published)
    for entry in base.index.tensors:
        assert num_bytes(entry) == published[entry.name].nbytes
        assert base.is_right(entry.name, published[entry.name])
        assert not base.is_right(entry.name, published[entry.name] + 1)
    assert [entry.name for entry in base.index.files] == ["config.json", "generation_config.json"]
    assert Base.read(base.packed, base.sha256) == base
    assert make_base(ModelSource(str(model))).sha256 == base.sha256


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "I8"},
        {"shape": (2**39, 2**39)},
        {"chunks": ()},
    ],
)
def test_an_index_of_what_no_model_has_is_refused(model, change):
    base = make_base(ModelSource(str(model)))
    first, *others = base.index.tensors
    check_refused(base.index.model_copy(update={"tensors": (first.model_copy(update=change), *others)}))


@pytest.mark.parametrize("name", ["../config.json", "pytorch_model.bin", "tokenizer.py", "/etc/passwd"])
def test_an_index_of_other_files_is_refused(model, name):
    base = make_base(ModelSource(str(model)))
    first, *others = base.index.files
    check_refused(base.index.model_copy(update={"files": (first.model_copy(update={"name": name}), *others)}))


def check_refused(index):
    packed = pack_fields(index)
    with pytest.raises(InvalidMessage):
        Base.read(packed, hashlib.sha256(packed).hexdigest())


def test_bits_are_as_many_as_entries():
    assert numbers_in(memoryview(b"\xa0\x80"), 9) == {0, 2, 8}
    with pytest.raises(InvalidMessage):
        numbers_in(memoryview(b"\xa0"), 9)


def test_quantised_weights_are_refused(tmp_path):
    save_file({"a": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="not quantised"):
        make_base(ModelSource(str(tmp_path)))


def test_weights_of_the_hub_are_shared_only_if_that_is_said(model, caplog):
    resolved = resolved_of(model)
    assert with_base(resolved, None)[0].manifest.model.base_sha256 is not None
    off = resolved.manifest.model.model_copy(update={"share_base": False})
    resolved = type(resolved).of(resolved.manifest.model_copy(update={"model": off}))
    assert with_base(resolved, None) == (resolved, None)


# --- the cache


def test_what_was_used_longest_ago_goes_first(tmp_path):
    for name, seconds in {"old": 10_000, "older": 20_000, "new": 0}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "00000.safetensors").write_bytes(bytes(100))
        os.utime(folder / "00000.safetensors", (os.path.getmtime(folder) - seconds,) * 2)
    cache = BaseCache(tmp_path, "wanted", 320)
    cache.make_room(20)
    assert len(list(tmp_path.glob("*/*"))) == 3
    cache.make_room(60)
    assert sorted(path.parent.name for path in tmp_path.glob("*/*")) == ["new", "old"]
    with pytest.raises(UserError, match="--cache-size"):
        cache.make_room(300)
    assert len(list(tmp_path.glob("*/*"))) == 2, "nothing goes in vain"
    cache.make_room(200)
    assert [path.parent.name for path in tmp_path.glob("*/*")] == ["new"], "what is in use stays"


def test_a_large_base_may_be_shared_and_one_of_too_many_tensors_not(monkeypatch, model):
    """The index of 70 B has more bytes than other messages may have."""
    base = make_base(ModelSource(str(model)))
    entry = StateEntry(name="w" * 60, dtype="BF16", shape=(CHUNK_BYTES, 16384), chunks=(bytes(32),) * 2 * 16384)
    tensors = tuple(entry.model_copy(update={"name": f"w{number}"}) for number in range(3))
    index = base.index.model_copy(update={"tensors": tensors})
    packed = pack_fields(index)
    assert len(packed) > 1 << 20
    Base.read(packed, hashlib.sha256(packed).hexdigest())
    monkeypatch.setattr(base_index, "MAX_INDEX_BYTES", 100)
    with pytest.raises(UserError, match="share_base to false"):
        make_base(ModelSource(str(model)))


def test_buffers_of_old_models_are_left_out(tmp_path):
    tensors = {"h.0.attn.bias": torch.ones(3, 3, dtype=torch.bool), "h.0.w": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert [entry.name for entry in make_base(ModelSource(str(tmp_path))).index.tensors] == ["h.0.w"]


async def test_a_base_that_is_damaged_again_and_again_is_told(world, monkeypatch):
    await world.add_owner()
    base, tries = world.peer("peer"), []

    def make(*arguments, source, **options):
        tries.append(source)
        raise WrongTensor("it is damaged")

    monkeypatch.setattr(replica, "StageTrainer", make)
    parts = SimpleNamespace(context=base._context, device="cpu", base=base)
    with pytest.raises(WrongTensor, match="damaged"):
        await Replica._make_trainer(parts, 1)
    assert len(tries) == replica.BASE_TRIES
