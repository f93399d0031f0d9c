"""Tells what has happened to a run between one look at it and the next. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypedDict

from coordinator.watch.run_watch import RunWatch
from coordinator.watch.standstill_words import in_words, who_is
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.plain_text import plain_text
from swarm_peer.policy.trouble import Trouble
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView

EventKind = Literal[
    "joined",
    "left",
    "died",
    "moved",
    "paused",
    "resumed",
    "stage_empty",
    "stage_served",
    "rewound",
    "stands_still",
    "goes_on",
    "trouble",
    "checkpoint",
    "decay",
    "coordinator",
    "started",
    "ended",
]
# A peer that moves is in no stage for a moment: it has left one, and its announcement in the next is not found yet.
MOVING_S = 10.0
# Peers that are gone and may only have been out of sight.
MAX_GONE = 1024
MAX_TEXT = 400
# While the run stands still, the newest cause is told so often; a peer that comes into trouble again and again, no more
# often either.
TELL_AGAIN_S = 600.0
# In place of a stage, where the run waits for those who vote.
NO_STAGE = -1


class Event(TypedDict):
    """Something that happened: one line of events.jsonl.

    `time` is Unix seconds. `stage` is where it happened (of a move, the new stage), `peer` the peer's id and `name` the
    name that it gives itself; each is null where it does not apply. `text` is one short English sentence.
    """

    time: float
    kind: EventKind
    stage: int | None
    peer: str | None
    name: str | None
    text: str


def make_event(
    kind: EventKind, text: str, now_s: float, *, stage: int | None = None, peer: str | None = None, name: str = ""
) -> Event:
    """An event, with text and name fit to be shown: both may hold words of peers."""
    shown = plain_text(name, 32) or None
    return Event(time=round(now_s, 3), kind=kind, stage=stage, peer=peer, name=shown, text=plain_text(text, MAX_TEXT))


def standing(events: Iterable[Event]) -> list[Event]:
    """The events that still hold at the end: where each peer is, and which stages are empty."""
    whereabouts: dict[str | int, Event] = {}  # by peer, or by stage
    for event in events:
        key = event["stage"] if event["peer"] is None else event["peer"]
        match event["kind"]:
            case "ended":
                whereabouts.clear()
            case "joined" | "moved" | "stage_empty" if event["stage"] is not None and key is not None:
                whereabouts.pop(key, None)
                whereabouts[key] = event
            case "left" | "died" | "stage_served" if key is not None:
                whereabouts.pop(key, None)
    return sorted(whereabouts.values(), key=lambda event: event["time"])


@dataclass(slots=True, kw_only=True)
class _Known:
    """A peer as it was seen last.

    Attributes:
        incarnation: see PeerView; 0 if an earlier process of this coordinator has seen it
        is_leaving: it drained, or said that it has left
        is_paused: by its owner
        missing_since_s: when it was first not seen any more
    """

    stage: int
    name: str
    incarnation: int = 0
    is_leaving: bool = False
    is_paused: bool = False
    missing_since_s: float | None = None


class Happenings:
    """Compares each look at a run with the one before it.

    Args:
        lifetime_s: of an announcement
        begun_s: when the first look is taken, in Unix seconds; after a lifetime all peers that live have been seen
        known: what an earlier process has told of the same run
        optimizer_step: the last one that an earlier process has seen; 0 if there was none
        round_number: the round that made that step; -1 if there was none
        is_revoked: whether the run's operator has revoked a peer
    """

    def __init__(
        self,
        *,
        lifetime_s: float,
        begun_s: float,
        known: Iterable[Event] = (),
        optimizer_step: int = 0,
        round_number: int = -1,
        is_revoked: Callable[[str], bool] = lambda _: False,
    ):
        self._is_revoked = is_revoked
        self._begun_s = begun_s
        self._settled_s = begun_s + lifetime_s
        self._peers: dict[str, _Known] = {}
        self._empty: set[int] = set()
        self._gone: dict[str, int] = {}  # incarnations by peer
        self._assigned: dict[str, tuple[int, str]] = {}  # the new stage and the reason, by peer
        self._term: Term | None = None
        self._optimizer_step, self._round_number = optimizer_step, round_number
        self._num_returns = 0
        self._stands: tuple[int, Trouble | None] | None = None  # in which stage, and why, as it was told last
        self._stands_told_s = 0.0
        self._troubles: dict[str, tuple[Trouble, float]] = {}  # the last one that was told, and when, by peer
        known = list(known)
        self._is_known = bool(known)
        for event in standing(known):
            stage, peer = event["stage"], event["peer"]
            assert stage is not None
            if peer is None:
                self._empty.add(stage)
            else:
                self._peers[peer] = _Known(stage=stage, name=event["name"] or "")
        self._unseen = set(self._peers)  # by this process
        self._served = {known.stage for known in self._peers.values()} - self._empty

    def look(self, watch: RunWatch, now_s: float) -> list[Event]:
        """The events since the last look, in the order in which they are best told."""
        return [
            *self._coordinator(watch, now_s),
            *self._arrivals(watch, now_s),
            *self._departures(watch, now_s),
            *self._stages(watch, now_s),
            *self._rewinds(watch, now_s),
            *self._standstill(watch, now_s),
            *self._trouble(watch, now_s),
        ]

    def _coordinator(self, watch: RunWatch, now_s: float) -> Iterator[Event]:
        if watch.coordination is None:
            return
        term, record = watch.coordination
        for each in record.assignments:
            self._assigned[each.peer] = (each.to_stage, each.reason)
        if term != self._term:
            is_of_before, self._term = self._term is None and self._is_known, term
            if is_of_before:  # an earlier process has told it
                return
            text = f"Coordinator …{term.coordinator[-8:]} directs the run from now on."
            yield make_event("coordinator", text, now_s)

    def _arrivals(self, watch: RunWatch, now_s: float) -> Iterator[Event]:
        for peer in watch.view.peers:
            if peer.stage == UNDECIDED:
                continue
            known = self._peers.get(peer.peer_id)
            self._unseen.discard(peer.peer_id)
            if known is None:
                # An observer comes to a run under way; a peer dates its life by its own clock.
                was_there = not self._is_known and 0 < peer.incarnation < 1000 * self._begun_s
                seen_again = peer.incarnation and self._gone.pop(peer.peer_id, 0) == peer.incarnation
                does = "is seen again in" if seen_again else "is there already, in" if was_there else "joins"
                yield _of_peer("joined", peer, f"{does} stage {peer.stage}.", now_s)
            elif known.stage != peer.stage:
                yield _of_peer("moved", peer, self._move_text(peer, known.stage), now_s)
            elif known.incarnation and peer.incarnation > known.incarnation:
                yield _of_peer("joined", peer, f"begins anew in stage {peer.stage}.", now_s)
            is_paused = peer.state is PeerState.PAUSED
            if is_paused and (known is None or not known.is_paused):
                yield _of_peer("paused", peer, f"of stage {peer.stage} is {peer.note or 'paused by its owner'}.", now_s)
            elif known is not None and known.is_paused and not is_paused:
                yield _of_peer("resumed", peer, f"comes back to stage {peer.stage}.", now_s)
            self._peers[peer.peer_id] = _Known(
                stage=peer.stage,
                name=peer.name,
                incarnation=peer.incarnation,
                is_leaving=peer.state is PeerState.DRAINING,
                is_paused=is_paused,
            )

    def _move_text(self, peer: PeerView, from_stage: int) -> str:
        to_stage, reason = self._assigned.pop(peer.peer_id, (UNDECIDED, ""))
        if to_stage != peer.stage:
            is_rescue = peer.stage in self._empty
            reason = "that stage had lost all its peers" if is_rescue else "by itself, or another coordinator asked"
        return f"moves from stage {from_stage} to stage {peer.stage}: {reason or 'no reason given'}."

    def _departures(self, watch: RunWatch, now_s: float) -> Iterator[Event]:
        seen = {peer.peer_id for peer in watch.view.peers}
        for peer_id in sorted(self._peers.keys() - seen):
            known = self._peers[peer_id]
            known.is_leaving |= peer_id in watch.view.left
            if known.missing_since_s is None:
                known.missing_since_s = now_s
            is_unsettled = peer_id in self._unseen and now_s < self._settled_s
            if is_unsettled or (known.is_leaving and now_s - known.missing_since_s < MOVING_S):
                continue
            del self._peers[peer_id]
            self._unseen.discard(peer_id)
            self._assigned.pop(peer_id, None)
            self._gone[peer_id] = known.incarnation
            while len(self._gone) > MAX_GONE:
                del self._gone[next(iter(self._gone))]
            who = _who(known.name, peer_id)
            if known.is_leaving:
                kind: EventKind = "left"
                text = f"{who} has left stage {known.stage}."
            elif self._is_revoked(peer_id):
                kind = "left"
                text = f"{who} of stage {known.stage} is out: the run's operator has revoked it or its invite."
            else:
                kind = "died"
                text = f"{who} of stage {known.stage} has fallen silent without a goodbye."
            yield make_event(kind, text, now_s, stage=known.stage, peer=peer_id, name=known.name)

    def _stages(self, watch: RunWatch, now_s: float) -> Iterator[Event]:
        for stage in range(watch.view.num_stages):
            num_serving = len(watch.view.serving(stage))
            is_waited_for = any(known.stage == stage and peer in self._unseen for peer, known in self._peers.items())
            if num_serving and stage in self._empty:
                self._empty.discard(stage)
                yield make_event(
                    "stage_served",
                    f"Stage {stage} is served again, by {num_serving} peer{'s' * (num_serving > 1)}.",
                    now_s,
                    stage=stage,
                )
            elif not num_serving and stage in self._served - self._empty and not is_waited_for:
                self._empty.add(stage)
                text = f"Stage {stage} has lost its last serving peer: the run waits for another one."
                yield make_event("stage_empty", text, now_s, stage=stage)
            if num_serving:
                self._served.add(stage)

    def _rewinds(self, watch: RunWatch, now_s: float) -> Iterator[Event]:
        if watch.returns[0] != self._num_returns:
            before, (self._num_returns, self._optimizer_step) = self._optimizer_step, watch.returns
            self._round_number = (watch.created_at_round(self._optimizer_step) or 0) - 1
            text = f"The run goes on without the updates after optimizer step {self._optimizer_step}, of {before}."
            yield make_event("rewound", text, now_s)
        later = [line for line in watch.lines if line["round"] > self._round_number]
        if not later:
            return
        before, begun_from = self._optimizer_step, later[0]["optimizer_step"] - 1
        self._optimizer_step, self._round_number = later[-1]["optimizer_step"], later[-1]["round"]
        if begun_from < before:
            text = f"The run has gone back from optimizer step {before} to {begun_from}, and trains these steps again."
            yield make_event("rewound", text, now_s)

    def _standstill(self, watch: RunWatch, now_s: float) -> Iterator[Event]:
        found = watch.standstill
        if found is None and not watch.waits_for:
            if self._stands is not None and watch.view.peers:
                self._stands = None
                yield make_event("goes_on", "The run goes on.", now_s)
            return
        stands = (NO_STAGE, None) if found is None else (found.stage, found.trouble)
        if stands != self._stands or abs(now_s - self._stands_told_s) > TELL_AGAIN_S:  # the clock may be set back
            self._stands, self._stands_told_s = stands, now_s
            if found is not None:
                yield make_event("stands_still", f"The run stands still: {in_words(found)}.", now_s, stage=found.stage)
            else:
                yield make_event("stands_still", f"The run waits: {watch.waits_for}.", now_s)

    def _trouble(self, watch: RunWatch, now_s: float) -> Iterator[Event]:
        """Tell of peers in trouble, but for those that the run stands still for, which has been told."""
        in_trouble = set[str]()
        for peer in watch.troubled:
            in_trouble.add(peer.peer_id)
            told, told_s = self._troubles.get(peer.peer_id, (None, 0.0))
            is_told = told is peer.trouble or (told is not None and abs(now_s - told_s) < TELL_AGAIN_S)
            is_of_standstill = watch.standstill is not None and watch.standstill.stage == peer.stage
            if peer.trouble is None or is_told or is_of_standstill:
                continue
            self._troubles[peer.peer_id] = peer.trouble, now_s
            text = f"{who_is(peer)} of stage {peer.stage} is in trouble: {peer.note}."
            yield make_event("trouble", text, now_s, stage=peer.stage, peer=peer.peer_id, name=peer.name)
        self._troubles = {
            peer_id: known
            for peer_id, known in self._troubles.items()
            if peer_id in in_trouble or abs(now_s - known[1]) < TELL_AGAIN_S
        }


def _who(name: str, peer_id: str) -> str:
    return f"{name or 'Peer'} (…{peer_id[-8:]})"


def _of_peer(kind: EventKind, peer: PeerView, does: str, now_s: float) -> Event:
    text = f"{_who(peer.name, peer.peer_id)} {does}"
    return make_event(kind, text, now_s, stage=peer.stage, peer=peer.peer_id, name=peer.name)
