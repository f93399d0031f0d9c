"""Recovery of a stage without peers: to which state the run rewinds, and which peer takes the stage over."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median_low
from typing import NamedTuple

from swarm_peer.policy.run_progress import MAX_ROUND, MAX_ROUNDS_AHEAD
from swarm_peer.policy.view import PeerState, PeerView, SwarmView

# After a rewind the run goes on above the highest round that any peer claims. At least this many must remain.
MIN_ROUNDS_LEFT = 2**30
# Claims are believed up to a later round: else the peers of a run that a lie has brought there would not be.
_LAST_BELIEVED = MAX_ROUND - MIN_ROUNDS_LEFT // 2
# A new timeline begins up to so many rounds later than it has to.
TIMELINE_OFFSETS = 64
# If no peer is left that knows how far the run has come, it may have been this many snapshots further than the newest.
SNAPSHOTS_MISSED = 4
# Snapshots of each stage that a peer keeps: another may still be downloading the one before the newest.
SNAPSHOTS_KEPT = 2
# Snapshots that one peer lists: who gives a checkpoint keeps one of each stage, and a run has up to 256.
MOST_LISTED = 512


@dataclass(frozen=True, slots=True, order=True)
class Timeline:
    """An unbroken line of updates, by where it began.

    Rounds never go back, so the number of a round tells which timeline it belongs to. A rewind begins a new timeline
    with a higher first round and a lower optimizer step. A newer timeline compares as greater.

    Attributes:
        first_round: the round that the timeline began with
        first_optimizer_step: the optimizer step of the weights that it began with
        created_at_round: the first round that ever began with those weights. Weights of the same optimizer step on two
            timelines differ in it.
    """

    first_round: int
    first_optimizer_step: int
    created_at_round: int

    def optimizer_step_at(self, round_number: int) -> int:
        """The optimizer step of the weights that the round begins with."""
        return self.first_optimizer_step + round_number - self.first_round

    def creation_round(self, round_number: int) -> int:
        """The first round that ever began with the weights that `round_number` begins with."""
        return self.created_at_round if round_number == self.first_round else round_number

    def allows_round(self, round_number: int) -> bool:
        """Whether a peer on this timeline can be in the round: each update takes a round of its own."""
        return self.first_optimizer_step <= self.created_at_round <= self.first_round <= round_number

    def discarded(self, earlier: Timeline, created_at_round: int) -> bool:
        """Whether this timeline, when it began, gave up the weights that an earlier one had created in that round."""
        return earlier < self and created_at_round > self.created_at_round


FIRST_TIMELINE = Timeline(0, 0, 0)


def last_credible_round(rounds: Iterable[int]) -> int:
    """The last round that a peer can be in, judged by the rounds of all serving peers.

    All stages go through each round together, so half of the peers would have to lie to change the result.
    """
    known = sorted(rounds)
    return min(known[len(known) // 2] + MAX_ROUNDS_AHEAD, MAX_ROUND) if known else MAX_ROUND


class Claim(NamedTuple):
    """The stage, round and timeline that a serving peer claims to be in."""

    stage: int
    round_number: int
    timeline: Timeline


def credible(claims: Mapping[str, Claim]) -> dict[str, Claim]:
    """The claims that are possible, and that no more than half of the others contradict."""
    possible = {peer_id: claim for peer_id, claim in claims.items() if claim.timeline.allows_round(claim.round_number)}
    last = min(last_credible_round(claim.round_number for claim in possible.values()), _LAST_BELIEVED)
    return {peer_id: claim for peer_id, claim in possible.items() if claim.round_number <= last}


@dataclass(frozen=True, slots=True)
class Standing:
    """How far the run has come.

    Attributes:
        timeline: the run's newest timeline
        round_number: the highest round that any peer has reached
        optimizer_step: that of the run's weights
    """

    timeline: Timeline
    round_number: int
    optimizer_step: int


def find_standing(first: Timeline, claims: Collection[Claim]) -> Standing:
    """How far the run has come, by its peers' claims.

    A rewind begins with a stage that had lost all its peers, so every peer of that stage is on the new timeline. Hence
    the run's timeline is the newest one that more than half of some stage's peers have reached. A lying minority in
    each stage changes neither the timeline nor the optimizer step.

    Args:
        first: the run's first timeline
        claims: the credible claims of its peers
    """
    stages = sorted({claim.stage for claim in claims})
    timelines = [median_low(claim.timeline for claim in claims if claim.stage == stage) for stage in stages]
    timeline = max([first, *timelines])
    rounds_by_stage = [
        [claim.round_number for claim in claims if (claim.stage, claim.timeline) == (stage, timeline)]
        for stage in stages
    ]
    reached = max((median_low(rounds) for rounds in rounds_by_stage if rounds), default=timeline.first_round)
    # Take the highest claim, since a peer in a later round would not follow a rewind. A lie wastes round numbers only.
    newest = max((claim.round_number for claim in claims), default=0)
    return Standing(timeline, newest, timeline.optimizer_step_at(reached))


def find_viable_standing(first: Timeline, claims: Collection[Claim], all_claims: Collection[Claim]) -> Standing:
    """Like `find_standing`, but of the timelines that all stages can come to.

    After a cut, a timeline may have begun in a round that some stage has passed. Its own peers leave it sooner or
    later, so nobody goes to it.

    Args:
        first: the run's first timeline
        claims: the credible ones
        all_claims: and the others: peers that were cut off may be far from most others
    """
    standing = find_standing(first, claims)
    newest = standing.round_number
    # The run may have been resumed from a checkpoint while most of its peers were out of the operator's sight.
    while standing.timeline > FIRST_TIMELINE and find_overtaking(standing.timeline, all_claims) is not None:
        standing = find_standing(FIRST_TIMELINE, [c for c in all_claims if c.timeline < standing.timeline])
    # Claims that are not credible may count here, too, and peers may lie.
    return replace(standing, round_number=max(newest, min(standing.round_number, MAX_ROUND - MIN_ROUNDS_LEFT)))


def find_overtaking(timeline: Timeline, claims: Collection[Claim]) -> int | None:
    """A stage that cannot go back to a timeline, since its peers have passed the round in which that began.

    They were out of reach of the peer that began the timeline, and computed on. The peers on the timeline wait for them
    in vain. More than half of the stage's peers have to claim it.

    Args:
        claims: credible or not: peers that were cut off may be far from most others
    """
    for stage in sorted({claim.stage for claim in claims}):
        here = [claim for claim in claims if claim.stage == stage and claim.timeline.allows_round(claim.round_number)]
        passed = [claim for claim in here if claim.timeline < timeline and claim.round_number >= timeline.first_round]
        if 2 * len(passed) > len(here):
            return stage
    return None


def may_be_followed(timeline: Timeline, claims: Collection[Claim]) -> bool:
    """Whether at least half of some stage's peers can still go back to a timeline: they are before its first round."""
    for stage in {claim.stage for claim in claims}:
        here = [claim for claim in claims if claim.stage == stage]
        behind = [claim for claim in here if claim.timeline < timeline and claim.round_number < timeline.first_round]
        if 2 * len(behind) >= len(here):
            return True
    return False


class SnapshotRef(NamedTuple):
    """Names a snapshot that a peer holds: its stage, the first round with its weights, and their optimizer step."""

    stage: int
    created_at_round: int
    optimizer_step: int


def find_standing_by_snapshots(
    first: Timeline,
    snapshots: Collection[tuple[SnapshotRef, Timeline]],
    interval: int,
    round_seen: int = 0,
    optimizer_step_seen: int = 0,
) -> Standing:
    """How far the run can have come, by the snapshots that are left, if no peer serves any stage.

    Args:
        snapshots: each with its timeline
        interval: optimizer steps between snapshots; some snapshots may have been missed
        round_seen, optimizer_step_seen: of a peer that has served; it may have died, or be out of reach
    """
    timeline, newest, optimizer_step = first, first.first_round, first.first_optimizer_step
    if left := [(known, timeline) for known, timeline in snapshots if known.created_at_round > first.first_round]:
        timeline = max(first, *(timeline for _, timeline in left))
        newest = max(known.created_at_round for known, _ in left) + SNAPSHOTS_MISSED * interval
        optimizer_step = max(known.optimizer_step for known, _ in left)
    newest, optimizer_step = max(newest, round_seen), max(optimizer_step, optimizer_step_seen)
    return Standing(timeline, min(newest, MAX_ROUND - MIN_ROUNDS_LEFT), optimizer_step)


def timeline_offset(state: SnapshotRef, serving: Collection[str]) -> int:
    """By how many rounds a new timeline begins later, so that no other one is likely to begin in the same round.

    Microbatches name a timeline by that round. While the run is cut in two, both parts may lose a stage; or two stages
    are lost at once. Rivals for the same stage know the same peers, and find the same timeline, unless one has found
    another state to begin with: what there is may change while the first one downloads.

    Args:
        state: that the lost stage begins with
        serving: the peers that serve the others; if there are none, all that begin with snapshots of the same weights
            have to find the same timeline
    """
    place = (state.stage, min(serving)) if serving else ()
    named = repr((*place, state.created_at_round, state.optimizer_step))
    return int(hashlib.sha256(named.encode()).hexdigest(), 16) % TIMELINE_OFFSETS


@dataclass(frozen=True, slots=True)
class Rewind:
    """The state that the run rewinds to.

    Attributes:
        optimizer_step: that of the state's weights; None if there is no state to rewind to
        created_at_round: the first round that ever began with these weights
        holders: peers that hold the lost stage's snapshot of this state
    """

    optimizer_step: int | None
    created_at_round: int
    holders: tuple[str, ...]
    reason: str


def choose_rewind(
    snapshots: Mapping[str, Collection[SnapshotRef]], num_stages: int, lost_stage: int, newest: int, from_scratch: int
) -> Rewind:
    """The newest state of which peers hold snapshots of all stages.

    Args:
        snapshots: the snapshots that each peer holds, of its own stage and of others, by peer id
        newest: the run's optimizer step
        from_scratch: without such a state, begin anew if the run has made at most this many optimizer steps
    """
    holders_by_point: dict[tuple[int, int], dict[int, list[str]]] = {}
    for peer_id in sorted(snapshots):
        for stage, created_at_round, optimizer_step in sorted(snapshots[peer_id]):
            if 0 <= stage < num_stages and optimizer_step <= newest:
                holders = holders_by_point.setdefault((optimizer_step, created_at_round), {})
                holders.setdefault(stage, []).append(peer_id)
    for (optimizer_step, created_at_round), holders in sorted(holders_by_point.items(), reverse=True):
        if len(holders) == num_stages:
            reason = f"all stages' snapshots of {optimizer_step} updates exist"
            return Rewind(optimizer_step, created_at_round, tuple(holders[lost_stage]), reason)
    if newest <= from_scratch:
        return Rewind(0, 0, (), f"the run has made {newest} updates only and begins anew")
    found = "; ".join(
        f"of {optimizer_step} updates, stages {', '.join(map(str, sorted(holders)))}"
        for (optimizer_step, _), holders in sorted(holders_by_point.items(), reverse=True)[:3]
    )
    reason = f"no snapshot of stage {lost_stage} exists that all other stages have too; there are: {found or 'none'}"
    return Rewind(None, 0, (), reason)


def checkpoints_beyond(
    checkpoints: Mapping[str, Collection[SnapshotRef]],
    optimizer_step: int,
    reached: tuple[int, int],
    passed_over: Collection[SnapshotRef],
) -> dict[str, list[SnapshotRef]]:
    """The checkpoints that the run has come to, by word of the run key, and the peers that are left have not.

    All peers that had come further may be gone, and the others were cut off from them.

    Args:
        checkpoints: those that each coordinator gives
        optimizer_step: the furthest of the peers
        reached: the latest round that a coordinator has seen the run in, and its optimizer step
        passed_over: those that nobody has given for a while
    """
    last_round, last_step = reached

    def is_beyond(known: SnapshotRef) -> bool:
        is_reached = known.created_at_round <= last_round and known.optimizer_step <= last_step
        return is_reached and known.optimizer_step > optimizer_step and known not in passed_over

    return {peer: list(filter(is_beyond, held)) for peer, held in checkpoints.items()}


@dataclass(frozen=True, slots=True)
class ChosenMover:
    """The peer that moves to a lost stage, or None with the reason."""

    peer_id: str | None
    reason: str


def missed(view: SwarmView, stage: int, unreached: Iterable[PeerView]) -> list[str]:
    """The peers to wait for before the run is rewound for a stage without peers.

    A stage-mate that could not be reached may still be serving. If no serving peer is in the view at all, this holds
    for the peers of every stage.

    Args:
        unreached: peers with a recent announcement that could not be reached, and are not in the view for that reason
    """
    alone = not any(peer.state is PeerState.SERVING for peer in view.peers)
    return sorted(
        peer.peer_id for peer in unreached if peer.state is PeerState.SERVING and (alone or peer.stage == stage)
    )


def choose_mover(
    view: SwarmView, lost_stage: int, movable: Collection[str], stuck: Collection[str] = ()
) -> ChosenMover:
    """The peer that takes over a stage without serving peers. All peers with the same view choose the same one.

    It is the slowest movable peer of the stage with the most peers, since that stage misses it least.

    Args:
        movable: peers that may move
        stuck: peers that have been joining for too long to wait for them
    """
    joining = [
        peer.peer_id
        for peer in view.in_stage(lost_stage)
        if peer.state is PeerState.JOINING and peer.peer_id not in stuck
    ]
    if joining:
        return ChosenMover(None, f"{len(joining)} peers are joining stage {lost_stage}")
    candidates = [
        (-len(view.serving(peer.stage)), peer.samples_per_s, peer.peer_id)
        for peer in view.peers
        if peer.state is PeerState.SERVING and peer.peer_id in movable and len(view.serving(peer.stage)) > 1
        if lost_stage not in peer.too_large
    ]
    if not candidates:
        reason = f"no peer may move to stage {lost_stage}: none is free, or each is the last of its stage"
        return ChosenMover(None, reason)
    num_peers, _, peer_id = min(candidates)
    return ChosenMover(peer_id, f"it is the slowest of the {-num_peers} peers of the fullest stage")
