"""Averaging rounds over real hivemind: right, bitwise the same for all members, and failed rather than partial."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import torch
from hivemind.utils import MPFuture

from coordinator.run.local import LOOPBACK
from swarm_peer.config import AveragingSection
from swarm_peer.runtime.host.machine import SystemThreads
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.step import averaging
from swarm_peer.runtime.step.averaging import COLLECT_AFTER_S, AveragingFailed, GradientAverager, _codec
from swarm_peer.wire.identity import Identity

pytestmark = [
    pytest.mark.timeout(120),
    # hivemind's own, in averagers that are forked from this process and take its filters along.
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
]

SHAPES = [torch.Size((300, 70)), torch.Size((7,)), torch.Size((1, 33))]
WEIGHTS = (1.0, 3.0, 0.0)
TOLERANCE = {"none": 1e-6, "fp16": 1e-3, "blockwise_8bit": 0.03}


class Members:
    """Three peers of one stage, each with its DHT and its averager."""

    def __init__(self, folder: Path, compression: str, chunk_timeout_s: float):
        self.dhts: list[SwarmDHT] = []
        for number in range(len(WEIGHTS)):
            path = folder / f"identity-{number}"
            self.dhts.append(
                SwarmDHT.start(
                    initial_peers=self.dhts[0].addresses() if self.dhts else (),
                    host_maddrs=(LOOPBACK,),
                    announce_maddrs=(),
                    identity=Identity.load_or_create(path),
                    identity_path=path,
                    metrics=PeerMetrics(),
                )
            )
        section = AveragingSection.model_validate(
            {"compression": compression, "round_timeout_s": 20, "chunk_timeout_s": chunk_timeout_s}
        )
        self.averagers = [
            GradientAverager(
                shapes=SHAPES, dht=dht.node, prefix="swarm-test-stage0", section=section, threads=SystemThreads()
            )
            for dht in self.dhts
        ]
        self.ids = [dht.identity.peer_id for dht in self.dhts]

    async def average(self, round_number: int, who: list[int], late_s: float = 0.0) -> list[list[torch.Tensor] | None]:
        """The outcomes of those who take part in a round of all three; None for a failed one."""
        outcomes: list[list[torch.Tensor] | None] = [None] * len(WEIGHTS)

        async def take_part(number: int) -> None:
            if number == who[-1]:
                await anyio.sleep(late_s)
            try:
                averages = await self.averagers[number].average(
                    gradients_of(number, round_number),
                    WEIGHTS[number],
                    round_number=round_number,
                    attempt=0,
                    members=self.ids,
                )
                outcomes[number] = [tensor.clone() for tensor in averages]
            except AveragingFailed:
                pass

        async with anyio.create_task_group() as tasks:
            for number in who:
                tasks.start_soon(take_part, number)
        return outcomes

    def stop(self) -> None:
        for averager in self.averagers:
            averager.shutdown()
        for dht in self.dhts:
            dht.shutdown()


def gradients_of(number: int, round_number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * round_number + number)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.fixture
def members(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Members]:
    # Others compute beside this, and the first 8-bit code takes seconds of imports; who is waited for in vain is to be
    # given up sooner.
    compression, _, chunk_timeout_s = request.param.partition(":")
    started = Members(tmp_path, compression, float(chunk_timeout_s or 10))
    yield started
    started.stop()


def check_equals_mean(outcomes: list[list[torch.Tensor] | None], round_number: int, tolerance: float) -> None:
    first, *others = outcomes
    assert first is not None
    for other in others:
        assert other is not None
        assert all(torch.equal(mine, its) for mine, its in zip(first, other, strict=True)), "bitwise the same"
    for index, average in enumerate(first):
        expected = sum(weight * gradients_of(n, round_number)[index] for n, weight in enumerate(WEIGHTS)) / sum(WEIGHTS)
        assert float((average - expected).norm() / expected.norm()) < tolerance


async def _num_frozen(dht: object, node: object) -> int:
    """In the DHT's process."""
    return gc.get_freeze_count()


@pytest.mark.parametrize("members", ["none"], indirect=True)
def test_children_do_not_collect_what_they_share_with_their_parent(members: Members) -> None:
    assert members.dhts[0].node.run_coroutine(_num_frozen) > 100_000


@pytest.mark.parametrize("members", TOLERANCE, indirect=True)
async def test_all_members_get_the_weighted_mean(members: Members, request: pytest.FixtureRequest) -> None:
    tolerance = TOLERANCE[request.node.callspec.params["members"]]
    for round_number in range(3):
        check_equals_mean(await members.average(round_number, [0, 1, 2]), round_number, tolerance)


@pytest.mark.parametrize("members", ["none:4"], indirect=True)
async def test_who_comes_later_is_waited_for_and_who_does_not_come_fails_the_round(members: Members) -> None:
    check_equals_mean(await members.average(0, [0, 1, 2], late_s=1.0), 0, TOLERANCE["none"])
    assert await members.average(1, [0, 2]) == [None, None, None]
    check_equals_mean(await members.average(2, [2, 1, 0]), 2, TOLERANCE["none"])


async def _count_runners(self: object, future: MPFuture) -> None:
    """In the averager's process."""
    future.set_result(sum(isinstance(known, averaging._ExactAllReduce) for known in gc.get_objects()))


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging._AveragerProcess, "_count_runners", _count_runners, raising=False)


@pytest.mark.parametrize("members", ["none:4"], indirect=True)
async def test_a_failed_round_leaves_nothing_behind(counting: None, members: Members) -> None:
    assert await members.average(0, [0, 1]) == [None, None, None]
    await anyio.sleep(COLLECT_AFTER_S + 1.0)
    future: MPFuture = MPFuture()
    members.averagers[0]._process._outer_pipe.send(("_count_runners", [], {"future": future}))
    assert await future == 0


def test_an_unknown_codec_is_refused():
    with pytest.raises(AssertionError, match="int4"):
        _codec("int4")
