"""A run that is made up, of any size, and its page: for tests, for measuring, and for the pictures in docs."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

from coordinator.dashboard.history import History
from coordinator.dashboard.run_page import Facts, RunPage
from coordinator.watch.contributions import ContributionEstimates, Given
from coordinator.watch.happenings import make_event
from coordinator.watch.journal import Journal
from coordinator.watch.metrics_file import ValidationLoss, metrics_line, stage_shares
from coordinator.watch.run_watch import LINES_KEPT, RunWatch
from swarm_peer.config import RunManifest
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.view import PeerState, PeerView, SwarmView, TimeShares
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.wire.records import Assignment, CoordinationRecord

NUM_STAGES = 4
STEPS, STEPS_DONE = 20_000, 7_421
SAMPLES, LENGTH = 256, 1024
NAMES = ("alice", "bob", "chen", "dora", "emeka", "farid", "grete", "hana", "ivan", "jun")
DEVICES = ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4070", "Tesla T4", "NVIDIA A10G", "cpu")


class MadeUpPage:
    """A run of many peers that nobody runs.

    Attributes:
        watch: what would be seen of it
        page: its page
        advance_s: CPU seconds that it took to make up how the run goes on, where that is measured
    """

    def __init__(self, *, watch: RunWatch, journal: Journal, contributions: ContributionEstimates, rng: random.Random):
        self.watch = watch
        self._contributions = contributions
        self._rng = rng
        self.advance_s = 0.0
        self._speeds = {peer.peer_id: peer.samples_per_s for peer in watch.view.peers}
        self.page = RunPage(
            watch=watch,
            journal=journal,
            contributions=contributions,
            history=History(),
            clock=SystemClock(),
            facts=Facts(
                labels=lambda: {peer: f"{given.name.split('-')[0]}@example.org" for peer, given in self._known()},
                join=lambda: "swarm-peer --stage auto --initial-peers swarm-invite-lMQgavLkz0Gna4dp...",
                begun_s=lambda: time.time() - 5.2 * 86400,
            ),
        )

    def _known(self) -> list[tuple[str, Given]]:
        return [(peer, given) for peer, given in self._contributions.given.items() if given.name.startswith("a")]

    def advance(self) -> None:
        """Have all peers announce themselves anew, and the run make one more step."""
        rng = self._rng
        step = self.watch.optimizer_step + 1
        peers = (
            replace(
                peer,
                samples_per_s=self._speeds[peer.peer_id] * rng.uniform(0.97, 1.03),
                queue=rng.randrange(9),
                time_shares=_time_shares(peer, rng),
                optimizer_step=step,
                round_number=step,
            )
            for peer in self.watch.view.peers
        )
        self.watch.view = SwarmView(NUM_STAGES, tuple(peers))
        loss = 2.6 + 7.4 * math.exp(-step / 900) + rng.gauss(0, 0.03)
        validation = ValidationLoss(loss + 0.05, 64) if step % 250 == 0 else None
        stages = (self.watch.view.serving(stage) for stage in range(NUM_STAGES))
        seconds = SAMPLES / max(min(sum(peer.samples_per_s for peer in stage) for stage in stages), 1) / 0.86
        seconds *= 1.5 if 4000 < step < 4300 else rng.uniform(0.97, 1.03)
        self.watch.lines.append(
            metrics_line(
                optimizer_step=step,
                round_number=step - 1,
                loss=loss,
                samples=SAMPLES,
                seconds=seconds,
                sequence_length=LENGTH,
                peers=[len(self.watch.view.serving(stage)) for stage in range(NUM_STAGES)],
                validation=validation,
                shares=stage_shares(self.watch.view),
            )
        )
        del self.watch.lines[:-LINES_KEPT]
        self.page.look()
        self._contributions.look(self.watch, time.time())

    def lose_stage(self, stage: int) -> None:
        """Have all peers of a stage fall silent, but for one that has just come and waits."""
        lost = self.watch.view.in_stage(stage)
        waiting = replace(
            lost[0],
            state=PeerState.JOINING,
            note="downloads the snapshot of optimizer step 7400: 2.1 of 3.4 GB",
            time_shares=TimeShares(joining=100),
        )
        idle = TimeShares(computing=3, ending=1)
        others = (replace(peer, time_shares=idle) for peer in self.watch.view.peers if peer.stage != stage)
        self.watch.view = SwarmView(NUM_STAGES, (*others, waiting))
        self.page.look()


def made_up_page(num_peers: int, steps: int = 3, seed: int = 0) -> MadeUpPage:
    """A page with so many peers, after so many steps."""
    rng = random.Random(seed)
    watch = RunWatch(_manifest(), SwarmView(NUM_STAGES, tuple(_peer(number, rng) for number in range(num_peers))))
    mover = next(peer for peer in watch.view.peers if peer.stage != 2)
    reason = "without the move, stage 3 would do 3.6 samples/s and stage 2 3.07; the peer takes 40 s to move"
    assignment = Assignment(peer=mover.peer_id, announced=1, from_stage=mover.stage, to_stage=2, reason=reason)
    record = CoordinationRecord(
        warrant=b"",
        beat=1,
        assignments=(assignment,),
        reason="the swarm's throughput rises from 3.07 to 3.3 samples/s with 1 move",
    )
    watch.observe_coordinator((Term(7, "12D3KooWCoordinatorMadeUp"), record))
    contributions = ContributionEstimates()
    now_s = time.time()
    for peer in watch.view.peers:
        hours = rng.uniform(1, 120)
        contributions.given[peer.peer_id] = Given(
            peer.name,
            peer.stage,
            now_s - 3600 * hours,
            hours * 3600 * peer.samples_per_s,
            hours * 3600,
            rng.randrange(4),
        )
    made = MadeUpPage(watch=watch, journal=_journal(watch, now_s), contributions=contributions, rng=rng)
    for _ in range(steps):
        made.advance()
    return made


def _manifest() -> RunManifest:
    return RunManifest.model_validate(
        {
            "name": "gpt2-124m",
            "model": {"config": "none"},
            "stages": {"count": NUM_STAGES},
            "data": {"sequence_length": LENGTH},
            "training": {"steps": STEPS, "global_batch_size": SAMPLES, "microbatch_size": 4},
            "optimizer": {"learning_rate": 0.1},
        }
    )


def _time_shares(peer: PeerView, rng: random.Random) -> TimeShares | None:
    """Peers of the slowest stage are busy, the others wait for its samples."""
    if peer.state is PeerState.JOINING:
        return TimeShares(joining=100)
    busy = {2: 84, 3: 71, 0: 50, 1: 52}[peer.stage] + rng.randrange(-4, 5)
    return TimeShares(computing=busy, ending=rng.randrange(8, 12))


def _peer(number: int, rng: random.Random) -> PeerView:
    alphabet = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    is_joining = number % 29 == 7
    return PeerView(
        peer_id="12D3KooW" + "".join(rng.choices(alphabet, k=44)),
        stage=number % NUM_STAGES,
        state=PeerState.JOINING if is_joining else PeerState.DRAINING if number % 37 == 11 else PeerState.SERVING,
        samples_per_s=rng.uniform(0.3, 1.2) * (0.8 if number % NUM_STAGES == 2 else 1.0),
        queue=rng.randrange(9),
        optimizer_step=STEPS_DONE,
        movable=True,
        note="downloads its state: 1.2 of 3.4 GB" if is_joining else "",
        incarnation=int((time.time() - rng.uniform(600, 4e5)) * 1000),
        name=f"{NAMES[number % len(NAMES)]}-{number}",
        device=DEVICES[number % len(DEVICES)],
        version="0.1.0",
        is_reachable=number % 13 != 6,
    )


def _journal(watch: RunWatch, now_s: float) -> Journal:
    journal = Journal()
    journal.begin(lifetime_s=30.0, now_s=now_s - 9000)
    journal.tell("started", f"Run gpt2-124m: {NUM_STAGES} stages, {STEPS} optimizer steps to make.", now_s - 8900)
    journal.look(watch, now_s - 8000)
    journal.tell("checkpoint", "The checkpoint of optimizer step 7400 is saved.", now_s - 900)
    lost, moved = watch.view.peers[1], watch.view.peers[2]
    text = f"{lost.name} (…{lost.peer_id[-8:]}) of stage {lost.stage} has fallen silent without a goodbye."
    reason = "stage 1 was the slowest"
    journal._add(
        [
            make_event("died", text, now_s - 600, stage=lost.stage, peer=lost.peer_id, name=lost.name),
            make_event(
                "moved",
                f"{moved.name} (…{moved.peer_id[-8:]}) moves from stage 3 to stage {moved.stage}: {reason}.",
                now_s - 300,
                stage=moved.stage,
                peer=moved.peer_id,
                name=moved.name,
            ),
        ]
    )
    return journal
