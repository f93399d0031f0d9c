"""What do slow links cost? Swarms and torch's pipelines over links with latency, jitter and bandwidth, on one machine.

Each peer is a process of its own, over real libp2p, on a machine of its own in a box of links (links.py). Its device
takes a time of its own for a microbatch and sleeps for nearly all of it: layers have all their weights, which are
averaged, but compute one product. So two cores emulate a dozen GPUs; the real machine must have a core to spare.
Torch's GPipe and 1F1B run over gloo (wan_pipeline.py).

An arm is a system and its links, SYSTEM@LATENCY_MS+-JITTER_MS, such as swarm@100+-50. Systems are swarm; delayed and
periodic, swarms that average in these modes, the latter every 50 optimizer steps; gpipe; and 1f1b. A system may have
wires of its own codec over the same links: periodic/int4_hadamard@100+-50. Arms alternate within one run, each time
beginning with another one, since the load of a shared machine drifts; a ratio is the median of the ratios to the first
arm within a repetition. Rounds of `periodic` are measured without an average, as 49 of 50 are.

With --runs each run of an arm is a line of a file as soon as it is over, and what the file has is not run again. An arm
that fails is left out, and the command ends with an error.

The bandwidth follows from the ratio of traffic to compute. C is how long the devices of a stage compute in a round. X
is how long a link takes for the activations and gradients of a peer between two others, and A for its share of an
averaging round; in each direction. With --x-over-c alone A/C is what the model makes it; with --a-over-c, too, the
stages get as many layers as bring A/C next to it. Without either, bandwidth has no limit. Predictions are those of
`swarm-coordinator plan` for such links.

    python benchmarks/wan.py --arms swarm@0 swarm@100+-50 gpipe@100+-50 --microbatches 64
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from links import LinkOptions
from processes import adopt_orphans
from wan_pipeline import SCHEDULES, measure_pipeline
from wan_prediction import predicted_round_s
from wan_report import Results, add_line, commit, machine, read_lines, table, write_report
from wan_swarm import measure_swarm
from wan_workload import AveragingMode, Workload

from swarm_peer.codecs import CODECS

ARM = re.compile(r"(?P<system>\w+)(/(?P<wire>\w+))?@(?P<latency>[\d.]+)(\+-(?P<jitter>[\d.]+))?")
SWARMS: dict[str, AveragingMode] = {"swarm": "synchronous", "delayed": "delayed", "periodic": "periodic"}
SYSTEMS = (*SWARMS, *SCHEDULES)
STAGE_COLUMNS = ("busy_share", "fill_s", "inside_s", "idle_inside_s", "drain_s", "barrier_s", "averaging_s")


@dataclass(frozen=True, slots=True)
class Arm:
    """A swarm or one of torch's schedules, over links.

    Attributes:
        wire: the codec of activations and gradients, if it is not the workload's
    """

    name: str
    system: str
    links: LinkOptions
    wire: str | None = None

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Of SYSTEM@LATENCY_MS+-JITTER_MS or SYSTEM/WIRE@LATENCY_MS+-JITTER_MS.

        Raises:
            argparse.ArgumentTypeError: it is not of that form
        """
        match = ARM.fullmatch(text)
        if match is None or match["system"] not in SYSTEMS:
            raise argparse.ArgumentTypeError(f"{text}: an arm is {'|'.join(SYSTEMS)}@MS or @MS+-MS")
        wire: Any = match["wire"]
        if wire not in (None, *CODECS):
            raise argparse.ArgumentTypeError(f"{text}: {wire} is no codec; choose one of {', '.join(CODECS)}")
        latency_s, jitter_s = float(match["latency"]) / 1000, float(match["jitter"] or 0) / 1000
        return cls(text, match["system"], LinkOptions(latency_s, jitter_s), wire)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """Which arms run over which links, how often and how long.

    Attributes:
        num_rounds: that are counted
        keep: folder for the peers' logs and timelines
        runs: file for what each run comes to
    """

    arms: Sequence[Arm]
    num_rounds: int
    repeat: int = 1
    bytes_per_s: float = 0.0
    keep: Path | None = None
    runs: Path | None = None


def measure(arm: Arm, workload: Workload, measuring: Measuring, repetition: int) -> dict[str, Any]:
    """Run an arm once."""
    links = replace(arm.links, bytes_per_s=measuring.bytes_per_s)
    workload = replace(workload, wire=arm.wire or workload.wire)
    if arm.system not in SWARMS:
        return measure_pipeline(workload, links, measuring.num_rounds, repetition, arm.system)
    keep = None if measuring.keep is None else measuring.keep / f"{arm.name.replace('/', '-')}-{repetition}"
    workload = replace(workload, averaging_mode=SWARMS[arm.system])
    figures = measure_swarm(workload, links, measuring.num_rounds, repetition, keep)
    return figures | {"predicted_round_s": round(predicted_round_s(workload, links), 2)}


def run_arms(workload: Workload, measuring: Measuring) -> Iterator[Results]:
    """Run all arms as often as asked for; yields all that is known after each run, by arm and repetition."""
    arms = list(measuring.arms)
    results: Results = {arm.name: {} for arm in arms}
    for repetition in range(measuring.repeat):
        shift = repetition % len(arms)
        for arm in arms[shift:] + arms[:shift]:
            # Without the commit: most commits change nothing that counts here.
            key = [arm.name, repetition, asdict(workload), measuring.bytes_per_s, measuring.num_rounds]
            figures = known_run(measuring.runs, key)
            if figures is None:
                begin, load = time.monotonic(), os.getloadavg()[0]
                try:
                    figures = measure(arm, workload, measuring, repetition)
                except Exception as error:  # whatever it is: the others took hours
                    print(f"{arm.name} failed: {error}", file=sys.stderr, flush=True)
                    continue
                figures["load"] = [round(load, 1), round(os.getloadavg()[0], 1)]
                figures["commit"] = commit()
                if measuring.runs is not None:
                    add_line(measuring.runs, {"key": key, "figures": figures})
                print(f"{arm.name} ({time.monotonic() - begin:.0f} s, load {figures['load']}):", file=sys.stderr)
                print_figures(figures)
            results[arm.name][repetition] = figures
            yield results


def failed_arms(results: Results, repeat: int) -> list[str]:
    """The arms that have fewer runs than were asked for."""
    return [name for name, runs in results.items() if len(runs) < repeat]


def known_run(file: Path | None, key: Sequence[Any]) -> dict[str, Any] | None:
    """The figures of a run, if a file has them."""
    entries = [] if file is None else read_lines(file)
    found = [entry["figures"] for entry in entries if entry["key"] == key]
    return found[-1] if found else None


def print_figures(figures: dict[str, Any]) -> None:
    """Print the figures of one run of one arm for people."""
    rest = {name: value for name, value in figures.items() if name not in ("stages", "sent_bytes_a_round")}
    print(" ".join(f"{name}={value}" for name, value in rest.items()))
    sent = figures["sent_bytes_a_round"]["peers"]
    print(f"sent by a peer in a round: {min(sent) / 1e6:.2f} to {max(sent) / 1e6:.2f} MB")
    print(f"{'stage':8}" + "".join(f"{name:>15}" for name in STAGE_COLUMNS))
    for number, stage in enumerate(figures["stages"]):
        print(f"{number:<8}" + "".join(f"{stage.get(name, 0.0):15.3f}" for name in STAGE_COLUMNS), flush=True)


def shaped(workload: Workload, x_over_c: float, a_over_c: float) -> tuple[Workload, float]:
    """The workload with as many layers as these ratios take, and the bandwidth; 0 for no limit."""
    if not x_over_c:
        return workload, workload.averaging_bytes() / (a_over_c * workload.ideal_s) if a_over_c else 0.0
    bytes_per_s = workload.activation_bytes() / (x_over_c * workload.ideal_s)
    if a_over_c:
        of_one_layer = replace(workload, layers_per_stage=1).averaging_bytes()
        layers = max(1, round(a_over_c * workload.ideal_s * bytes_per_s / of_one_layer))
        workload = replace(workload, layers_per_stage=layers)
    return workload, bytes_per_s


def costs_of(workload: Workload, bytes_per_s: float) -> dict[str, float]:
    """C, X and A of a round in seconds, the latter two if bandwidth has a limit."""
    costs = {"C_s": workload.ideal_s, "bytes_per_s": round(bytes_per_s)}
    if bytes_per_s:
        costs["X_s"] = round(workload.activation_bytes() / bytes_per_s, 2)
        costs["A_s"] = round(workload.averaging_bytes() / bytes_per_s, 2)
    return costs


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", type=Arm.parse, default=[Arm.parse("swarm@0"), Arm.parse("swarm@100+-50")])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--peers", type=int, default=2, help="of each stage")
    parser.add_argument("--microbatch-s", type=float, default=0.25)
    parser.add_argument("--microbatches", type=int, default=256, help="in a round")
    parser.add_argument("--rounds", type=int, default=3, help="that are counted")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--max-in-flight", type=int, default=16)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=1, help="of each stage")
    parser.add_argument("--sequence-length", type=int, default=16)
    parser.add_argument("--wire", default="fp16")
    parser.add_argument("--averaging", default="none")
    parser.add_argument("--x-over-c", type=float, default=0.0)
    parser.add_argument("--a-over-c", type=float, default=0.0)
    parser.add_argument("--keep", type=Path, help="folder for the peers' logs and timelines")
    parser.add_argument(
        "--runs", type=Path, help="file for the figures of each run; those that it has are not run again"
    )
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--report", type=Path, help="folder that gets them as a table and a figure")
    return parser.parse_args()


def main() -> None:
    """Run the arms, and print what they come to."""
    options = parse()
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces and processes are cleaned up
    workload = Workload(
        num_stages=options.stages,
        num_peers=options.peers,
        microbatch_s=options.microbatch_s,
        num_microbatches=options.microbatches,
        max_in_flight=options.max_in_flight,
        width=options.width,
        layers_per_stage=options.layers,
        sequence_length=options.sequence_length,
        averaging=options.averaging,
        wire=options.wire,
    )
    workload, bytes_per_s = shaped(workload, options.x_over_c, options.a_over_c)
    costs = costs_of(workload, bytes_per_s)
    print(" ".join(f"{name}={value}" for name, value in costs.items()), flush=True)
    measuring = Measuring(
        arms=options.arms,
        num_rounds=options.rounds,
        repeat=options.repeat,
        bytes_per_s=bytes_per_s,
        keep=options.keep,
        runs=options.runs,
    )
    last = deque(run_arms(workload, measuring), maxlen=1)
    if not last:
        sys.exit("no arm came to anything")
    results = last[0]
    print(table(results))
    if options.json:
        found = {
            "machine": machine(),
            "workload": asdict(workload),
            "costs": costs,
            "runs": results,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.report:
        write_report(options.report, results, costs)
    if failed := failed_arms(results, options.repeat):
        sys.exit(f"failed: {' '.join(failed)}")


if __name__ == "__main__":
    main()
