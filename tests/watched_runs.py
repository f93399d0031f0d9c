"""A run that a coordinator watches: its peers, and what they report of it."""

from coordinator.watch.run_watch import RunWatch
from swarm_peer.config import RunManifest
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.wire.records import Progress, ProgressRecord, RoundReport, Validation

LENGTH = 10


def make_watch(validation_every=0, validation_samples=4, steps=10):
    manifest = RunManifest.model_validate(
        {
            "name": "watched",
            "model": {"config": "none"},
            "stages": {"count": 2},
            "data": {"sequence_length": LENGTH},
            "training": {
                "steps": steps,
                "global_batch_size": 8,
                "microbatch_size": 2,
                "validation_every": validation_every,
                "validation_samples": validation_samples,
            },
            "optimizer": {"learning_rate": 0.1},
        }
    )
    return RunWatch(manifest, SwarmView(2))


def peer(peer_id, stage, state=PeerState.SERVING, round_number=0, optimizer_step=None):
    optimizer_step = round_number if optimizer_step is None else optimizer_step
    return PeerView(
        peer_id=peer_id,
        stage=stage,
        state=state,
        round_number=round_number,
        samples_per_s=2.0,
        queue=3,
        optimizer_step=optimizer_step,
        note="busy",
    )


# One who reports, one who joins, and one of the next stage whose last announcement is from the run's beginning.
VIEW = SwarmView(2, (peer("a", 0), peer("b", 0, PeerState.JOINING), peer("c", 1)))
BOTH = SwarmView(2, (peer("a", 0), peer("b", 0), peer("c", 1)))


def rewound(round_number, optimizer_step):
    """As VIEW, after the next stage has come to announce that it went back."""
    return SwarmView(2, (*VIEW.in_stage(0), peer("c", 1, round_number=round_number, optimizer_step=optimizer_step)))


def report(optimizer_step, loss=2.5, samples=8, seconds=2.0, round_number=None):
    """Of a run that never went back, if no round is given."""
    round_number = optimizer_step - 1 if round_number is None else round_number
    return RoundReport(
        round_number=round_number, optimizer_step=optimizer_step, samples=samples, loss=loss, seconds=seconds
    )


def record(*reports, round_number=0, samples=0, validations=(), held_out=1000):
    current = Progress(round_number=round_number, samples=samples)
    return ProgressRecord(
        current=current,
        finished=reports,
        validations=tuple(
            Validation(round_number=at, optimizer_step=at, samples=count, held_out=held_out, loss_sum=loss_sum)
            for at, count, loss_sum in validations
        ),
    )


def steps_of(lines):
    return [line["optimizer_step"] for line in lines]
