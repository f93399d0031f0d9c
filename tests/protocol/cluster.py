"""Some peers' cores, with what they run in: common to timed schedules (world.py) and untimed walks (walks.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from checks import Checks, Violation
from driver import Driver

from swarm_peer.protocol.core import Core
from swarm_peer.protocol.epochs import COORDINATORS, KEPT_EPOCHS, Certified, Epoch, Place, Rules
from swarm_peer.protocol.membership import Membership
from swarm_peer.protocol.messages import Message, Sent, Timing
from swarm_peer.protocol.round_rules import RoundRules
from swarm_peer.protocol.statements import EpochId, KeySigned, Seat, Sign, Signed
from swarm_peer.protocol.work import RoundContext


@dataclass
class Process:
    """One process: it crashes and starts again with a new life."""

    peer: str
    ticket: str
    stages: frozenset[int]
    has_key: bool = False
    life: int = 0
    core: Core | None = None
    stateless_since_s: dict[int, float] = field(default_factory=dict)
    rate: float = 1.0
    offset_s: float = 0.0
    stalled_until_s: float = 0.0
    waiting: list[Message] = field(default_factory=list)
    leaves: bool = False
    # It crashes instead of sending the n-th message of this kind from now on; None if it does not.
    trap: tuple[str, int] | None = None

    def clock(self, now_s: float) -> float:
        """What its own clock shows."""
        return self.offset_s + now_s * self.rate


class Cluster:
    """Some peers' cores.

    Attributes:
        first: the epoch that all begin with
        cut: links that carry nothing, as (from, to)
        epochs: every epoch that anybody has followed, by id
        counts: of what happened, by kind
    """

    first: Certified

    def __init__(
        self,
        random: Random,
        rounds: RoundRules,
        timing: Timing,
        *,
        num_slices: int,
        make: Callable[..., Membership] = Membership,
        kept: int = KEPT_EPOCHS,
    ):
        self.random = random
        self.rules = Rules(num_stages=rounds.num_stages, begin_anew_steps=5, period=rounds.period)
        self.rounds = rounds
        self.timing = timing
        self.num_slices = num_slices
        self.has_checkpoints = random.random() < 0.5
        self.now_s = 0.0
        self.cut: set[tuple[str, str]] = set()
        self.counts: dict[str, int] = {}
        self.epochs: dict[EpochId, Epoch] = {}
        self.processes: dict[str, Process] = {}
        self.driver = Driver(self)
        self.checks = Checks(self)
        self._make = make
        self._kept = kept

    def send(self, process: Process, sent: list[Sent]) -> None:
        """Put messages on their way."""
        raise NotImplementedError

    def count(self, kind: str) -> None:
        """Note that something has happened."""
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def begin(self, peer: str, ticket: str) -> None:
        """Have the run begin with an epoch of a coordinator alone, which the run key has signed."""
        seat = Seat(peer, 1, ticket)
        epoch = Epoch(EpochId(1, seat, 0), (Place(COORDINATORS, seat),))
        self.first = Certified(epoch, (Signed(KeySigned(epoch.hash), b"key"),))

    def start(self, process: Process) -> None:
        """Begin a new life of a process."""
        process.life += 1
        seat = Seat(process.peer, process.life, process.ticket)
        sign = lambda body: Signed(body, seat.peer.encode())  # noqa: E731
        assert self.first is not None
        membership = self._make(
            me=seat,
            first=self.first,
            rules=self.rules,
            timing=self.timing,
            random=Random(f"{self.random.random()}"),
            sign=sign,
            sign_as_key=(lambda body: Signed(body, b"key")) if process.has_key else None,
        )
        membership.known.kept = self._kept
        membership.desired = process.stages
        membership.acquaintances = tuple(sorted(self.processes))
        process.core = self.make_core(membership, sign)
        process.waiting, process.leaves, process.stateless_since_s = [], False, {}
        process.trap = None

    def make_core(self, membership: Membership, sign: Sign) -> Core:
        """The core of a process; planted mistakes make another one."""
        context = RoundContext(
            num_stages=self.rules.num_stages,
            batch=self.rounds.batch,
            unit=self.rounds.unit,
            most=self.rounds.most,
            lag=self.rounds.lag,
            averages=self.rounds.averages,
            is_rooted=self.rounds.is_rooted,
            fills=lambda close: self.rounds.fills(close, membership.epoch_of),
            believed=lambda counts: self.rounds.believed(counts, membership.epoch_of),
            epoch_of=membership.epoch_of,
            sign=sign,
            timing=self.timing,
        )
        return Core(membership=membership, context=context)

    def receive(self, process: Process, message: Message) -> None:
        """A message arrives."""
        assert process.core is not None
        self.count(type(message.body).__name__)
        self.send(process, process.core.receive(process.clock(self.now_s), message))
        if process.core is not None:
            self.check(process)

    def tick(self, process: Process) -> None:
        """A process does what is due."""
        assert process.core is not None
        self.driver.go_on(process)
        self.send(process, process.core.tick(process.clock(self.now_s)))
        if process.core is not None:
            self.check(process)

    def check(self, process: Process) -> None:
        """One epoch for each id; nobody has two lives at once; and all that holds of rounds."""
        assert process.core is not None
        epoch = process.core.epoch
        if self.epochs.setdefault(epoch.id, epoch) != epoch:
            raise Violation(f"two epochs of {epoch.id}: {self.epochs[epoch.id]} and {epoch}")
        lives = {seat.peer for seat in epoch.seats}
        if len(lives) != len(epoch.seats):
            raise Violation(f"two lives of one peer in {epoch}")
        self.checks.look(process)
