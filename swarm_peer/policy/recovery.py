"""A stage that has lost all its peers: where the run goes back to, and who takes the stage over."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from swarm_peer.policy.position import MAX_STEP, MAX_STEPS_AHEAD
from swarm_peer.policy.view import PeerState, PeerView, SwarmView

# A run that goes back goes on above the highest step that is claimed: so many have to be left after it.
MIN_STEPS_LEFT = 2**30
# Where nobody is left who knows how far the run has come, it may have been so many snapshots further.
SNAPSHOTS_MISSED = 4


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """Where the present line of updates began: at global step `step`, with weights of `updates` optimizer updates.

    Global steps never go back, so that whatever belongs to a line that was given up is told by its number alone. When
    a run is rewound, it gets a new origin with a higher step and fewer updates.

    Attributes:
        born: the global step that these weights were first there for. Weights of the same number of updates on two
            lines are others, but were born in other steps.
    """

    step: int
    updates: int
    born: int

    def updates_at(self, step: int) -> int:
        return self.updates + step - self.step

    def born_at(self, step: int) -> int:
        """When the weights that `step` begins with were born."""
        return self.born if step == self.step else step

    def is_possible_at(self, step: int) -> bool:
        """Whether a line may have begun here that is in `step` now: each update takes a step of its own."""
        return self.updates <= self.born <= self.step <= step

    def gave_up(self, line: Origin, born: int) -> bool:
        """Whether weights of an earlier line, born then, were given up when the run went on from here."""
        return line < self and born > self.born


FIRST_ORIGIN = Origin(0, 0, 0)


def last_credible_step(steps: Iterable[int]) -> int:
    """The last global step that a peer may be in, by what all serving peers say: their stages make each step together,
    so that half of them would have to lie."""
    known = sorted(steps)
    return min(known[len(known) // 2] + MAX_STEPS_AHEAD, MAX_STEP) if known else MAX_STEP


class Claim(NamedTuple):
    """What a serving peer says of itself: its stage, the global step that it is in, and its line."""

    stage: int
    step: int
    origin: Origin


def credible(claims: Mapping[str, Claim]) -> dict[str, Claim]:
    """Without those that cannot be, and those that half of the others speak against."""
    possible = {peer_id: claim for peer_id, claim in claims.items() if claim.origin.is_possible_at(claim.step)}
    last = min(last_credible_step(claim.step for claim in possible.values()), MAX_STEP - MIN_STEPS_LEFT)
    return {peer_id: claim for peer_id, claim in possible.items() if claim.step <= last}


@dataclass(frozen=True, slots=True)
class Standing:
    """Attributes:
    origin: of the run's line
    step: none of its peers is beyond it
    updates: that it has made
    """

    origin: Origin
    step: int
    updates: int


def find_standing(first: Origin, claims: Collection[Claim]) -> Standing:
    """Where the run is. A minority of liars among the peers of each stage changes neither its line nor its updates.

    A rewind begins with a stage that had lost its peers, so that all who serve it are on the new line. Hence the run's
    line is the newest of those that more than half of some stage's peers have come to.

    Args:
        first: where the run began
        claims: those of its peers that are credible
    """
    stages = sorted({claim.stage for claim in claims})
    lines = [median_low(claim.origin for claim in claims if claim.stage == stage) for stage in stages]
    origin = max([first, *lines])
    steps_by_stage = [
        [claim.step for claim in claims if (claim.stage, claim.origin) == (stage, origin)] for stage in stages
    ]
    reached = max((median_low(steps) for steps in steps_by_stage if steps), default=origin.step)
    # A lie costs some numbers of steps, and a peer that is beyond it would not go back.
    newest = max((claim.step for claim in claims), default=0)
    return Standing(origin, newest, origin.updates_at(reached))


class Kept(NamedTuple):
    """A snapshot that a peer keeps: of which stage, of weights that were born when, after how many updates."""

    stage: int
    born: int
    updates: int


def find_standing_by_snapshots(first: Origin, snapshots: Collection[tuple[Kept, Origin]], interval: int) -> Standing:
    """Where the run was at most, if nobody serves it any more, by the snapshots that are left of it.

    Args:
        snapshots: each with its line
        interval: of updates between them; some may have been missed
    """
    left = [(known, line) for known, line in snapshots if known.born > first.step]
    if not left:
        return Standing(first, first.step, first.updates)
    origin = max(first, *(line for _, line in left))
    newest = max(known.born for known, _ in left) + SNAPSHOTS_MISSED * interval
    return Standing(origin, min(newest, MAX_STEP - MIN_STEPS_LEFT), max(known.updates for known, _ in left))


@dataclass(frozen=True, slots=True)
class Rewind:
    """Attributes:
    updates: how many updates the run keeps; None if there is nothing to go back to
    born: when the weights after them were born
    holders: peers that hold the lost stage's snapshot of it
    """

    updates: int | None
    born: int
    holders: tuple[str, ...]
    reason: str


def choose_rewind(
    kept: Mapping[str, Collection[Kept]], num_stages: int, lost_stage: int, newest: int, from_scratch: int
) -> Rewind:
    """The newest state that the whole run can go back to.

    Args:
        kept: by peer, the snapshots that it holds, of its own stage and of others
        newest: updates that the run has made
        from_scratch: so many updates may be given up to begin anew where no snapshot is left
    """
    holders_by_point: dict[tuple[int, int], dict[int, list[str]]] = {}
    for peer_id in sorted(kept):
        for stage, born, updates in sorted(kept[peer_id]):
            if 0 <= stage < num_stages and updates <= newest:
                holders_by_point.setdefault((updates, born), {}).setdefault(stage, []).append(peer_id)
    for (updates, born), holders in sorted(holders_by_point.items(), reverse=True):
        if len(holders) == num_stages:
            reason = f"all stages' snapshots of {updates} updates exist"
            return Rewind(updates, born, tuple(holders[lost_stage]), reason)
    if newest <= from_scratch:
        return Rewind(0, 0, (), f"the run has made {newest} updates only and begins anew")
    found = "; ".join(
        f"of {updates} updates, stages {', '.join(map(str, sorted(holders)))}"
        for (updates, _), holders in sorted(holders_by_point.items(), reverse=True)[:3]
    )
    return Rewind(
        None,
        0,
        (),
        f"no snapshot of stage {lost_stage} exists that all other stages have too; there are: {found or 'none'}",
    )


@dataclass(frozen=True, slots=True)
class Mover:
    """The peer that moves to a lost stage, or None with the reason."""

    peer_id: str | None
    reason: str


def missed(view: SwarmView, stage: int, unreached: Iterable[PeerView]) -> list[str]:
    """Whom to wait for before a stage without peers is started over, which takes the run back.

    A stage-mate that could not be reached may be there all the same; so may anybody, where nobody else is in sight.

    Args:
        unreached: that have announced themselves of late, could not be reached, and are not in the view for that
    """
    alone = not any(peer.state is PeerState.SERVING for peer in view.peers)
    return sorted(
        peer.peer_id for peer in unreached if peer.state is PeerState.SERVING and (alone or peer.stage == stage)
    )


def choose_mover(view: SwarmView, lost_stage: int, movable: Collection[str], stuck: Collection[str] = ()) -> Mover:
    """Who takes over a stage that nobody serves. All who see the same view choose the same peer.

    From the stage with the most peers, the slowest of those that may move: it is missed least.

    Args:
        stuck: peers that have been joining for so long that nobody waits for them any more
    """
    joining = [
        peer.peer_id
        for peer in view.in_stage(lost_stage)
        if peer.state is PeerState.JOINING and peer.peer_id not in stuck
    ]
    if joining:
        return Mover(None, f"{len(joining)} peers are joining stage {lost_stage}")
    candidates = [
        (-len(view.serving(peer.stage)), peer.samples_per_s, peer.peer_id)
        for peer in view.peers
        if peer.state is PeerState.SERVING and peer.peer_id in movable and len(view.serving(peer.stage)) > 1
    ]
    if not candidates:
        return Mover(None, f"no peer may move to stage {lost_stage}: none is free, or each is the last of its stage")
    num_peers, _, peer_id = min(candidates)
    return Mover(peer_id, f"it is the slowest of the {-num_peers} peers of the fullest stage")
