"""A peer tries the ways that its stage needs, and takes no place, or gives it up, while one is missing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import anyio
import pytest
from contexts import MovedClock, make_context
from tiny_models import LENGTH, LLAMA

from swarm_peer.config import RunManifest
from swarm_peer.errors import PeerUnreachable, UserError
from swarm_peer.peer_options import PeerOptions
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime import mover as movers
from swarm_peer.runtime.lifecycle import Lifecycle
from swarm_peer.runtime.mover import Mover
from swarm_peer.runtime.network.needed_ways import MOST_TRIED, PATIENCE, REMEMBERED_S, NeededWays
from swarm_peer.wire.records import MAX_UNREACHED

MANIFEST = RunManifest.model_validate(
    {
        "name": "test",
        "model": {"config": LLAMA},
        "stages": {"count": 2},
        "data": {"sequence_length": LENGTH, "dataset": "text", "files": ["/data/corpus.txt"]},
        "training": {"steps": 10, "global_batch_size": 6, "microbatch_size": 3},
        "optimizer": {"learning_rate": 0.1},
    }
)
OPTIONS = PeerOptions(initial_peers=("/ip4/127.0.0.1/tcp/1",))


def peer(name: str, stage: int, *, state: PeerState = PeerState.SERVING, **more: object) -> PeerView:
    return PeerView(peer_id=name, stage=stage, state=state, announced=1, samples_per_s=1.0, **more)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movers, "ANNOUNCEMENTS_PER_LIFETIME", 10_000)


class Swarm:
    """Peers with places, of which this one reaches those that are connected, and those that it may dial."""

    def __init__(self, rosters: list[list[str]], reached: set[str]):
        self.rosters, self.reached = rosters, reached
        self.connected: set[str] = set()
        self.dialled: list[str] = []
        self.dropped: set[str] = set()
        self.context = make_context(MANIFEST, options=OPTIONS)
        self.me = self.context.identity.peer_id
        rosters[:] = [[self.me if name == "me" else name for name in roster] for roster in rosters]
        self.announced = SwarmView(2, tuple(peer(name, stage) for stage, here in enumerate(rosters) for name in here))
        self.clock = MovedClock(now=100.0)
        roster = SimpleNamespace(roster=lambda stage: [SimpleNamespace(peer=name) for name in self.rosters[stage]])
        self.ways = NeededWays(
            context=replace(self.context, clock=self.clock),
            dht=SimpleNamespace(connected=self._connected, dial=self._dial, addresses=["/ip4/1.2.3.4/tcp/7/p2p/me"]),
            directory=self,
            agreement=SimpleNamespace(core=SimpleNamespace(epoch=roster)),
        )

    async def _connected(self) -> set[str]:
        return self.connected

    async def _dial(self, names: list[str]) -> None:
        self.dialled += names
        self.connected = self.connected | (self.reached & set(names))

    @property
    def view(self) -> SwarmView:
        """As a directory has it: without those that were found not to be reached."""
        return replace(self.announced, peers=tuple(p for p in self.announced.peers if p.peer_id not in self.dropped))

    def known(self, name: str) -> PeerView | None:
        return self.announced.peer(name)

    def takes_part(self, name: str) -> bool:
        return self.known(name) is not None

    def addresses_of(self, name: str) -> list[str]:
        return [f"/ip4/1.1.1.1/tcp/9/p2p/{name}"] if name == "ann" else []

    async def refresh_surely(self, stages: object) -> SwarmView:
        return self.view

    async def announce(self) -> None:
        pass

    def announce_anew(self) -> None:
        """All peers announce themselves once more."""
        peers = tuple(replace(p, announced=p.announced + 1) for p in self.announced.peers)
        self.announced = replace(self.announced, peers=peers)


async def test_all_stage_mates_are_dialled_and_of_neighbours_no_more_than_it_takes() -> None:
    swarm = Swarm([["ann", "bob", "me"], ["cleo", "dan"]], {"ann", "bob", "cleo"})
    swarm.connected = {"dan"}
    assert not await swarm.ways.lacks(0)
    assert swarm.dialled == ["ann", "bob"], "one of stage 1 is connected"
    assert not await swarm.ways.lacks(0)
    assert swarm.dialled == ["ann", "bob"]


async def test_who_is_alone_in_its_stage_does_not_lack_itself_elsewhere() -> None:
    swarm = Swarm([["me"], ["cleo"]], {"cleo"})
    assert not await swarm.ways.lacks(1)
    assert swarm.dialled == ["cleo"]
    swarm.announce_anew()
    assert not swarm.ways.without


async def test_what_was_in_vain_is_tried_anew_after_a_while() -> None:
    swarm = Swarm([["me"], ["cleo", "dan"]], set())
    assert await swarm.ways.lacks(0) == {"cleo", "dan"}
    swarm.announce_anew()
    swarm.connected = {"dan"}
    assert not await swarm.ways.lacks(0)
    assert swarm.ways.without == {"cleo"}, "nobody has needed it since"
    assert swarm.clock.now is not None
    swarm.clock.now += REMEMBERED_S
    assert not await swarm.ways.lacks(0)
    assert swarm.ways.without == set()


async def test_whom_it_lacks_is_known_once_that_one_has_announced_itself_again() -> None:
    swarm = Swarm([["ann"], ["cleo"]], {"cleo"})
    assert await swarm.ways.lacks(0) == {"ann"}
    assert swarm.ways.without == set(), "it may just have died"
    swarm.announce_anew()
    assert swarm.ways.without == {"ann"}
    assert not await swarm.ways.lacks(0) - {"ann"}
    swarm.reached.add("ann")
    assert not await swarm.ways.lacks(0)
    assert swarm.ways.without == set()
    swarm.connected = set()
    swarm.reached.clear()
    await swarm.ways.lacks(0)
    swarm.announce_anew()
    swarm.announced = SwarmView(2)
    await swarm.ways.lacks(0)
    assert not swarm.ways._in_vain, "of those that are gone nothing is kept"


async def test_a_daemon_that_does_not_answer_keeps_nobody_out() -> None:
    swarm = Swarm([["ann"], ["cleo"]], set())

    async def fail() -> set[str]:
        raise PeerUnreachable("no answer")

    swarm.ways._dht.connected = fail  # type: ignore[method-assign]
    assert await swarm.ways.explain(0) == ""


async def test_it_says_whose_port_would_help_most() -> None:
    swarm = Swarm([["ann", "bob"], ["cleo"]], {"cleo"})
    swarm.announced = replace(
        swarm.announced,
        peers=tuple(replace(p, name="Ann" if p.peer_id == "ann" else "") for p in swarm.announced.peers),
    )
    both = await swarm.ways.explain(0)
    assert both == "no way to Ann, …bob; what would help most: forward port 7 on the router of this machine"
    swarm.reached.add("bob")
    one = await swarm.ways.explain(0)
    ends = sorted([("ann", "port 9 on the router of Ann"), (swarm.me, "port 7 on the router of this machine")])
    assert one == f"no way to Ann; what would help most: forward {ends[0][1]} or {ends[1][1]}"


async def test_a_place_is_given_up_after_a_while_and_by_the_later_one() -> None:
    swarm = Swarm([["ann", "me", "bob"], ["cleo"]], {"cleo"})
    await swarm.ways.lacks(0)
    swarm.announce_anew()
    assert swarm.ways.without == {"ann", "bob"}
    assert not swarm.ways.gives_way(0), "it may be there again in a moment"
    assert swarm.clock.now is not None
    swarm.clock.now += PATIENCE * MANIFEST.limits.announcement_s
    assert swarm.ways.gives_way(0) == {"ann"}, "bob came later"
    assert not swarm.ways.gives_way(1), "it has no place there"


class Stay:
    """A mover whose peer stands in a stage."""

    def __init__(self, swarm: Swarm, state: PeerState, *, stage: str = "auto", refuses: bool = False):
        self.refuses, self.num_checked = refuses, 0
        self.lifecycle = Lifecycle(swarm.clock)
        self.lifecycle.enter(state)
        options = OPTIONS.model_copy(update={"stage": stage})
        parts = SimpleNamespace(
            context=replace(swarm.context, options=options),
            directory=swarm,
            ways=swarm.ways,
            device=None,
            base=SimpleNamespace(manifest=self.manifest),
        )
        self.mover = Mover(parts=parts, lifecycle=self.lifecycle, counted=None)
        self.mover._check = self.check  # type: ignore[method-assign]
        self.replica = SimpleNamespace(stage=0, stage_mates=lambda: ["bob"])

    async def manifest(self) -> None:
        """Whichever."""

    def check(self, stage: int, manifest: None) -> None:
        """Refuse what this machine cannot serve."""
        self.num_checked += 1
        if self.refuses:
            raise UserError("there is no memory for it")

    async def ends(self, within_s: float = 5.0) -> bool:
        """Whether the peer leaves its stage."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.mover.keep_ways, self.replica)
            with anyio.move_on_after(within_s):
                await self.lifecycle.stop.wait()
            tasks.cancel_scope.cancel()
        return self.lifecycle.stop.is_set()


@pytest.mark.parametrize(("stage", "next_stage"), [("auto", 1), ("0", None)])
async def test_one_that_gives_way_goes_where_it_lacks_nobody_or_joins_anew(stage: str, next_stage: int | None) -> None:
    swarm = Swarm([["ann", "bob", "me"], ["cleo"]], {"bob", "cleo"})
    await swarm.ways.lacks(0)
    swarm.announce_anew()
    assert swarm.clock.now is not None
    swarm.clock.now += PATIENCE * MANIFEST.limits.announcement_s
    stay = Stay(swarm, PeerState.SERVING, stage=stage)
    assert await stay.ends()
    assert stay.lifecycle.next_stage == next_stage
    assert stay.lifecycle.state is PeerState.DRAINING
    assert not stay.lifecycle.has_ended


@pytest.mark.parametrize("refuses", [False, True])
async def test_one_that_waits_goes_where_it_lacks_nobody_if_it_can_serve_there(refuses: bool) -> None:
    swarm = Swarm([["ann", "bob"], ["cleo"]], {"bob", "cleo"})
    await swarm.ways.lacks(0)
    stay = Stay(swarm, PeerState.JOINING, refuses=refuses)
    swarm.announce_anew()
    assert not await stay.ends(0.2), "a way may be found yet"
    assert swarm.clock.now is not None
    swarm.clock.now += PATIENCE * MANIFEST.limits.announcement_s
    assert await stay.ends(0.5 if refuses else 5.0) is not refuses
    assert stay.num_checked
    if refuses:
        return
    assert stay.lifecycle.next_stage == 1
    assert stay.mover.unreached == ("ann",)


@pytest.mark.parametrize("is_dropped", [False, True])
async def test_one_that_waits_stays_where_no_stage_is_better(is_dropped: bool) -> None:
    """Also while it has taken the other one out of its view, as calls do that fail: it still has its place."""
    swarm = Swarm([["ann"], ["cleo"]], {"cleo"})
    await swarm.ways.lacks(0)
    swarm.announce_anew()
    swarm.dropped = {"ann"} if is_dropped else set()
    assert await swarm.ways.lacks(0) == swarm.ways.without == {"ann"}
    assert swarm.clock.now is not None
    swarm.clock.now += PATIENCE * MANIFEST.limits.announcement_s
    assert swarm.ways.lacks_for_long(0) == {"ann"}
    assert not await Stay(swarm, PeerState.JOINING).ends(within_s=0.3)


async def test_the_last_peer_of_a_stage_stays() -> None:
    swarm = Swarm([["ann", "me"], ["cleo"]], {"cleo"})
    await swarm.ways.lacks(0)
    swarm.announce_anew()
    assert swarm.clock.now is not None
    swarm.clock.now += PATIENCE * MANIFEST.limits.announcement_s
    stay = Stay(swarm, PeerState.SERVING)
    stay.replica.stage_mates = list
    assert not await stay.ends(within_s=0.3)
    assert stay.lifecycle.state is PeerState.SERVING


async def test_some_are_tried_at_a_time_and_no_more_than_some_announced() -> None:
    many = [f"p{number}" for number in range(20)]
    swarm = Swarm([many, ["cleo"]], {"cleo", *many[:4]})
    assert await swarm.ways.lacks(0) == set(many) - swarm.connected
    assert len(swarm.dialled) == MOST_TRIED
    while len(swarm.dialled) <= len(many):
        await swarm.ways.lacks(0)
    assert set(swarm.dialled[: len(many) + 1]) == {*many, "cleo"}, "those first that were not tried yet"
    assert await swarm.ways.lacks(0) == set(many[4:])
    swarm = Swarm([many, ["cleo"]], {"cleo"})
    assert await swarm.ways.explain(0) != ""
    while len(swarm.dialled) <= len(many):
        await swarm.ways.lacks(0)
    swarm.announce_anew()
    assert len(swarm.ways.without) == 20
    assert len(Stay(swarm, PeerState.JOINING).mover.unreached) == MAX_UNREACHED


async def test_nobody_moves_where_it_lacks_somebody(caplog: pytest.LogCaptureFixture) -> None:
    swarm = Swarm([["me", "bob"], ["cleo"]], {"bob"})
    stay = Stay(swarm, PeerState.SERVING)
    caplog.set_level("INFO")
    assert not await stay.mover._move(stay.replica, 1)  # type: ignore[arg-type]
    assert "move_waits stage=1 reason=no way to …cleo; what would help most" in caplog.text
