"""A swarm in a box of links: runs it for some rounds, and adds up from its peers' timelines where the time went."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from links import Box, LinkOptions, box, enter_namespace
from wan_timeline import read_spans, summarise_stage
from wan_workload import Workload

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "integration"))

from forks import fork
from many_peers import cpu_seconds_by_kind
from simulation_check import counted
from swarm import LiveSwarm, SwarmStopped, run_swarm

from coordinator.run.local_peers import LOOPBACK, Launch

PROGRAM = Path(__file__).with_name("wan_peer.py")
WARM_UP_ROUNDS = 2
START_TIMEOUT_S = 240.0
# Peers log these where a round did not go as it should. A figure of such rounds is not one of the links alone.
TROUBLES = (
    "average_failed",
    "place_lost",
    "samples_given_up",
    "samples_lost",
    "state_not_taken",
    "update_skipped",
)


class WanMeasurement:
    """The script: starts the peers on their machines, and lets them train for a number of rounds."""

    def __init__(self, *, network: Box, workload: Workload, round_limit_s: float, num_rounds: int):
        self._network = network
        self._workload = workload
        self._round_limit_s = round_limit_s
        self._num_rounds = num_rounds
        self.first_round = 0
        self.cores = 0.0
        self.troubles: Counter[str] = Counter()
        self.sent_bytes: list[int] = []

    async def __call__(self, swarm: LiveSwarm) -> None:
        workload = self._workload
        names = [
            (stage, f"{stage}.{number}") for number in range(workload.num_peers) for stage in range(workload.num_stages)
        ]
        for stage, name in names:
            swarm.start(stage, name)
        limit_s = START_TIMEOUT_S + WARM_UP_ROUNDS * self._round_limit_s
        await swarm.until(lambda: swarm.optimizer_step >= WARM_UP_ROUNDS, "the warm-up", limit_s)
        begun, cpu_s, sent = time.monotonic(), cpu_seconds_by_kind(), self._network.sent_bytes()
        troubles_before = troubles(swarm.log(name) for _, name in names)
        self.first_round = swarm.optimizer_step
        last = self.first_round + self._num_rounds
        # One more, since the coordinator sees steps a moment late.
        limit_s = (1 + self._num_rounds) * self._round_limit_s
        await swarm.until(lambda: swarm.optimizer_step > last, "the measured rounds", limit_s)
        seconds = time.monotonic() - begun
        self.cores = (sum(cpu_seconds_by_kind().values()) - sum(cpu_s.values())) / seconds
        self.troubles = troubles(swarm.log(name) for _, name in names) - troubles_before
        after = self._network.sent_bytes()
        rounds = swarm.optimizer_step - self.first_round
        self.sent_bytes = [round((new - old) / rounds) for new, old in zip(after, sent, strict=True)]
        for _, name in names:
            swarm.kill(name)  # to leave takes them 20 s for each stage
        raise SwarmStopped


def launch_on(network: Box, microbatch_s: float) -> Callable[[Path, str], Launch]:
    """How peers are started: each on the next machine, the first of which is the coordinator's."""
    machines = iter(network.machines[1:])

    def launch(records: Path, _: str) -> Launch:
        def start(options: Any, log_file: Path, threads: int) -> Any:
            machine = next(machines)
            own = [f"/ip4/{machine.ip}/tcp/0" if option == LOOPBACK else option for option in options]
            arguments = [machine.namespace, str(microbatch_s), str(records)]
            return fork([sys.executable, str(PROGRAM), *arguments, *own], log_file)

        return start

    return launch


def measure_swarm(
    workload: Workload, links: LinkOptions, num_rounds: int, seed: int, keep: Path | None = None
) -> dict[str, Any]:
    """Run a swarm; returns the figures of its measured rounds.

    Args:
        keep: folder that gets the logs and timelines
    """
    with (
        tempfile.TemporaryDirectory(prefix="swarm-wan-") as name,
        box(1 + workload.num_stages * workload.num_peers, links, seed) as network,
    ):
        enter_namespace(network.machines[0].namespace)
        round_limit_s = workload.longest_round_s(links.bytes_per_s)
        measurement = WanMeasurement(
            network=network, workload=workload, round_limit_s=round_limit_s, num_rounds=num_rounds
        )
        try:
            run_swarm(
                workload.manifest(),
                [0] * workload.num_stages,
                Path(name),
                2 * START_TIMEOUT_S + (WARM_UP_ROUNDS + num_rounds + 1) * round_limit_s,
                script=measurement,
                launch=launch_on(network, workload.microbatch_s),
                listen_on=f"/ip4/{network.machines[0].ip}/tcp/0",
            )
        finally:
            if keep is not None:
                shutil.copytree(name, keep, dirs_exist_ok=True)
        figures = summarise(Path(name), workload, measurement.first_round, num_rounds)
    figures["cores"] = round(measurement.cores, 2)
    figures["troubles"] = dict(measurement.troubles)
    figures["sent_bytes_a_round"] = {
        "coordinator": measurement.sent_bytes[0],
        "peers": measurement.sent_bytes[1:],
    }
    return figures


def troubles(logs: Iterable[str]) -> Counter[str]:
    """How often peers logged that a round did not go as it should."""
    events = re.compile(rf"\b({'|'.join(TROUBLES)}) ")
    return Counter(event for log in logs for event in events.findall(log))


def summarise(folder: Path, workload: Workload, first: int, num_rounds: int) -> dict[str, Any]:
    """Where the time of the measured rounds went.

    A round lasts from the last gradient of the round before it, as it comes back to stage 0, to its own last one.
    """
    gradients = counted(folder)
    numbers = range(first, first + num_rounds)
    last_gradient = {number: max(gradients[number])[0] for number in range(first - 1, first + num_rounds)}
    begin_s, end_s = last_gradient[first - 1], last_gradient[first + num_rounds - 1]
    num_counted = sum(len(gradients[number]) for number in numbers)
    spans = [span for span in read_spans(folder / "records") if span.round_number in numbers]
    per_s = num_counted / (end_s - begin_s)
    return {
        "microbatches_per_s": round(per_s, 3),
        "share": round(per_s * workload.microbatch_s / workload.num_peers, 4),
        "rounds": num_rounds,
        "round_s": round((end_s - begin_s) / num_rounds, 3),
        "microbatches_a_round": round(num_counted / num_rounds, 1),
        "stages": [
            summarise_stage([span for span in spans if span.stage == stage], workload.num_peers, end_s - begin_s)
            for stage in range(workload.num_stages)
        ],
    }
