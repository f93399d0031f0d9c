"""What happens to a swarm, as it follows from a seed: its shape, and its faults with their times."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from faults import KINDS
from liars import HONEST, LIES

# Faults begin when the swarm has begun to train, or when it has kept a snapshot or some, and so long they go on; in a
# share of the schedules, longer.
FIRST_S = (12.0, 30.0, 45.0)
FAULTS_S = 60.0
LONG_SHARE, LONG_S = 0.125, 150.0
# A kind that a seed names (97+lag) is drawn so many times as often as else.
OFTEN = 12.0
# Where stages are lost (`lost`), a kind is drawn so many times as often as elsewhere.
WHERE_STAGES_ARE_LOST = {
    "empty_stage": 16.0,
    "stall_stage": 4.0,
    "partition": 2.0,
    "cut_link": 2.0,
    "slow": 3.0,
    "join": 2.0,
    "garbage": 0.0,
    "revoke": 0.0,
    "end_run": 0.0,
}

# Where one member lies (`liar`): kinds that leave the others of its stage a majority of tickets, and how long they go
# on. A leader that is mute costs its stage a minute and a half of that.
BESIDE_A_LIAR = {
    "kill",
    "kill_in_call",
    "flap",
    "sigterm",
    "stall",
    "slow",
    "lag",
    "lose_connection",
    "lose",
    "delay",
    "repeat",
    "garbage",
    "full_disk",
    "slow_threads",
    "fail_checkpoints",
    "stranger",
}
LIES_S = 240.0


@dataclass(frozen=True)
class Event:
    """A fault that begins at a time.

    Attributes:
        number: its place in the seed's whole schedule, which all of its chance follows from
    """

    number: int
    at_s: float
    kind: str


@dataclass(frozen=True)
class Schedule:
    """All that is drawn for one seed.

    Attributes:
        seed: a number, for another mode than synchronous averaging with the mode before it: periodic-7. A kind of fault
            may stand after it, which is drawn far more often then: periodic-7+lag. Where one member lies, a kind of lie
            may, or `honest` for the same without a lie: liar-7+ghosts
        peers: peers at the beginning
        first_s: from when on faults begin
        faults_s: how long new faults begin
    """

    seed: str
    stages: int
    peers: int
    standbys: int
    first_s: float
    faults_s: float
    events: tuple[Event, ...]

    @property
    def mode(self) -> str:
        """How stage-mates average: a mode of the manifest, or `eager` for delayed with eager updates.

        `short` and `finish` stand for synchronous averaging, over a short text or in a run of few optimizer steps;
        `lost` stands for it with stages that lose all their peers time and again. `finish-delayed`, `finish-periodic`,
        `lost-delayed` and `lost-periodic` stand for the same in the other modes.
        """
        return self.seed.rpartition("-")[0] or "synchronous"

    @property
    def has_liar(self) -> bool:
        """Whether one member lies, or would."""
        return self.mode == "liar"

    @property
    def lie(self) -> str:
        """The kind of lie that is told; HONEST for none."""
        number, _, lie = self.seed.partition("+")
        if not self.has_liar:
            return HONEST
        return lie or random.Random(f"lie {number}").choice(sorted(LIES))

    @property
    def chance(self) -> str:
        """What all chance follows from: with a lie, the same as without it."""
        return self.seed.partition("+")[0] if self.has_liar else self.seed

    @property
    def finishes(self) -> bool:
        """Whether the run has few optimizer steps, and comes to its end."""
        return self.mode.startswith("finish")

    @classmethod
    def draw(cls, seed: str, only: Sequence[int] | None = None) -> Schedule:
        """The schedule of a seed.

        Args:
            only: numbers of the events to keep; None for all
        """
        number, _, often = seed.partition("+")
        if number.startswith("liar-"):
            return cls._with_liar(seed, only)
        if often and often not in KINDS:
            raise SystemExit(f"{seed}: no kind of fault is called {often}; there are {', '.join(sorted(KINDS))}")
        rng = random.Random(f"schedule {number}")
        stages = rng.choice([1, 2, 2, 3, 3, 4])
        peers = rng.randint(max(2, stages), min(2 * stages + 2, 8))
        standbys = rng.choice([0, 1, 1])
        first_s = rng.choice(FIRST_S)
        faults_s = LONG_S if rng.random() < LONG_SHARE else FAULTS_S
        count = round(rng.randint(8, 18) * faults_s / FAULTS_S)
        times = sorted(rng.uniform(first_s, first_s + faults_s) for _ in range(count))
        events = tuple(Event(number, at_s, _draw_kind(seed, number)) for number, at_s in enumerate(times))
        kept = tuple(event for event in events if only is None or event.number in only)
        return cls(seed, stages, peers, standbys, first_s, faults_s, kept)

    @classmethod
    def _with_liar(cls, seed: str, only: Sequence[int] | None) -> Schedule:
        """Two stages of three tickets and more, and a few faults that strike one after the other."""
        number, _, lie = seed.partition("+")
        if lie and lie not in LIES and lie != HONEST:
            raise SystemExit(f"{seed}: no lie is called {lie}; there are {', '.join(sorted(LIES))}, and {HONEST}")
        rng = random.Random(f"schedule {number}")
        peers, standbys, first_s = rng.choice([6, 7, 8, 8]), rng.choice([0, 1]), rng.choice([30.0, 45.0])
        times = sorted(rng.uniform(first_s, first_s + LIES_S - 40.0) for _ in range(rng.randint(2, 6)))
        weights = {name: weight for name, (_, weight) in KINDS.items() if name in BESIDE_A_LIAR}
        kinds = rng.choices(list(weights), list(weights.values()), k=len(times))
        events = tuple(Event(n, at_s, kind) for n, (at_s, kind) in enumerate(zip(times, kinds, strict=True)))
        kept = tuple(event for event in events if only is None or event.number in only)
        return cls(seed, 2, peers, standbys, first_s, LIES_S, kept)


def _draw_kind(seed: str, number: int) -> str:
    """A kind by the weights: the one that occurs first. So a new kind changes those schedules alone that draw it."""
    weights = {name: weight for name, (_, weight) in KINDS.items()}
    seed, _, often = seed.partition("+")
    if seed.startswith("lost"):
        weights = {name: weight * WHERE_STAGES_ARE_LOST.get(name, 1.0) for name, weight in weights.items()}
    if often:
        weights[often] *= OFTEN

    def occurs_after(name: str) -> float:
        return random.Random(f"kind {seed} {number} {name}").expovariate(weights[name])

    return min((name for name in weights if weights[name]), key=occurs_after)


def numbered(numbers: Iterable[int], mode: str, often: str = "") -> list[str]:
    """The seeds of these numbers.

    Args:
        mode: of averaging; empty for the synchronous one
        often: a kind of fault that is drawn far more often than else, if any
    """
    before, after = mode and f"{mode}-", often and f"+{often}"
    return [f"{before}{number}{after}" for number in numbers]
