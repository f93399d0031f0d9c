"""Says in words that a run stands still. The words of peers in it are made fit to be shown here."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_peer.policy.plain_text import plain_text
from swarm_peer.policy.standstill import Standstill
from swarm_peer.policy.trouble import Trouble
from swarm_peer.policy.view import PeerView

MAX_WORDS = 200
# Of each trouble, what the peers in it do not do.
WHAT: dict[Trouble | None, str] = {
    Trouble.NO_VOTERS: "waits for those who vote on who takes part",
    Trouble.NO_STATE: "lacks weights that nobody gives",
    Trouble.DIVERGED: "brings no microbatch through, and no number is finite",
    Trouble.FAILING: "brings no microbatch through",
    Trouble.NO_UPDATES: "gets no update",
    Trouble.NO_DATA: "has nothing to train on",
    None: "has no peer that serves it, and those that join cannot",
}


def in_words(standstill: Standstill) -> str:
    """Why the run stands still, with the newest cause as a peer tells it, on one line; without for how long."""
    peer = standstill.spokesman
    told = plain_text(peer.note, MAX_WORDS).rstrip(".")
    says = f": {who_is(peer)} says: {told}" if told else ""
    return f"stage {standstill.stage} {WHAT[standstill.trouble]}{says}"


def served_by_nobody(stages: Sequence[int]) -> str:
    """That these stages have no peer that serves them."""
    return f"nobody serves stage {', '.join(map(str, stages))}"


def how_long(standstill: Standstill, now_s: float) -> str:
    """For how long the run has stood still, as people say it."""
    seconds = max(0.0, now_s - standstill.since_s)
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def who_is(peer: PeerView) -> str:
    """The peer's name, and the end of its id."""
    return f"{plain_text(peer.name, 32) or 'peer'} (…{peer.peer_id[-8:]})"
