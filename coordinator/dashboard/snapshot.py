"""Makes the state of the page of a run as it is seen now. Pure: time is an argument.

The page shows what this returns as text, so whatever comes from peers is made fit for that here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, cast

from coordinator.watch.contributions import Given
from coordinator.watch.happenings import Event
from coordinator.watch.metrics_file import MetricsLine
from coordinator.watch.reached import how_reached, neighbours_of
from coordinator.watch.run_watch import RunWatch
from coordinator.watch.standstill_words import how_long, in_words
from coordinator.watch.what_is_trained import training_line
from swarm_peer.policy.plain_text import plain_text
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView, SwarmView

# Optimizer steps whose mean length tells how long the others will take.
ETA_STEPS = 20
# A stage counts as the bottleneck if it is slower than the next one by so much; speeds wander by some percent.
BOTTLENECK_GAP = 0.05
# In percent of its time: a serving peer that waits for so much of it is told why.
MUCH_WAITING = 50
MAX_CONTRIBUTORS = 200
MAX_PEERS = 1000


@dataclass(frozen=True, kw_only=True)
class Background:
    """All else that is known of a run, beside what is seen now.

    Attributes:
        given: what each peer has given, by id
        labels: of the invite by which each peer came, as far as it is known
        gone: peers that were seen lately and are not any more
        begun_s: Unix seconds at which the run began; None if not known
        join: the line with which a machine joins; empty if it is not for those who look
        ended: why the run is over; empty if it is not
    """

    given: Mapping[str, Given]
    labels: Mapping[str, str]
    gone: Sequence[PeerView] = ()
    begun_s: float | None = None
    join: str = ""
    ended: str = ""


def make_snapshot(watch: RunWatch, known: Background, unix_s: float) -> dict[str, Any]:
    """The whole state but for journal and curves, in JSON's types; a key is missing where nothing is known.

    Args:
        unix_s: now
    """
    supply = _supply(watch)
    state: dict[str, Any] = {
        "now": round(unix_s),
        "run": _run(watch, known, unix_s),
        "stages": {str(stage): _stage(watch, stage, supply) for stage in range(watch.view.num_stages)},
        "peers": _peers(watch, known, unix_s),
        "contributions": _contributions(known),
    }
    if watch.coordination is not None:
        term, record = watch.coordination
        state["decision"] = {
            "coordinator": f"…{term.coordinator[-8:]}",
            "term": term.number,
            "reason": plain_text(record.reason, 300),
            "moves": {
                move.peer: [move.from_stage, move.to_stage, plain_text(move.reason, 300)] for move in record.assignments
            },
        }
    if known.join:
        state["join"] = known.join
    return state


def _run(watch: RunWatch, known: Background, unix_s: float) -> dict[str, Any]:
    manifest, line, step = watch.manifest, watch.last_line, watch.shown_step
    training = manifest.training
    run: dict[str, Any] = {
        "name": plain_text(manifest.name, 80),
        "trains": training_line(manifest),
        "step": step,
        "steps": watch.last_step,
        "batch_samples": watch.current_samples,
        "batch_size": training.global_batch_size,
        "sample_tokens": manifest.data.sequence_length,
        "tokens": step * training.global_batch_size * manifest.data.sequence_length,
        "peers": len(watch.view.peers),
        "state": _run_state(watch, known),
    }
    if line is not None:
        run |= {"loss": round(line["loss"], 4), "tokens_per_s": round(line["tokens_per_s"])}
        seconds = mean(each["seconds"] for each in watch.lines[-ETA_STEPS:])
        run["step_s"] = round(seconds, 2)
        if run["state"] == "training":
            run["eta_s"] = round(seconds * (watch.last_step - step))
        if busy := [share for share in _busy_shares(line) if share is not None]:
            run["busy"] = round(mean(busy), 2)
    if watch.target_share is not None:
        run["batch_targets"] = round(watch.target_share * training.global_batch_size * manifest.data.sequence_length)
    if watch.validation_loss is not None:
        run["validation_loss"] = round(watch.validation_loss, 4)
    if known.begun_s is not None:
        run["age_s"] = max(0, round(unix_s - known.begun_s, -1))
    if (found := watch.standstill) is not None and not known.ended:
        run["standstill"] = f"for {how_long(found, watch.seen_s)}: {in_words(found)}"
    elif watch.waits_for and not known.ended:
        run["standstill"] = f"waiting: {watch.waits_for}"
    if known.ended:
        run["ended"] = plain_text(known.ended, 300)
    return run


def _busy_shares(line: MetricsLine) -> list[float | None]:
    """The share of its time that the devices of each stage computed, where peers tell it."""
    return list(cast(Mapping[str, Any], line).get("busy_share") or ())


def _run_state(watch: RunWatch, known: Background) -> str:
    if known.ended:
        return "ended"
    if watch.optimizer_step >= watch.last_step:
        return "done"
    if not watch.view.peers:
        return "no peers"
    if watch.view.fewest_serving() == 0:
        return "waiting"
    if watch.standstill is not None or watch.waits_for:
        return "standing"
    return "training" if watch.last_line or watch.current_samples else "starting"


def _supply(watch: RunWatch) -> list[float]:
    """Tokens per second that the peers of each stage announce; 0 where nothing is measured yet."""
    length = watch.manifest.data.sequence_length
    return [
        sum(peer.samples_per_s for peer in watch.view.serving(stage)) * length for stage in range(watch.view.num_stages)
    ]


def _stage(watch: RunWatch, stage: int, supply: Sequence[float]) -> dict[str, Any]:
    peers, num_serving = watch.view.in_stage(stage), len(watch.view.serving(stage))
    is_slowest = num_serving > 0 and 0 < supply[stage] == min(supply)
    others = [each for number, each in enumerate(supply) if number != stage]
    is_bottleneck = is_slowest and bool(others) and supply[stage] < (1 - BOTTLENECK_GAP) * min(others)
    row = {
        "serving": num_serving,
        "joining": sum(peer.state is PeerState.JOINING for peer in peers),
        "draining": sum(peer.state is PeerState.DRAINING for peer in peers),
        "paused": sum(peer.state is PeerState.PAUSED for peer in peers),
        "supply": _three_digits(supply[stage]),
        "queue": sum(peer.queue for peer in peers),
        "is_empty": num_serving == 0,
        "is_bottleneck": is_bottleneck,
        "limit": _limit(watch, stage, supply, is_bottleneck),
    }
    if num_serving and (shares := watch.view.mean_time_shares(stage)):
        row |= {"busy": round(100 * shares[0]), "waits": round(100 * (1 - sum(shares)))}
    return row


def _limit(watch: RunWatch, stage: int, supply: Sequence[float], is_bottleneck: bool) -> str:
    """Why the stage does or does not hold up the run, in words."""
    if not watch.view.serving(stage):
        here = [peer for peer in watch.view.in_stage(stage) if peer.state is not PeerState.PAUSED]
        if waiting := [peer for peer in here if peer.note]:
            who = plain_text(waiting[0].name, 32) or "a peer"
            return f"no peer serves it; {who} is joining: {plain_text(waiting[0].note, 200)}"
        if here:
            return "no peer serves it yet; one is joining"
        if paused := watch.view.in_stage(stage):
            return (
                f"no peer serves it; {plain_text(paused[0].name, 32) or 'a peer'} is {plain_text(paused[0].note, 200)}"
            )
        return "no peer serves it: the run waits until a new peer comes, or another stage's peer moves here"
    if emptied := _emptied(watch.view):
        return f"waits for {emptied}"
    if supply[stage] == 0:
        return "speed not measured yet"
    if is_bottleneck:
        return "the slowest stage: one more peer helps most here"
    if min(supply) == 0:
        return ""
    spare = supply[stage] / min(supply) - 1
    return "no slower than the others" if spare < BOTTLENECK_GAP else f"{spare:.0%} faster than the slowest stage"


def _emptied(view: SwarmView) -> str:
    """The first stage that no peer serves, as people call it; empty if there is none."""
    return next((f"stage {stage}" for stage in view.empty_stages()), "")


def _peers(watch: RunWatch, known: Background, unix_s: float) -> dict[str, Any]:
    length = watch.manifest.data.sequence_length
    total = sum(given.samples for given in known.given.values())
    here = {peer.peer_id for peer in watch.view.peers}
    gone = [peer for peer in known.gone if peer.peer_id not in here]
    rows = [(peer, peer.state.value) for peer in watch.view.peers] + [(peer, "gone") for peer in gone]
    shown = {peer.peer_id: _peer(peer, state, known, (length, total, unix_s)) for peer, state in rows[:MAX_PEERS]}
    for peer, _ in rows[:MAX_PEERS]:
        if reached := how_reached(peer, watch):
            shown[peer.peer_id]["reached"] = reached
        if lines := neighbours_of(peer, watch):
            shown[peer.peer_id]["neighbours"] = lines
    supply, emptied = _supply(watch), _emptied(watch.view)
    slowest = supply.index(min(supply))
    for peer, state in rows[:MAX_PEERS]:
        if why := _why(peer, state, slowest, emptied):
            shown[peer.peer_id]["why"] = why
    return shown


def _why(peer: PeerView, state: str, slowest: int, emptied: str) -> str:
    """Why a peer computes nothing, or little, as far as one sees from outside; its note has its own words."""
    if state == "gone":
        return "is not heard any more"
    if peer.stage == UNDECIDED:
        return "chooses its stage"
    if peer.state is PeerState.PAUSED:  # its note says until when
        return "" if peer.note else "is paused by its owner"
    if peer.state is PeerState.JOINING:
        return "" if peer.note else "gets the weights of its stage"
    if peer.state is PeerState.DRAINING:
        return "finishes what it has begun, and leaves its stage"
    if emptied:
        return f"waits: no peer serves {emptied}"
    if peer.trouble is not None:  # its note says which
        return ""
    if peer.time_shares is None or peer.time_shares.waiting < MUCH_WAITING:
        return ""
    return "mostly waits: " + ("few samples come" if slowest == peer.stage else f"stage {slowest} is slower")


def _peer(peer: PeerView, state: str, known: Background, context: tuple[int, float, float]) -> dict[str, Any]:
    length, total, unix_s = context
    given = known.given.get(peer.peer_id)
    begun_s = peer.incarnation / 1000
    row: dict[str, Any] = {
        "name": plain_text(peer.name, 32),
        "stage": peer.stage,
        "state": state,
        "note": plain_text(peer.note, 200),
        "device": plain_text(peer.device, 64),
        "version": plain_text(peer.version, 32),
        "speed": _three_digits(peer.samples_per_s * length),
        "queue": peer.queue,
        "step": peer.optimizer_step,
    }
    if peer.time_shares is not None:
        row["busy"], row["waits"] = (_fives(share) for share in (peer.time_shares.computing, peer.time_shares.waiting))
    if label := known.labels.get(peer.peer_id):
        row["label"] = plain_text(label, 64)
    if given is not None:
        row |= {
            "samples": round(given.samples),
            "share": round(100 * given.samples / total, 1) if total else 0,
            "moves": given.moves,
            # A peer dates its own life; nobody else knows when it began.
            "since": round(begun_s if 0 < begun_s <= unix_s else given.since_s),
        }
    return row


def _contributions(known: Background) -> dict[str, Any]:
    """Sums by the invite's label, or else by the name that peers give themselves; the largest ones."""
    sums: dict[str, dict[str, Any]] = {}
    total = sum(given.samples for given in known.given.values())
    for peer_id, given in known.given.items():
        label = known.labels.get(peer_id)
        who = plain_text(label or given.name, 64)
        by = "id" if not who else "invite" if label else "name"
        who = who or f"…{peer_id[-8:]}"
        row = sums.setdefault(
            f"{by} {who}",
            {"who": who, "by": by, "samples": 0.0, "hours": 0.0, "peers": 0},
        )
        row["samples"] += given.samples
        row["hours"] += given.served_s / 3600
        row["peers"] += 1
    largest = sorted(sums.items(), key=lambda entry: -entry[1]["samples"])[:MAX_CONTRIBUTORS]
    return {
        key: row
        | {
            "samples": round(row["samples"]),
            "hours": round(row["hours"], 1),
            "share": round(100 * row["samples"] / total, 1) if total else 0,
        }
        for key, row in largest
    }


def events_by_number(events: Sequence[Event], num_events: int) -> dict[str, Any]:
    """The newest events, by their number, for the timeline."""
    first = num_events - len(events)
    return {
        str(first + at): {key: value for key, value in event.items() if value is not None}
        for at, event in enumerate(events)
    }


def _fives(percent: int) -> int:
    """A share without the percents that change all the time."""
    return 5 * round(percent / 5)


def _three_digits(value: float) -> float:
    """A speed without the digits that change all the time."""
    return float(f"{value:.3g}")
