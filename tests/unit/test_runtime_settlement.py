import asyncio
import sys
from dataclasses import replace

import anyio
import anyio.lowlevel
import pytest
import torch
from contexts import MovedClock, begin_round, make_context, unparsed
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from memory_transport import MemoryNetwork

from swarm_peer.config import RunManifest
from swarm_peer.errors import CallTimeout, InvalidMessage, NotServing, OtherTimeline, PeerUnreachable, RoundClosed
from swarm_peer.policy.data.ranges import SampleId, WindowRange
from swarm_peer.policy.progress_counter import RoundCount
from swarm_peer.policy.timeline import Timeline
from swarm_peer.policy.step_state import Phase
from swarm_peer.policy.trouble import Trouble
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.policy.voting import Verdict
from swarm_peer.runtime.network import progress
from swarm_peer.runtime.network.gossip import GREET_TRIES, Gossip
from swarm_peer.runtime.network.progress import ProgressBook
from swarm_peer.runtime.network.transport import check_body
from swarm_peer.runtime.stage.rounds import RoundBook
from swarm_peer.runtime.state.index import extend_history
from swarm_peer.runtime.step.averaging import AveragingFailed
from swarm_peer.runtime.step.barrier import MAX_WAITS, Barrier, _Patience
from swarm_peer.runtime.step.outcome import LeftBehind
from swarm_peer.runtime.step.settlement import StageGroup
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import GreetCall, ReadyCall, VoteCall
from swarm_peer.wire.records import Progress, seal

MANIFEST = RunManifest.model_validate(
    {
        "name": "tiny",
        "model": {"config": "none"},
        "stages": {"count": 1},
        "data": {"sequence_length": 4},
        "training": {"steps": 10, "global_batch_size": 8, "microbatch_size": 2},
        "optimizer": {"learning_rate": 0.1},
        "averaging": {"max_tries": 2, "compare_weights_every": 4},
    }
)


class Rounds:
    """Averaging among members that come together by (round, attempt), with outcomes as a script has them.

    Attributes:
        script: (attempt, peer) -> "fail" or "wrong"; attempts and peers may be None, for all
        log: (peer, round, attempt, group_size) of each call
        averaged: called with the attempt when the members of a round have come together
        silent: (name, round) of those that never come
    """

    def __init__(self):
        self.script = {}
        self.fired = []
        self.log = []
        self.averaged = lambda attempt: None
        self.silent = set()
        self._rounds = {}

    def outcome(self, attempt, name):
        for key in ((attempt, name), (attempt, None), (None, name), (None, None)):
            if key in self.script:
                self.fired.append((attempt, name))
                return self.script[key]
        return "done"

    async def average(self, member, gradients, weight, round_number, attempt, group_size):
        if (member.name, round_number) in self.silent:
            await anyio.sleep_forever()
        self.log.append((member.name, round_number, attempt, group_size))
        members, complete = self._rounds.setdefault((round_number, attempt), ({}, anyio.Event()))
        members[member.peer_id] = (weight, [gradient.clone() for gradient in gradients])
        if len(members) == group_size:
            self.averaged(attempt)
            complete.set()
        await complete.wait()
        outcome = self.outcome(attempt, member.name)
        if outcome == "fail":
            raise AveragingFailed("the script says so")
        weights = {peer: members[peer][0] for peer in sorted(members)}
        total = sum(weights.values())
        averages = [
            sum(members[peer][1][n] * (weights[peer] / total if total else 0.0) for peer in weights)
            for n in range(len(gradients))
        ]
        if outcome == "wrong":
            averages[0] += 1.0
        return averages


class Member:
    def __init__(self, group, name, round_number, history_hash):
        self.name, self.world = name, group
        identity = Identity(Ed25519PrivateKey.from_private_bytes(name.encode() * 32))
        self.peer_id = identity.peer_id
        self.transport = group.network.transport(self.peer_id)
        context = make_context(unparsed(MANIFEST.hash), identity=identity)
        context = replace(context, resolved=replace(context.resolved, manifest=MANIFEST))
        self.metrics = context.metrics
        self.rounds_of = RoundBook(context.changed)
        self.progress = ProgressBook(
            context=context,
            incarnation=1,
            is_author=group.is_author,
            on_stranger=group.strangers.add,
            step=lambda: self.rounds_of.step,
        )
        self.barrier = Barrier(
            context=context,
            stage=0,
            rounds=self.rounds_of,
            transport=self.transport,
            progress=self.progress,
            view=lambda: group.view(self),
            on_other_timeline=lambda: group.met_other_timeline.add(self.name),
        )
        self.group = StageGroup(
            context=context,
            stage=0,
            rounds=self.rounds_of,
            transport=self.transport,
            averager=self,
            barrier=self.barrier,
            digest_weights=self.digest_weights,
            device=torch.device("cpu"),
        )
        self.gossip = Gossip(
            manifest_hash=MANIFEST.hash,
            transport=self.transport,
            progress=self.progress,
            welcome=self.barrier.welcome,
            drop=lambda peer, serial: None,
        )
        self.enter(round_number, history_hash)
        self.weights_digest = "w"
        self.num_digests = 0
        self.gradients = [torch.full((3,), float(ord(name))), torch.full((2, 2), -float(ord(name)))]

    def enter(self, round_number, history_hash):
        """As the step loop does it."""
        begin_round(self.rounds_of, round_number, history_hash=history_hash)
        self.progress.forget_past()

    def go_elsewhere(self, round_number):
        """Go to a round of another timeline."""
        self.rounds_of.begin(replace(self.rounds_of.step, round_number=round_number, timeline=ELSEWHERE))
        self.progress.forget_past()

    async def digest_weights(self):
        self.num_digests += 1
        return self.weights_digest

    @property
    def history_hash(self):
        return self.rounds_of.step.history_hash

    async def __call__(self, caller, op, body, tensors):
        if op == "greet":
            return await self.gossip.calls[GreetCall](caller, check_body(GreetCall, body), tensors)
        if op == "ready":
            return await self.barrier.handle_ready(caller, check_body(ReadyCall, body), tensors)
        return await self.group.handle_vote(caller, check_body(VoteCall, body), tensors)

    async def average(self, gradients, *, round_number, attempt, shares):
        weight = shares[self.peer_id]
        return await self.world.rounds.average(self, gradients, weight, round_number, attempt, len(shares))

    def settle(self, samples):
        return asyncio.ensure_future(self.group.settle(self.rounds_of.current, self.gradients, samples))

    def rounds(self, outcome):
        return self.metrics.averaging_rounds.labels(outcome)._value.get()


class Group:
    def __init__(self):
        self.network = MemoryNetwork()

        self.rounds = Rounds()
        self.members = {}
        self.unseen = set()  # names that nobody's view has
        self.joining = set()  # names of those that are not yet seen to serve
        self.strangers = set()  # ids that the directory was to look for
        self.met_other_timeline = set()  # names of those that have
        self.others = ()  # peers of other stages

    async def add(self, names, round_number=3, history_hash="L"):
        for name in names:
            member = self.members[name] = Member(self, name, round_number, history_hash)
            await member.transport.serve(member)
        return [self.members[name] for name in names]

    def is_author(self, peer_id):
        known = {member.peer_id for member in self.members.values() if member.name not in self.unseen}
        return peer_id in known

    def view(self, member):
        peers = [m for m in self.members.values() if m.name not in self.unseen or m is member]
        states = dict.fromkeys(self.joining - {member.name}, PeerState.JOINING)
        mates = [PeerView(peer_id=m.peer_id, stage=0, state=states.get(m.name, PeerState.SERVING)) for m in peers]
        return SwarmView(2, (*mates, *self.others))

    async def settle(self, **samples):
        """Have members end the round at the same time; returns their settlements by name."""
        settling = {name: self.members[name].settle(count) for name, count in samples.items()}
        return dict(zip(settling, await asyncio.gather(*settling.values()), strict=True))

    def kill(self, name, settling=None):
        self.network.kill(self.members[name].peer_id)
        if settling is not None:
            settling.cancel()


@pytest.fixture
async def group():
    group = Group()
    async with group.network:
        yield group


def mean(members, samples):
    total = sum(samples)
    return [
        sum(member.gradients[n] * (count / total) for member, count in zip(members, samples, strict=True))
        for n in range(2)
    ]


def assert_committed(settlements, expected, samples, history_hash="L"):
    """All hold the same, and it is right."""
    assert {settlement.verdict for settlement in settlements} == {Verdict.COMMIT}
    assert len({settlement.history_hash for settlement in settlements}) == 1
    for settlement in settlements:
        assert settlement.samples == samples
        for gradient, other in zip(settlement.gradients, expected, strict=True):
            assert torch.allclose(gradient, other)
        assert extend_history(history_hash, settlement.gradients) == settlement.history_hash


# --- rounds that go well ----------------------------------------------------------------------------------------------


async def test_the_whole_group_commits_the_same_update(group):
    members = await group.add("abc")
    settled = await group.settle(a=2, b=4, c=2)
    assert_committed(settled.values(), mean(members, [2, 4, 2]), 8)
    assert sorted(group.rounds.log) == [(name, 3, 0, 3) for name in "abc"]
    assert all(member.rounds("done") == 1 for member in members)


async def test_a_history_hash_is_that_of_all_updates_so_far(group):
    await group.add("ab")
    first = await group.settle(a=2, b=2)
    for member in group.members.values():
        member.enter(4, first["a"].history_hash)
        assert member.history_hash == first["a"].history_hash
    second = await group.settle(a=2, b=2)
    assert second["a"].history_hash == second["b"].history_hash
    assert second["a"].history_hash != first["a"].history_hash, "the same gradients on top of other weights"


async def test_members_without_samples_take_part(group):
    members = await group.add("ab")
    assert_committed((await group.settle(a=0, b=8)).values(), members[1].gradients, 8)


async def test_a_peer_alone_goes_on_by_itself(group):
    [member] = await group.add("a")
    assert_committed((await group.settle(a=6)).values(), member.gradients, 6)
    assert group.rounds.log == []
    assert member.rounds("alone") == 1


async def test_the_group_waits_for_those_that_still_compute(group):
    first, second = await group.add("ab")
    early = first.settle(2)
    await anyio.wait_all_tasks_blocked()
    assert not early.done()
    assert group.rounds.log == []
    late = second.settle(2)
    assert_committed([await early, await late], mean([first, second], [2, 2]), 4)


async def test_whoever_waits_hears_at_once_that_the_last_one_is_ready_and_has_voted(group, monkeypatch):
    for module in ("barrier", "settlement"):
        monkeypatch.setattr(f"swarm_peer.runtime.step.{module}.POLL_S", 3600.0)
    first, second = await group.add("ab")
    early = first.settle(2)
    await anyio.wait_all_tasks_blocked()
    late = second.settle(2)
    with anyio.fail_after(5):
        await asyncio.gather(early, late)


async def test_who_says_at_once_that_it_is_not_ready_is_asked_after_a_pause(group, monkeypatch):
    monkeypatch.setattr("swarm_peer.runtime.step.barrier.POLL_S", 0.0)
    monkeypatch.setattr("swarm_peer.runtime.step.barrier.PAUSE_S", 3600.0)
    first, second = await group.add("ab")
    waiting = first.settle(2)
    await anyio.wait_all_tasks_blocked()
    for _ in range(100):
        await anyio.lowlevel.checkpoint()
    assert group.network.num_calls("ready", second.peer_id) == 1
    waiting.cancel()


async def test_a_newcomer_that_has_greeted_is_expected_before_its_mates_see_that_it_serves(group):
    members = await group.add("ab")
    group.joining = {"b"}
    members[0].barrier.welcome(members[1].peer_id)
    assert_committed((await group.settle(a=2, b=2)).values(), mean(members, [2, 2]), 4)


@pytest.mark.parametrize("times", [2, 10**6])
async def test_a_newcomer_greets_until_its_announcement_is_seen(group, monkeypatch, times):
    monkeypatch.setattr("swarm_peer.runtime.network.gossip.GREET_PAUSE_S", 0.0)
    members = first, second, newcomer = await group.add("abc", round_number=4)
    newcomer.enter(3, "L")
    group.joining = {"c"}
    fault = group.network.fault(op="greet", to=first.peer_id, fail=NotServing("not seen yet"), times=times)
    assert await newcomer.gossip.greet(0, [member.peer_id for member in members]) == 4
    assert fault.fired == min(times, GREET_TRIES)
    assert group.network.num_calls("greet", second.peer_id) == 1, "it knows the newcomer"
    assert newcomer.peer_id in second.barrier._mates.expected()
    assert (newcomer.peer_id in first.barrier._mates.expected()) == (times == 2), "nobody waits for ever"


async def test_a_stage_mate_that_is_ready_makes_itself_known(group):
    members = first, second = await group.add("ab")
    group.joining = {"b"}
    early = second.settle(2)  # sees the first, for which it still joins
    await anyio.wait_all_tasks_blocked()
    settled = await asyncio.gather(early, first.settle(2))
    assert_committed(settled, mean(members, [2, 2]), 4)


async def test_a_peer_that_leaves_the_view_for_a_moment_is_still_a_stage_mate(group):
    members = first, second = await group.add("ab")
    first.barrier._mates.refresh()
    group.unseen = {"b"}
    early = second.settle(2)
    await anyio.wait_all_tasks_blocked()
    settled = await asyncio.gather(early, first.settle(2))
    assert_committed(settled, mean(members, [2, 2]), 4)


async def test_a_stranger_is_not_welcome(group):
    """Who announces this stage nowhere is not waited for, and not told that anybody is ready."""
    group.unseen = {"c"}
    members = await group.add("abc")
    with pytest.raises(NotServing, match="no announcement of this peer"):
        members[0].barrier.welcome(members[2].peer_id)
    stranger = members[2].settle(2)  # it asks the others, and does not answer
    await anyio.wait_all_tasks_blocked()
    assert members[2].peer_id in group.strangers, "they have the directory look"
    settled = await group.settle(a=2, b=4)
    assert_committed(settled.values(), mean(members[:2], [2, 4]), 6)
    for member in members[:2]:
        member.enter(4, settled["a"].history_hash)
    assert (await stranger).verdict is Verdict.RESYNC


@pytest.mark.parametrize("liar_is_announced", [True, False])
async def test_one_liar_cannot_have_the_others_take_over_its_state(group, liar_is_announced):
    *members, liar = await group.add("abcd")
    if not liar_is_announced:
        group.unseen = {"d"}
        call = ReadyCall(manifest=MANIFEST.hash, stage=0, round_number=3, timeline=0, attempt=0, counts=())
        asking = [asyncio.ensure_future(liar.transport.call(m.peer_id, call, timeout_s=5.0)) for m in members]
        await anyio.wait_all_tasks_blocked()
    fault = group.network.fault(op="ready", to=liar.peer_id, fail=RoundClosed("over", 4), times=3)
    settled = await group.settle(a=3, b=3, c=2)
    assert fault.fired == (3 if liar_is_announced else 0)
    assert_committed(settled.values(), mean(members, [3, 3, 2]), 8)
    if not liar_is_announced:
        for task in asking:
            task.cancel()


async def test_progress_counts_spread_at_the_barrier(group):
    first, second = await group.add("ab")
    first.progress.count_own(3, RoundCount(6, 6, 1.0))
    second.progress.count_own(3, RoundCount(2, 2, 1.0))
    await group.settle(a=6, b=2)
    assert first.progress.counter.samples(3) == second.progress.counter.samples(3) == 8


async def test_no_round_is_settled_before_all_counts_that_came_with_the_answer_are_known(group, monkeypatch):
    monkeypatch.setattr(progress, "MAX_CHECKED", 1)
    first, second = await group.add("ab")
    for number in range(1, 4):
        author = Identity(Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big")))
        count = Progress(round_number=3, samples=number, claimed=number, loss_sum=0.0)
        counts = [(author.peer_id, seal(count, MANIFEST.hash, author))]
        assert second.progress.merge(counts, vouched=True) == 0
    await group.settle(a=6, b=2)
    assert first.progress.counter.samples(3) == second.progress.counter.samples(3) == 6


# --- rounds without an average ----------------------------------------------------------------------------------------


@pytest.fixture
async def periodic(monkeypatch):
    """A group that averages at the end of round 4, and not at that of round 3."""
    averaging = MANIFEST.averaging.model_copy(update={"mode": "periodic", "inner_steps": 5})
    monkeypatch.setattr(sys.modules[__name__], "MANIFEST", MANIFEST.model_copy(update={"averaging": averaging}))
    group = Group()
    async with group.network:
        yield group


class SlowAsker:
    """A transport whose calls wait until they may go."""

    def __init__(self, transport):
        self.transport = transport
        self.peer_id = transport.peer_id
        self.may_ask = anyio.Event()

    async def call(self, *args, **options):
        await self.may_ask.wait()
        return await self.transport.call(*args, **options)


async def test_a_round_without_an_average_ends_when_all_are_ready(periodic):
    members = await periodic.add("abc")
    for member in members:
        member.gradients = ()
    settled = await periodic.settle(a=2, b=4, c=0)
    assert {settlement.verdict for settlement in settled.values()} == {Verdict.COMMIT}
    assert [settlement.samples for settlement in settled.values()] == [6, 6, 6]
    assert all(settlement.gradients == () for settlement in settled.values())
    assert {settlement.history_hash for settlement in settled.values()} == {extend_history("L", ())}
    assert periodic.rounds.log == []
    for member in members:
        member.enter(4, settled["a"].history_hash)
    settled = await periodic.settle(a=2, b=4, c=2)
    assert sorted(periodic.rounds.log) == [(name, 4, 0, 3) for name in "abc"], "the period ends"


async def test_who_asks_late_is_told_that_all_were_ready(periodic):
    fast, slow = await periodic.add("ab")
    slow.barrier._transport = asker = SlowAsker(slow.transport)
    early, late = fast.settle(2), slow.settle(4)
    settlement = await early
    fast.enter(4, settlement.history_hash)
    await anyio.wait_all_tasks_blocked()
    assert not late.done()
    asker.may_ask.set()
    assert (await late).verdict is Verdict.COMMIT
    assert (await late).samples == 6


async def test_who_holds_other_weights_hears_of_it_though_it_asks_late(periodic, monkeypatch):
    averaging = MANIFEST.averaging.model_copy(update={"inner_steps": 3})
    monkeypatch.setattr(sys.modules[__name__], "MANIFEST", MANIFEST.model_copy(update={"averaging": averaging}))
    fast, slow = await periodic.add("ab", round_number=4)
    slow.weights_digest = "x"
    slow.barrier._transport = asker = SlowAsker(slow.transport)
    early, late = fast.settle(6), slow.settle(2)
    fast.enter(5, (await early).history_hash)
    asker.may_ask.set()
    assert ((await late).verdict, (await late).cause) == (Verdict.RESYNC, "other_weights")


async def test_who_was_not_there_is_left_behind(periodic):
    fast, slow = await periodic.add("ab")
    periodic.unseen.add("b")
    settlement = await fast.settle(2)
    fast.enter(4, settlement.history_hash)
    periodic.unseen.clear()
    late = await slow.settle(4)
    assert late.verdict is Verdict.RESYNC
    assert late.holders == (fast.peer_id,)


# --- averages ahead ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def delayed(monkeypatch):
    """A group that averages ahead."""
    averaging = MANIFEST.averaging.model_copy(update={"mode": "delayed"})
    monkeypatch.setattr(sys.modules[__name__], "MANIFEST", MANIFEST.model_copy(update={"averaging": averaging}))
    group = Group()
    group.ahead = []
    async with group.network:
        yield group
        for task in group.ahead:
            task.cancel()


async def end_round_3(group, **samples):
    """End round 3, whose average nobody has begun ahead. What comes next is of one sample more for each member."""
    members = [group.members[name] for name in samples]
    for member in members:
        group.ahead.append(asyncio.ensure_future(member.group.ahead.run()))
    await anyio.wait_all_tasks_blocked()
    upcoming = {
        name: ([gradient + 1 for gradient in group.members[name].gradients], samples[name] + 1) for name in samples
    }
    settled = await asyncio.gather(
        *(m.group.settle(m.rounds_of.current, m.gradients, samples[m.name], upcoming[m.name]) for m in members)
    )
    assert_committed(settled, mean(members, samples.values()), sum(samples.values()))
    for member in members:
        member.enter(4, settled[0].history_hash)
        member.gradients = upcoming[member.name][0]
    group.rounds.log[:] = [call for call in group.rounds.log if call[1] == 4]
    return members


async def test_what_ends_a_round_is_averaged_before(delayed):
    await delayed.add("ab")
    members = await end_round_3(delayed, a=1, b=2)
    await anyio.wait_all_tasks_blocked()
    assert sorted(delayed.rounds.log) == [("a", 4, 0, 2), ("b", 4, 0, 2)], "while the round is open"
    settled = await delayed.settle(a=2, b=3)
    assert_committed(settled.values(), mean(members, [2, 3]), 5, members[0].history_hash)
    assert len(delayed.rounds.log) == 2


async def test_a_newcomer_takes_no_part_in_what_began_before_it_came(delayed, caplog):
    await delayed.add("ab")
    members = await end_round_3(delayed, a=1, b=2)
    await delayed.add("c", 4, members[0].history_hash)
    settled = await delayed.settle(a=2, b=3, c=0)
    newcomer = settled.pop("c")
    assert_committed(settled.values(), mean(members, [2, 3]), 5, members[0].history_hash)
    assert newcomer.verdict is Verdict.RESYNC
    assert set(newcomer.holders) == {member.peer_id for member in members}
    assert all(settlement.is_wanted for settlement in settled.values())
    assert "round_disputed" not in caplog.text, "nobody holds another result"


async def test_a_newcomer_takes_part_in_what_begins_when_its_first_round_ends(delayed):
    await delayed.add("ab")
    members = await end_round_3(delayed, a=1, b=2)
    members += await delayed.add("c", 4, members[0].history_hash)
    delayed.ahead.append(asyncio.ensure_future(members[2].group.ahead.run()))
    settling = [
        member.group.settle(member.rounds_of.current, member.gradients, samples, (member.gradients, 5))
        for member, samples in zip(members, (2, 3, 0), strict=True)
    ]
    settled = await asyncio.gather(*settling)
    for member in members:
        member.enter(5, settled[0].history_hash)
    settled = await delayed.settle(a=5, b=5, c=5)
    assert_committed(settled.values(), mean(members, [5, 5, 5]), 15, members[0].history_hash)
    assert {call[2] for call in delayed.rounds.log} == {0}, "it did not have to be tried again"


async def test_an_average_of_a_round_that_was_missed_does_not_go_on_beside_another_one(delayed):
    await delayed.add("ab")
    delayed.rounds.silent = {("a", 4)}
    first, second = await end_round_3(delayed, a=1, b=2)
    missed = first.group.ahead._newest
    for member in (first, second):
        member.enter(5, "M")
    under_way = []
    delayed.rounds.averaged = lambda attempt: under_way.append(not missed.is_over)
    settled = await delayed.settle(a=2, b=3)
    assert_committed(settled.values(), mean([first, second], [2, 3]), 5, "M")
    assert under_way == [False]


async def test_an_average_that_failed_for_one_is_made_once_more(delayed):
    await delayed.add("ab")
    delayed.rounds.script = {(0, "b"): "fail"}
    members = await end_round_3(delayed, a=1, b=2)
    await delayed.add("c", 4, members[0].history_hash)
    settled = await delayed.settle(a=2, b=3, c=0)
    assert_committed(settled.values(), mean([*members, delayed.members["c"]], [2, 3, 0]), 5, members[0].history_hash)
    assert sorted(attempt for _, _, attempt, _ in delayed.rounds.log) == [0, 0, 1, 1, 1]


async def test_what_a_lost_member_brought_is_not_waited_for(delayed):
    await delayed.add("abc")
    delayed.rounds.silent = {("c", 4)}
    members = await end_round_3(delayed, a=1, b=2, c=3)
    delayed.kill("c")
    delayed.unseen.add("c")
    settled = await delayed.settle(a=2, b=3)
    assert_committed(settled.values(), mean(members[:2], [2, 3]), 5, members[0].history_hash)


async def test_what_a_leaving_member_has_given_counts_once_if_its_part_came_too(delayed):
    await delayed.add("abc")
    members = await end_round_3(delayed, a=1, b=2, c=3)
    await anyio.wait_all_tasks_blocked()
    delayed.kill("c")
    delayed.unseen.add("c")
    settled = await delayed.settle(a=2 + 4, b=3)  # a has taken in what c brings to another try
    assert_committed(settled.values(), mean(members, [2, 3, 4]), 9, members[0].history_hash)


async def test_what_a_leaving_peer_has_given_that_missed_the_average_is_averaged_after_all(delayed):
    await delayed.add("ab")
    members = await end_round_3(delayed, a=1, b=2)
    await anyio.wait_all_tasks_blocked()
    settled = await delayed.settle(a=2 + 4, b=3)  # a has taken in 4 samples of a peer that they had gone on without
    assert_committed(settled.values(), mean(members, [6, 3]), 9, members[0].history_hash)
    assert sorted(attempt for _, _, attempt, _ in delayed.rounds.log) == [0, 0, 1, 1]


@pytest.mark.parametrize("was_member", [False, True])
async def test_what_was_given_by_a_peer_that_missed_the_average_is_averaged_though_a_member_is_gone(
    delayed, was_member
):
    await delayed.add("abc")
    members = await end_round_3(delayed, a=1, b=2, c=6)
    await anyio.wait_all_tasks_blocked()
    delayed.kill("c")
    delayed.unseen.add("c")
    members[0].rounds_of.current.given["gone" if not was_member else members[2].peer_id] = 4
    settled = await delayed.settle(a=2 + 4, b=3)
    brought = (members, [2, 3, 7]) if was_member else (members[:2], [6, 3])
    assert_committed(settled.values(), mean(*brought), sum(brought[1]), members[0].history_hash)


async def test_what_a_peer_holds_that_was_not_in_the_average_is_averaged_after_all_though_a_member_is_gone(delayed):
    await delayed.add("abc")
    members = await end_round_3(delayed, a=1, b=2, c=3)
    await anyio.wait_all_tasks_blocked()
    delayed.kill("c")
    delayed.unseen.add("c")
    [missed] = await delayed.add("d", 4, members[0].history_hash)
    settled = await delayed.settle(a=2, b=3, d=1)
    assert_committed(settled.values(), mean([*members[:2], missed], [2, 3, 1]), 6, members[0].history_hash)


# --- rounds that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ({(0, None): "fail"}, "failed"),
        ({(0, "a"): "fail"}, "failed"),
        ({(0, "c"): "wrong"}, None),
        ({(0, "a"): "wrong", (0, "b"): "fail"}, None),
    ],
)
async def test_a_round_that_is_not_whole_is_repeated_by_all(group, script, outcome):
    members = await group.add("abc")
    group.rounds.script = script
    settled = await group.settle(a=2, b=4, c=2)
    assert {attempt for attempt, _ in group.rounds.fired} == {0}
    assert len(group.rounds.fired) >= len(script)
    assert_committed(settled.values(), mean(members, [2, 4, 2]), 8)
    assert sorted(group.rounds.log) == [(name, 3, attempt, 3) for name in "abc" for attempt in (0, 1)]
    struck = [member for member in members if (0, member.name) in script or (0, None) in script]
    if outcome:
        assert all(member.rounds(outcome) == 1 for member in struck)


@pytest.mark.parametrize("outcome", ["fail", "wrong"])
async def test_when_averaging_does_not_work_the_share_of_the_most_samples_is_taken_by_all(group, outcome):
    members = await group.add("abc")
    group.rounds.script = {(None, "a"): outcome}
    settled = await group.settle(a=2, b=4, c=1)
    assert_committed([settled["b"]], members[1].gradients, 4)
    for name in "ac":
        assert settled[name].verdict is Verdict.RESYNC
        assert settled[name].holders == (members[1].peer_id,)
    assert {attempt for _, _, attempt, _ in group.rounds.log} == {0, 1}, "the last try is without averaging"


async def test_a_member_that_dies_before_it_is_ready_is_left_out(group):
    members = await group.add("abc")
    settling = [members[0].settle(2), members[1].settle(6)]
    await anyio.wait_all_tasks_blocked()
    assert not any(task.done() for task in settling)
    group.kill("c")
    assert_committed(await asyncio.gather(*settling), mean(members[:2], [2, 6]), 8)
    assert {size for _, _, _, size in group.rounds.log} == {2}


async def test_a_member_that_dies_in_the_round_is_left_out_of_the_next(group):
    members = await group.add("abc")
    settling = {name: group.members[name].settle(2) for name in "abc"}
    group.rounds.script = {(0, None): "fail"}
    group.rounds.averaged = lambda attempt: group.kill("c", settling["c"]) if attempt == 0 else None
    settled = await asyncio.gather(settling["a"], settling["b"])
    assert_committed(settled, mean(members[:2], [2, 2]), 4)
    assert settling["c"].cancelled()
    assert sorted(size for _, _, attempt, size in group.rounds.log if attempt == 1) == [2, 2]


async def test_a_member_that_dies_before_its_vote_has_left_its_share(group):
    members = await group.add("abc")
    settling = {name: group.members[name].settle(2) for name in "abc"}
    group.rounds.averaged = lambda attempt: group.kill("c", settling["c"])
    settled = await asyncio.gather(settling["a"], settling["b"])
    assert_committed(settled, mean(members, [2, 2, 2]), 6)
    assert settling["c"].cancelled()
    assert {attempt for _, _, attempt, _ in group.rounds.log} == {0}


async def test_a_member_that_stalls_is_left_out(group):
    members = await group.add("abc")
    stalled = members[2].peer_id
    fault = group.network.fault(op="ready", to=stalled, fail=CallTimeout("stalled"), times=2)
    settled = await group.settle(a=2, b=2)
    assert fault.fired == 2
    assert_committed(settled.values(), mean(members[:2], [2, 2]), 4)


async def test_a_connection_that_breaks_in_the_barrier_leaves_nobody_out(group):
    members = await group.add("ab")
    broken = [
        group.network.fault(op="ready", to=member.peer_id, fail=PeerUnreachable("the stream broke"))
        for member in members
    ]
    settled = await group.settle(a=2, b=2)
    assert [fault.fired for fault in broken] == [1, 1]
    assert_committed(settled.values(), mean(members, [2, 2]), 4)


async def test_a_member_that_talks_nonsense_is_left_out(group):
    members = await group.add("abc")

    def nonsense(reply):
        reply.body["attempt"] = "first"
        return reply

    fault = group.network.fault(op="ready", to=members[2].peer_id, tamper=nonsense, times=2)
    members[2].rounds_of.current.attempt = 0
    settled = await group.settle(a=2, b=2)
    assert fault.fired == 2
    assert_committed(settled.values(), mean(members[:2], [2, 2]), 4)


def not_yet(reply):
    reply.body["attempt"] = None
    return reply


def of_other_weights(reply):
    reply.body |= {"attempt": 0, "history_hash": "M", "samples": 100}
    return reply


async def hold_up_a_round(group):
    """The last of three is not ready until the others go on without it. Returns them, in the next round."""
    *members, late = await group.add("abc")
    for member in members:
        member.barrier.timeout_s, patience_s = 0.1, member.barrier.timeout_s
    settled = await group.settle(a=2, b=2)
    assert_committed(settled.values(), mean(members, [2, 2]), 4)
    for member in members:
        member.barrier.timeout_s = patience_s
    for member in (*members, late):
        member.enter(4, settled["a"].history_hash)
    return members, late


async def test_a_peer_that_waits_at_the_barrier_longer_than_the_round_took_complains(group):
    """Stage-mates compute no microbatch for longer than that."""
    member, late = await group.add("ab")
    member.barrier._clock = clock = MovedClock(now=1000.0)
    member.rounds_of.begin(replace(member.rounds_of.step, began_s=900.0))
    member.rounds_of.enter(Phase.OPEN)
    member.rounds_of.enter(Phase.ENDING)
    waiting = member.settle(2)
    await anyio.wait_all_tasks_blocked()
    clock.now = 1099.0
    assert member.group.complaint() is None
    clock.now = 1100.0
    complaint = member.group.complaint()
    assert (complaint.trouble, complaint.since_s) == (Trouble.NO_MATES, 1000.0)
    assert f"…{late.peer_id[-8:]}" in complaint.words
    ended = late.settle(2)
    await asyncio.gather(waiting, ended)
    assert member.group.complaint() is None
    member.enter(4, "M")
    assert member.group.complaint() is None


async def test_a_member_that_says_it_is_ready_and_never_is_holds_up_few_barriers(group):
    members, liar = await hold_up_a_round(group)
    fault = group.network.fault(op="ready", to=liar.peer_id, tamper=not_yet, times=10**6)
    asked = []
    for round_number in range(4, 9):
        own = liar.settle(2)  # it tells the others that it is ready
        await anyio.wait_all_tasks_blocked()
        before = fault.fired
        with anyio.fail_after(20):
            settled = await asyncio.gather(*(member.settle(2) for member in members))
        asked.append(fault.fired - before)
        assert {settlement.samples for settlement in settled} == {4}
        for member in (*members, liar):
            member.enter(round_number + 1, settled[0].history_hash)
        assert (await own).verdict is Verdict.RESYNC
    assert asked == [2, 2, 2, 0, 0], "each of the two asks it once in a round, three times in all"
    assert {group_size for *_, group_size in group.rounds.log} == {2}, "nobody averages with it"


async def test_a_member_that_was_late_once_is_back_when_it_is_ready(group):
    members, late = await hold_up_a_round(group)
    everybody = (*members, late)
    for round_number in (4, 5):
        own = late.settle(2)
        await anyio.wait_all_tasks_blocked()
        settled = await asyncio.gather(own, *(member.settle(2) for member in members))
        assert {settlement.samples for settlement in settled} == {6}
        for member in everybody:
            member.enter(round_number + 1, settled[0].history_hash)
    assert sorted(group.rounds.log[2:]) == [(name, number, 0, 3) for name in "abc" for number in (4, 5)]


async def test_only_those_that_a_barrier_has_waited_for_are_late(group):
    member, gone, ahead, late = await group.add("abcd")
    group.network.fault(op="ready", to=gone.peer_id, fail=PeerUnreachable("gone"), times=10**6)
    group.network.fault(op="ready", to=ahead.peer_id, fail=RoundClosed("over", 4), times=10**6)
    member.barrier.timeout_s = 0.1
    with pytest.raises(LeftBehind):
        await member.barrier.gather(member.rounds_of.current, 0)
    assert [each.name for each in (gone, ahead, late) if member.barrier._mates.is_left_out(each.peer_id)] == ["d"]


async def test_a_member_does_not_do_without_one_that_does_without_it(group, monkeypatch):
    monkeypatch.setattr("swarm_peer.runtime.step.barrier.POLL_S", 0.01)
    first, second = await group.add("ab")
    first.barrier._mates.was_late(second.peer_id, 3)
    first.rounds_of.current.attempt = second.rounds_of.current.attempt = 0
    patience_s, second.barrier.timeout_s = second.barrier.timeout_s, 0.1
    assert set(await second.barrier.gather(second.rounds_of.current, 0)) == {second.peer_id}
    second.barrier.timeout_s = patience_s
    for member in (first, second):
        member.enter(4, member.history_hash)
    own = second.settle(2)
    await anyio.wait_all_tasks_blocked()
    settled = await asyncio.gather(own, first.settle(2))
    assert {settlement.samples for settlement in settled} == {4}


async def test_one_that_is_never_ready_is_late_though_it_does_without_the_others(group, monkeypatch):
    monkeypatch.setattr("swarm_peer.runtime.step.barrier.POLL_S", 0.01)
    hung, member = await group.add("ab")
    hung.barrier._mates.was_late(member.peer_id, 2)
    member.barrier.timeout_s = 0.1
    assert set(await member.barrier.gather(member.rounds_of.current, 0)) == {member.peer_id}
    assert member.barrier._mates.is_left_out(hung.peer_id)


async def test_one_that_does_without_others_for_ever_holds_up_few_barriers(group, monkeypatch):
    monkeypatch.setattr("swarm_peer.runtime.step.barrier.POLL_S", 0.01)
    [member] = await group.add("a")
    liar = (await group.add("b"))[0].peer_id

    def does_without(reply):
        reply.body["does_without"] = True
        return reply

    group.network.fault(op="ready", to=liar, tamper=does_without, times=10**6)
    member.barrier.timeout_s = 0.1
    asked = []
    for round_number in range(3, 9):
        before = group.network.num_calls("ready", liar)
        await member.barrier.gather(member.rounds_of.current, 0)
        asked.append(group.network.num_calls("ready", liar) > before)
        member.enter(round_number + 1, member.history_hash)
    assert asked == [True, True, True, True, False, False]


async def test_a_member_that_waits_goes_on_to_the_try_that_another_asks_about(group):
    """It may wait for one that has gone on, and that asks it about a later try alone."""
    waiting, asking, _ = await group.add("abc")
    present = waiting.rounds_of.current
    present.attempt = 0
    gathering = asyncio.ensure_future(waiting.barrier.gather(present, 0))
    await anyio.wait_all_tasks_blocked()
    for attempt, newest in ((0, 0), (1, 1), (99, MANIFEST.averaging.max_tries)):
        call = ReadyCall(manifest=MANIFEST.hash, stage=0, round_number=3, timeline=0, attempt=attempt, counts=())
        answering = asyncio.ensure_future(waiting.barrier.handle_ready(asking.peer_id, call, ()))
        await anyio.wait_all_tasks_blocked()
        assert present.asked_attempt == newest
        await anyio.wait_all_tasks_blocked()  # `notify` wakes nobody at once
        assert gathering.done() == (newest > 0)
        answering.cancel()
    assert set(gathering.result()) == {waiting.peer_id}
    assert not waiting.barrier._mates.is_left_out(asking.peer_id), "nobody was late"


async def test_a_member_that_is_asked_about_a_later_try_settles_in_that(group):
    """What the others have said of the earlier one is not all, and leads to nothing."""
    waiting, asking = await group.add("ab")
    for name, fault in (("c", {"fail": RoundClosed("over", 4)}), ("d", {"tamper": of_other_weights})):
        [other] = await group.add(name)
        group.network.fault(op="ready", to=other.peer_id, **fault)
        group.network.fault(op="ready", to=other.peer_id, fail=PeerUnreachable("gone"), times=10**6)
    own = waiting.settle(2)
    await anyio.wait_all_tasks_blocked()
    call = ReadyCall(manifest=MANIFEST.hash, stage=0, round_number=3, timeline=0, attempt=1, counts=())
    reply = await waiting.barrier.handle_ready(asking.peer_id, call, ())
    assert reply.body["attempt"] == 1
    assert_committed(await asyncio.gather(own, asking.settle(4)), mean([waiting, asking], [2, 4]), 6)


async def test_a_newcomer_enters_the_attempt_that_the_others_are_in(group):
    members = await group.add("abc")
    newcomer = members[2]
    absent = group.network.fault(op="ready", to=newcomer.peer_id, fail=PeerUnreachable("gone"), times=4)
    group.rounds.script = {(0, None): "fail"}
    early = [members[0].settle(2), members[1].settle(2)]
    while group.network.num_calls("ready", newcomer.peer_id) < 6:  # two of them in the second attempt
        await anyio.lowlevel.checkpoint()
    assert absent.fired == 4
    assert not any(task.done() for task in early), "in the second attempt they wait for it"
    settled = await asyncio.gather(*early, newcomer.settle(4))
    assert_committed(settled, mean(members, [2, 2, 4]), 8)
    assert [entry for entry in group.rounds.log if entry[0] == "c"] == [("c", 3, 1, 3)]


# --- weights that differ ----------------------------------------------------------------------------------------------


async def test_a_peer_that_is_left_behind_takes_the_state_of_those_ahead(group, caplog):
    [behind] = await group.add("a", round_number=3)
    ahead = await group.add("bc", round_number=4, history_hash="M")
    settlement = (await group.settle(a=2))["a"]
    assert settlement.verdict is Verdict.RESYNC
    assert settlement.holders == tuple(sorted(member.peer_id for member in ahead))
    assert "resync_needed round=3 reason=2 stage-mates have left it behind" in caplog.text
    assert group.rounds.log == []
    assert behind.history_hash == "L"


async def test_where_half_went_on_the_others_follow(group):
    behind = await group.add("ab", round_number=3)
    ahead = await group.add("cd", round_number=4, history_hash="M")
    settled = await group.settle(a=2, b=2)
    for settlement in settled.values():
        assert settlement.verdict is Verdict.RESYNC
        assert settlement.holders == tuple(sorted(member.peer_id for member in ahead))
    assert {member.history_hash for member in behind} == {"L"}


@pytest.mark.parametrize(
    ("rounds", "follow"),
    [
        ((5, 6, 3), True),
        ((5, 4, 4), False),  # a round ahead: as far as they come without this stage
        ((5, 5, 3, 4), False),  # half of them
        ((), False),
    ],
)
async def test_most_of_a_stage_follow_the_one_that_has_gone_on_with_the_other_stages(group, rounds, follow):
    behind = await group.add("ab", round_number=3)
    [ahead] = await group.add("c", round_number=9, history_hash="M")
    group.others = [
        PeerView(peer_id=f"other {number}", stage=1, state=PeerState.SERVING, round_number=round_number)
        for number, round_number in enumerate(rounds)
    ]
    group.others.append(PeerView(peer_id="joins", stage=1, state=PeerState.JOINING, round_number=0))
    settled = await group.settle(a=2, b=2)
    if not follow:
        assert_committed(settled.values(), mean(behind, [2, 2]), 4)
        return
    for settlement in settled.values():
        assert (settlement.verdict, settlement.holders) == (Verdict.RESYNC, (ahead.peer_id,))


@pytest.mark.parametrize(
    ("behind", "others", "waits"),
    [
        ((5, 5), (), True),
        ((5,), (), False),  # either may have given up the other
        ((9, 5), (), False),  # one is late in this round, and has not gone on with the other
        ((5, 5), (9, 9, 5), False),  # the run has gone on with this one
        ((5, 5), (9, 5), True),
    ],
)
async def test_one_that_went_on_alone_waits_for_those_that_are_more_and_behind(
    group, monkeypatch, behind, others, waits
):
    monkeypatch.setattr("swarm_peer.runtime.step.barrier.POLL_S", 0.01)
    [alone] = await group.add("a", round_number=9, history_hash="M")
    mates = await group.add("bcd"[: len(behind)], round_number=5)
    rounds = dict(zip((mate.peer_id for mate in mates), behind, strict=True))
    group.others = [
        PeerView(peer_id=f"other {number}", stage=1, state=PeerState.SERVING, round_number=round_number)
        for number, round_number in enumerate(others)
    ]
    alone.barrier._view = lambda: announcing(group.view(alone), rounds)
    alone.barrier.timeout_s = 0.05
    looks = []
    lasts = _Patience.lasts

    def noted(patience, outnumbering, num_ready):
        looks.append(dict(outnumbering))
        if len(looks) < 3:
            rounds.update((mate, number + 1) for mate, number in outnumbering.items())  # they go on
        return lasts(patience, outnumbering, num_ready)

    monkeypatch.setattr(_Patience, "lasts", noted)
    assert set(await alone.barrier.gather(alone.rounds_of.current, 0)) == {alone.peer_id}
    if waits:
        assert len(looks) == 3 + MAX_WAITS, "twice they have gone on"
    else:
        assert looks == [{}]
    assert all(alone.barrier._mates.is_left_out(mate.peer_id) for mate in mates)


def announcing(view, rounds):
    """The view with peers in these rounds."""
    peers = (replace(peer, round_number=rounds.get(peer.peer_id, peer.round_number)) for peer in view.peers)
    return replace(view, peers=tuple(peers))


def test_rounds_that_a_few_only_claim_to_make_keep_nobody_waiting():
    patience = _Patience()
    looks = [patience.lasts({"hung": 5, "liar": 9 - number % 2}, 1) for number in range(9)]
    assert looks == [True] * MAX_WAITS + [False] * (9 - MAX_WAITS)
    patience = _Patience()
    looks = [
        patience.lasts({"hung": 5, "liar": 9, "other": 5} if number % 2 else {"hung": 5, "liar": 9}, 1)
        for number in range(9)
    ]
    assert looks == [True] * MAX_WAITS + [False] * (9 - MAX_WAITS)


async def test_one_that_went_on_alone_meets_those_that_are_more(group, monkeypatch):
    monkeypatch.setattr("swarm_peer.runtime.step.barrier.POLL_S", 0.01)
    [alone] = await group.add("a", round_number=9, history_hash="M")
    mates = await group.add("bc", round_number=5)
    alone.barrier._view = lambda: announcing(
        group.view(alone), {mate.peer_id: mate.rounds_of.current.number for mate in mates}
    )
    alone.barrier.timeout_s = 0.05
    lasts, looked = _Patience.lasts, anyio.Event()

    def noted(patience, outnumbering, num_ready):
        looked.set()
        return lasts(patience, outnumbering, num_ready)

    monkeypatch.setattr(_Patience, "lasts", noted)
    own = alone.settle(2)
    await looked.wait()
    for number in range(5, 9):
        settled = await group.settle(b=2, c=2)
        assert_committed(settled.values(), mean(mates, [2, 2]), 4, mates[0].history_hash)
        for mate in mates:
            mate.enter(number + 1, settled["b"].history_hash)
    settled = await group.settle(b=2, c=2)
    assert_committed(settled.values(), mean(mates, [2, 2]), 4, mates[0].history_hash)
    assert ((await own).verdict, (await own).holders) == (
        Verdict.RESYNC,
        tuple(sorted(mate.peer_id for mate in mates)),
    )


async def test_of_two_the_one_that_was_given_up_follows(group):
    await group.add("a", round_number=3)
    [ahead] = await group.add("b", round_number=4, history_hash="M")
    settlement = (await group.settle(a=2))["a"]
    assert settlement.verdict is Verdict.RESYNC
    assert settlement.holders == (ahead.peer_id,)


async def test_a_peer_that_went_on_alone_takes_the_state_of_the_others_a_round_later(group):
    members = await group.add("abc")
    members[2].enter(4, "M")
    settled = await group.settle(a=2, b=2)
    assert_committed(settled.values(), mean(members[:2], [2, 2]), 4)
    for member in members[:2]:
        member.enter(4, settled["a"].history_hash)
    settled = await group.settle(a=2, b=2, c=8)
    assert settled["a"].verdict is settled["b"].verdict is Verdict.COMMIT
    assert settled["c"].verdict is Verdict.RESYNC


async def test_the_minority_with_other_weights_takes_the_state_of_the_majority(group):
    majority = await group.add("ab")
    await group.add("c", history_hash="other")
    settled = await group.settle(a=2, b=2, c=2)
    assert_committed([settled["a"], settled["b"]], mean(majority, [2, 2]), 4)
    assert settled["c"].verdict is Verdict.RESYNC
    assert settled["c"].holders == tuple(sorted(member.peer_id for member in majority))
    assert sorted(group.rounds.log) == [("a", 3, 0, 2), ("b", 3, 0, 2)], "other weights are not averaged with"


async def test_of_two_with_different_weights_one_goes_on(group):
    [first] = await group.add("a")
    await group.add("b", history_hash="other")
    settled = await group.settle(a=2, b=2)
    assert settled["a"].verdict is Verdict.COMMIT
    assert settled["b"].verdict is Verdict.RESYNC
    assert settled["b"].holders == (first.peer_id,)


async def test_the_minority_whose_weights_differ_after_the_same_updates_takes_the_state_of_the_majority(group):
    majority = await group.add("ab", round_number=4)
    [odd] = await group.add("c", round_number=4)
    odd.weights_digest = "another"
    settled = await group.settle(a=2, b=2, c=2)
    assert_committed([settled["a"], settled["b"]], mean(majority, [2, 2]), 4)
    assert (settled["c"].verdict, settled["c"].cause) == (Verdict.RESYNC, "other_weights")
    assert settled["c"].holders == tuple(sorted(member.peer_id for member in majority))
    assert sorted(group.rounds.log) == [("a", 4, 0, 2), ("b", 4, 0, 2)], "other weights are not averaged with"


async def test_of_two_whose_weights_differ_after_the_same_updates_one_goes_on(group):
    first, second = await group.add("ab", round_number=8)
    first.weights_digest = "x"
    settled = await group.settle(a=2, b=2)
    assert settled["b"].verdict is Verdict.COMMIT, "the smaller digest wins"
    assert settled["a"].verdict is Verdict.RESYNC
    assert settled["a"].holders == (second.peer_id,)


@pytest.mark.parametrize("digests", ["xy", "yx"])
async def test_of_two_whose_weights_differ_the_one_with_more_samples_goes_on(group, digests):
    for member, digest in zip(await group.add("ab", round_number=8), digests, strict=True):
        member.weights_digest = digest
    settled = await group.settle(a=4, b=60)
    assert settled["a"].verdict is Verdict.RESYNC
    assert_committed([settled["b"]], group.members["b"].gradients, 60)


async def test_samples_whose_average_runs_ahead_count_where_weights_differ(group):
    members = first, second = await group.add("ab", round_number=8)
    first.weights_digest, second.weights_digest = "x", "y"
    settling = [
        asyncio.ensure_future(
            member.group.settle(member.rounds_of.current, member.gradients, 2, (member.gradients, more))
        )
        for member, more in zip(members, (4, 60), strict=True)
    ]
    settled = await asyncio.gather(*settling)
    assert [settlement.verdict for settlement in settled] == [Verdict.RESYNC, Verdict.COMMIT]


async def test_one_peer_with_other_weights_does_not_win_by_its_samples(group):
    majority = await group.add("ab", round_number=4)
    [odd] = await group.add("c", round_number=4)
    odd.weights_digest = "a smaller digest"
    settled = await group.settle(a=2, b=2, c=10**6)
    assert_committed([settled["a"], settled["b"]], mean(majority, [2, 2]), 4)
    assert settled["c"].verdict is Verdict.RESYNC


async def test_a_minority_of_another_history_does_not_win_since_the_devices_of_the_others_differ(group):
    others = await group.add("abc", round_number=4)
    await group.add("de", round_number=4, history_hash="another")
    for member in others:
        member.weights_digest = f"of {member.name}"
    settled = await group.settle(a=2, b=6, c=2, d=2, e=2)
    assert settled["b"].verdict is Verdict.COMMIT
    causes = {name: settled[name].cause for name in "acde" if settled[name].verdict is Verdict.RESYNC}
    assert causes == {"a": "other_weights", "c": "other_weights", "d": "left_behind", "e": "left_behind"}


@pytest.mark.parametrize(
    ("device", "named"),
    [("cuda:1", "device='a GPU of cuda:1'"), ("cpu", f"device='CPU with {torch.backends.cpu.get_cpu_capability()}, ")],
)
async def test_who_holds_other_weights_says_what_it_computes_with(group, caplog, monkeypatch, device, named):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU of {device}")
    odd, _ = await group.add("ab", round_number=4)
    odd.weights_digest, odd.group._device = "x", torch.device(device)
    await group.settle(a=2, b=2)
    [line] = [record.getMessage() for record in caplog.records if "weights_differ" in record.getMessage()]
    assert named in line
    assert f" torch={torch.__version__} " in line
    assert "averaging.compare_weights_every, which is 4, to 0" in line


async def test_of_two_histories_the_weights_are_not_named_as_the_cause(group):
    await group.add("a", round_number=4)
    await group.add("b", round_number=4, history_hash="other")
    settled = await group.settle(a=2, b=2)
    assert (settled["b"].verdict, settled["b"].cause) == (Verdict.RESYNC, "left_behind")


async def test_equal_weights_are_compared_once_in_a_round_of_many_tries_and_averaged(group):
    members = await group.add("abc", round_number=4)
    group.rounds.script[0, "b"] = "fail"
    settled = await group.settle(a=2, b=4, c=2)
    assert_committed(settled.values(), mean(members, [2, 4, 2]), 8)
    assert group.rounds.fired == [(0, "b")]
    assert [member.num_digests for member in members] == [1, 1, 1]


@pytest.mark.parametrize("round_number", [0, 3, 5])
async def test_in_other_rounds_weights_are_not_compared(group, round_number):
    members = await group.add("ab", round_number=round_number)
    members[1].weights_digest = "another"
    settled = await group.settle(a=2, b=2)
    assert {settlement.verdict for settlement in settled.values()} == {Verdict.COMMIT}
    assert [member.num_digests for member in members] == [0, 0]


# --- what is answered -------------------------------------------------------------------------------------------------


async def ask_vote(member, asked, round_number, attempt=0):
    call = VoteCall(manifest=MANIFEST.hash, stage=0, round_number=round_number, attempt=attempt)
    return (await member.transport.call(asked.peer_id, call, timeout_s=5.0)).body


async def test_votes_of_the_round_before_are_still_answered(group):
    first, second = await group.add("ab")
    settled = await group.settle(a=2, b=6)
    first.enter(4, settled["a"].history_hash)
    vote = await ask_vote(second, first, round_number=3)
    assert vote == {"attempt": 0, "checksum": settled["b"].history_hash, "samples": 8, "abstains": False}
    first.enter(5, "M")
    with pytest.raises(RoundClosed) as caught:
        await ask_vote(second, first, round_number=3)
    assert caught.value.round_number == 5


async def test_a_member_that_has_gone_on_to_a_later_try_votes_on_no_earlier_one(group):
    gone_on, other = await group.add("ab")
    gone_on.rounds_of.current.attempt = 1
    vote = await ask_vote(other, gone_on, round_number=3)
    assert vote == {"attempt": 0, "checksum": None, "samples": 0, "abstains": False}, "as if it had failed"


async def test_a_member_that_brings_as_many_samples_as_may_be_told_does_not_silence_the_votes(group):
    most = 2**40 - 1
    first, second = await group.add("ab")
    settled = await group.settle(a=most, b=most)
    first.enter(4, settled["a"].history_hash)
    assert (await ask_vote(second, first, round_number=3))["samples"] == 2 * most


async def test_a_vote_that_is_not_cast_yet_is_waited_for(group):
    first, second = await group.add("ab")
    asking = asyncio.ensure_future(ask_vote(second, first, round_number=3))
    await anyio.wait_all_tasks_blocked()
    assert not asking.done()
    settled = await group.settle(a=2, b=2)
    assert (await asking)["checksum"] == settled["a"].history_hash


async def test_who_says_at_once_that_it_has_no_vote_is_asked_after_a_pause(group, monkeypatch):
    monkeypatch.setattr("swarm_peer.runtime.step.settlement.POLL_S", 0.0)
    monkeypatch.setattr("swarm_peer.runtime.step.settlement.PAUSE_S", 3600.0)
    first, second = await group.add("ab")
    asking = asyncio.ensure_future(first.group._ask_vote(second.peer_id, 3, 0, {}))
    for _ in range(100):
        await anyio.lowlevel.checkpoint()
    assert group.network.num_calls("vote", second.peer_id) == 1
    assert not asking.done()
    asking.cancel()


@pytest.mark.parametrize("op", ["ready", "vote"])
async def test_a_peer_that_is_not_there_yet_says_so(group, monkeypatch, op):
    monkeypatch.setattr(f"swarm_peer.runtime.step.{'barrier' if op == 'ready' else 'settlement'}.POLL_S", 0.0)
    first, second = await group.add("ab")
    fields = {"manifest": MANIFEST.hash, "stage": 0, "round_number": 3, "attempt": 0}
    call = ReadyCall(**fields, timeline=0, counts=()) if op == "ready" else VoteCall(**fields)
    reply = await second.transport.call(first.peer_id, call, timeout_s=5.0)
    assert reply.body["attempt"] is None


async def test_a_ready_call_of_an_old_round_is_told_the_new_one(group):
    first, second = await group.add("ab", round_number=7)
    call = ReadyCall(manifest=MANIFEST.hash, stage=0, round_number=6, timeline=0, attempt=0, counts=())
    with pytest.raises(RoundClosed) as caught:
        await second.transport.call(first.peer_id, call, timeout_s=5.0)
    assert caught.value.round_number == 7


ELSEWHERE = Timeline(5, 2, 2)


async def test_stage_mates_of_another_timeline_do_not_meet(group):
    """Neither averages with the other, goes through rounds towards it, or takes its state unasked."""
    first, second, third = await group.add("abc", round_number=7)
    third.go_elsewhere(9)
    settled = await group.settle(a=2, b=2, c=2)
    assert [settled[name].verdict for name in "abc"] == [Verdict.COMMIT] * 3
    assert [settled[name].samples for name in "abc"] == [4, 4, 2]
    assert group.met_other_timeline == {"a", "b", "c"}
    assert [member.progress.newest_round_seen for member in (first, second, third)] == [7, 7, 0]


async def test_both_that_meet_across_timelines_learn_of_it(group):
    first, second = await group.add("ab", round_number=7)
    second.go_elsewhere(9)
    call = ReadyCall(manifest=MANIFEST.hash, stage=0, round_number=7, timeline=0, attempt=0, counts=())
    with pytest.raises(OtherTimeline):
        await first.transport.call(second.peer_id, call, timeout_s=5.0)
    assert group.met_other_timeline == {"b"}, "who was asked"
    group.met_other_timeline.clear()
    await first.barrier._ask_ready(second.peer_id, first.rounds_of.current, 0, {}, [])
    assert group.met_other_timeline == {"a", "b"}, "and who asks"


async def test_who_has_no_weights_yet_is_on_no_timeline(group, monkeypatch):
    monkeypatch.setattr("swarm_peer.runtime.step.barrier.POLL_S", 0.0)
    first, second = await group.add("ab")
    first.rounds_of.step = replace(first.rounds_of.step, phase=Phase.EMPTY)
    call = ReadyCall(manifest=MANIFEST.hash, stage=0, round_number=3, timeline=8, attempt=0, counts=())
    reply = await second.transport.call(first.peer_id, call, timeout_s=5.0)
    assert reply.body["attempt"] is None
    assert not group.met_other_timeline


async def test_who_goes_back_while_it_is_asked_refuses(group):
    first, second = await group.add("ab")
    call = ReadyCall(manifest=MANIFEST.hash, stage=0, round_number=3, timeline=0, attempt=0, counts=())
    asking = asyncio.ensure_future(second.transport.call(first.peer_id, call, timeout_s=5.0))
    await anyio.wait_all_tasks_blocked()
    first.go_elsewhere(9)
    with pytest.raises(OtherTimeline):
        await asking


async def test_a_stranger_of_another_timeline_is_no_hint(group):
    first, second = await group.add("ab")
    group.unseen.add("b")
    call = ReadyCall(manifest=MANIFEST.hash, stage=0, round_number=3, timeline=8, attempt=0, counts=())
    with pytest.raises(OtherTimeline):
        await second.transport.call(first.peer_id, call, timeout_s=5.0)
    assert not group.met_other_timeline


async def test_rounds_of_another_timeline_are_not_chased(group):
    first, second = await group.add("ab", round_number=7)
    second.go_elsewhere(6)
    assert await second.gossip.greet(0, [first.peer_id]) == 6
    second.go_elsewhere(9)
    assert await first.gossip.greet(0, [second.peer_id]) == 7


@pytest.mark.parametrize(("round_number", "told"), [(3, False), (4, True)])
async def test_at_the_end_of_a_period_members_tell_each_other_what_they_bring(periodic, round_number, told):
    first, second = await periodic.add("ab", round_number)
    first.rounds_of.current.names += [SampleId(0, 1, 0), SampleId(0, 1, 1)]
    second.rounds_of.current.earlier = (WindowRange(0, 1, 2, 3), WindowRange(0, 1, 2, 3))
    settled = await periodic.settle(a=2, b=2)
    if not told:
        assert [settlement.brought for settlement in settled.values()] == [{}, {}]
        return
    assert settled["a"].brought == {
        first.peer_id: first.rounds_of.current.held,
        second.peer_id: (WindowRange(0, 1, 2, 3),),
    }
    assert settled["b"].brought == {
        first.peer_id: (WindowRange(0, 1, 0, 2),),
        second.peer_id: second.rounds_of.current.earlier,  # what it brings twice itself
    }


async def test_who_has_taken_work_over_notes_its_samples_too(periodic):
    first, second = await periodic.add("ab", 4)
    first.rounds_of.current.taken_over = (WindowRange(0, 1, 0, 2),)
    settled = await periodic.settle(a=2, b=2)
    assert (
        settled["a"].brought == settled["b"].brought == {first.peer_id: (WindowRange(0, 1, 0, 2),), second.peer_id: ()}
    )


async def test_where_averaging_has_failed_for_good_one_member_has_brought_all(periodic):
    members = await periodic.add("ab", 4)
    for number, member in enumerate(members):
        member.rounds_of.current.names.append(SampleId(0, number, 0))
    periodic.rounds.script = {(None, None): "fail"}
    settled = await periodic.settle(a=3, b=2)
    assert settled["a"].samples == 3
    assert list(settled["a"].brought) == [members[0].peer_id]


async def test_who_was_given_more_than_a_period_has_says_nothing_of_it(periodic, caplog):
    members = await periodic.add("ab", 4)
    members[0].rounds_of.current.names.append(SampleId(0, 2, 0))
    most = 2 * 5 * MANIFEST.training.global_batch_size
    members[0].rounds_of.current.taken_over = (WindowRange(0, 1, 0, most),)
    settled = await periodic.settle(a=2, b=2)
    assert settled["b"].samples == 4
    assert settled["b"].brought[members[0].peer_id] == (WindowRange(0, 2, 0, 1),), "of its own it does"
    assert f"samples={most + 1} reason=a period has at most {most}" in caplog.text


async def test_who_says_it_brings_more_than_a_period_has_is_left_out(periodic):
    first, liar = await periodic.add("ab", 4)
    liar.rounds_of.current.earlier = (WindowRange(0, 1, 0, 2 * 5 * MANIFEST.training.global_batch_size + 1),)
    liar.barrier.most_brought *= 2
    settling = [first.settle(2), liar.settle(2)]
    settled = await settling[0]
    assert settled.samples == 2
    assert list(settled.brought) == [first.peer_id]
    settling[1].cancel()


async def test_forged_counts_in_a_ready_call_are_refused(group):
    first, second = await group.add("ab")
    counts = ((second.peer_id, b"forged"),)
    call = ReadyCall(manifest=MANIFEST.hash, stage=0, round_number=3, timeline=0, attempt=0, counts=counts)
    with pytest.raises(InvalidMessage):
        await second.transport.call(first.peer_id, call, timeout_s=5.0)
