"""Whether a run stands still, and for what reason, by what its peers announce. Pure: time is an argument.

Peers say what keeps them from their work (trouble.py). A run is slow where its machines are, so a long time without an
optimizer step alone says nothing: some peer has to say that it is in trouble, and none that it works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm_peer.policy.placement.capacity import JOINING_PATIENCE_S
from swarm_peer.policy.trouble import Trouble
from swarm_peer.policy.view import PeerState, PeerView, SwarmView

# Peers in trouble have been in it for so long before the run counts as standing still. A peer learns within
# `limits.hop_timeout_s`, a minute, that a microbatch fails, and its next announcement takes some ten seconds: together
# these stay below two minutes.
STANDS_S = 40.0
# The weights of stages do not change while no microbatch comes through, so waiting longer would tell nothing new.
DIVERGED_S = 20.0
# Where updates alone are left out, other samples may still make finite gradients.
NO_UPDATES_S = 120.0


@dataclass(frozen=True, slots=True)
class Standstill:
    """That a run stands still.

    Attributes:
        trouble: None where a stage has no peer that serves, and those that it has are joining
        since_s: when the first of the peers in trouble came into it
        stage: of these peers
        num_peers: how many they are
        spokesman: the one of them that has announced itself last; its note says why
    """

    trouble: Trouble | None
    since_s: float
    stage: int
    num_peers: int
    spokesman: PeerView

    @property
    def kind(self) -> str:
        """The trouble as a word, for programs that read it."""
        return "joining" if self.trouble is None else self.trouble.value


def find_standstill(view: SwarmView, now_s: float, progressed_s: float | None = None) -> Standstill | None:
    """Why a run stands still; None if it does not, as far as one can see.

    Args:
        now_s: on the clock of the view
        progressed_s: when a sample or a step was last seen to count; None for who looks once and cannot know
    """
    if empty := view.empty_stages():
        return next(filter(None, (_joining(view, stage, now_s) for stage in empty)), None)
    rests = progressed_s is not None and now_s - progressed_s >= STANDS_S
    found = [each for stage in range(view.num_stages) if (each := _of_stage(view, stage, now_s, rests=rests))]
    order = list(Trouble)
    return min(found, key=lambda each: order.index(each.trouble or order[-1]), default=None)


def find_divergence(view: SwarmView, now_s: float, progressed_s: float) -> Standstill | None:
    """That a run's weights are broken, by word of all peers that have to know it; None if any says otherwise.

    That ends a run. So one peer that lies must not bring it about where there are others: every serving peer of stage 0
    has to say that no microbatch of its own comes through, and no sample may count meanwhile. Or every serving peer of
    a stage has to say that it gets no update; stage-mates agree on each of these.

    Args:
        now_s, progressed_s: see find_standstill
    """
    if view.empty_stages():
        return None
    if now_s - progressed_s >= DIVERGED_S and _all_are(view, 0, Trouble.DIVERGED, now_s - DIVERGED_S):
        return _standstill(0, view.serving(0))
    for stage in range(view.num_stages):
        if _all_are(view, stage, Trouble.NO_UPDATES, now_s - NO_UPDATES_S):
            return _standstill(stage, view.serving(stage))
    return None


def find_troubled(view: SwarmView, now_s: float) -> list[PeerView]:
    """The peers that have been in trouble for long enough to be told of, whether or not the run stands still."""
    serving = [peer for peer in view.peers if peer.state is PeerState.SERVING]
    troubled = [peer for peer in serving if peer.trouble is not None]
    return [peer for peer in troubled if not _holds_up(peer) or _began_s(peer) <= now_s - STANDS_S]


def _all_are(view: SwarmView, stage: int, trouble: Trouble, since_s: float) -> bool:
    return all(peer.trouble is trouble and _began_s(peer) <= since_s for peer in view.serving(stage))


def _of_stage(view: SwarmView, stage: int, now_s: float, *, rests: bool) -> Standstill | None:
    """Whether peers of one stage hold up the run.

    Args:
        rests: whether no sample and no step has counted for a while
    """
    serving = view.serving(stage)
    stuck = [peer for peer in serving if _holds_up(peer)]
    if not any(_began_s(peer) <= now_s - STANDS_S for peer in stuck):
        return None
    others = [peer for peer in serving if peer not in stuck]
    # Stage 0 alone launches microbatches, and a peer there that holds some may still bring them through. One that holds
    # none may be between two of them.
    waits_for_others = any(peer.queue for peer in others) and stage == 0
    if others and (waits_for_others or not rests):
        return None
    return _standstill(stage, stuck)


def _joining(view: SwarmView, stage: int, now_s: float) -> Standstill | None:
    """Whether the peers of a stage that nobody serves join in vain."""
    joining = [peer for peer in view.in_stage(stage) if peer.state is PeerState.JOINING and peer.since_s is not None]
    if not joining or any(now_s - _joins_since_s(peer) < _patience_s(peer) for peer in joining):
        return None
    spokesman = max(joining, key=lambda peer: (bool(peer.note), peer.announced))
    return Standstill(None, min(map(_joins_since_s, joining)), stage, len(joining), spokesman)


def _joins_since_s(peer: PeerView) -> float:
    return peer.since_s or 0.0


def _patience_s(peer: PeerView) -> float:
    """A peer that joins without saying what it waits for downloads a state."""
    return STANDS_S if peer.note else JOINING_PATIENCE_S


def _standstill(stage: int, stuck: Sequence[PeerView]) -> Standstill:
    spokesman = max(stuck, key=lambda peer: peer.announced)
    return Standstill(spokesman.trouble, min(map(_began_s, stuck)), stage, len(stuck), spokesman)


def _holds_up(peer: PeerView) -> bool:
    return peer.trouble is not None and peer.trouble.holds_up


def _began_s(peer: PeerView) -> float:
    assert peer.trouble_since_s is not None, "a peer in trouble says since when"
    return peer.trouble_since_s
