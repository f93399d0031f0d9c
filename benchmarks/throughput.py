"""Tokens per second and CPU-seconds per token: one process, a local swarm, and torch's pipelines, side by side.

Each section is a run of the same manifest on the same cores, one after the other:

* baseline: all stages in one process, with as many threads as there are cores.
* swarm: 2 stages x 2 peers and their coordinator over real libp2p on loopback, a thread each, as `local` sets it.
* gpipe, 1f1b: torch.distributed.pipelining over gloo on loopback, one process a stage, with a thread each.

These are measured, the same for all of them:

* Steps. The first ones are not counted: connections open, buffers grow, torch learns its shapes. The others
  are measured while the run is in full swing: it would go on, and is stopped when its last counted step is over.
* Tokens per second: tokens of the counted steps over their wall-clock time, as the run itself takes it (metrics.jsonl).
* CPU-seconds per token: user and system time of all processes of the section (a swarm's coordinator, peers, DHT and
  averaging processes, libp2p daemons) from /proc/PID/stat, with that of children that have ended. It is read when the
  lines of the first and of the last counted step appear. A swarm's lines come a second or two late, both of them; so
  what counts is the CPU time per second between the two readings, divided by the tokens per second.

The baseline's OpenMP threads spin for a moment when they wait, which is torch's default. On an idle machine that is 10%
faster than not to spin; where others compute on the same cores, it can be several times slower: --baseline-passive.

With --repeat the sections alternate, each time beginning with another one, and medians are reported; a ratio is the
median of the ratios within a repetition, since the load of a shared machine drifts. The optimizer's step and its
clipping are the same code everywhere; `loss` is that of the last counted step, and equal where the samples are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypedDict

import torch
from processes import PROCESS_POLL_S, ROOT, adopt_orphans, cpu_seconds, running

from coordinator.config_files import load_manifest
from swarm_peer.config import RunManifest

SECTIONS = ["baseline", "swarm", "gpipe", "1f1b"]
PEERS_BY_STAGE = (2, 2)
# More than any measurement waits for: runs are stopped, they do not end.
ENDLESS_STEPS = 10**6

# Nothing but the training steps themselves; fp32 on the wire, as gloo sends it.
SETTINGS = (
    f"training.steps={ENDLESS_STEPS}",
    "training.validation_every=0",
    "schedule={name: constant}",
    "wire={}",
    "averaging.compression=none",
    "data.dataset=embedded",
    "data.subset=null",
    "data.tokenizer=bytes",
)


@dataclass(frozen=True)
class Workload:
    """A run to train, and how many optimizer steps come before and in the measurement if nothing else is asked."""

    config: str
    settings: tuple[str, ...]
    warmup_steps: int
    steps: int


WORKLOADS = {
    "demo": Workload("demo.yaml", (), warmup_steps=5, steps=20),
    # Byte ids are below 50257: the text costs nothing, and the head and the embedding cost what they do cost.
    "gpt2-124m": Workload(
        "gpt2-124m.yaml",
        (
            "model.config.vocab_size=50257",
            "model.precision=fp32",
            "data.sequence_length=512",
            "training.global_batch_size=16",
            "training.microbatch_size=1",
            "limits={hop_timeout_s: 300}",
        ),
        # A process's first dozen passes take up to three times the CPU, since their memory is new to it, and each of a
        # swarm's peers does eight in a step of 16.
        warmup_steps=2,
        steps=3,
    ),
}


@dataclass(frozen=True)
class SectionResult:
    """The figures of one run of one section."""

    tokens_per_s: float
    cpu_s_per_token: float
    loss: float


class _TrainedTokens(TypedDict):
    tokens: int
    seconds: float
    loss: float


class StepLine(_TrainedTokens, total=False):
    """The part of a line of metrics.jsonl that is read here; a pipeline's lines have no peers."""

    peers: list[int]


class SectionFailed(Exception):
    """A run ended, or did not do its steps in time."""


def baseline_commands(manifest: Path, output: Path, threads: int) -> list[list[str]]:
    """The command of the single process."""
    options = ["--output", str(output), "--device", "cpu", "--threads", str(threads)]
    return [[sys.executable, "-m", "coordinator.cli", "baseline", str(manifest), *options]]


def swarm_commands(manifest: Path, output: Path) -> list[list[str]]:
    """The command of the swarm on this machine."""
    options = ["--output", str(output), "--device", "cpu", "--peers", ",".join(map(str, PEERS_BY_STAGE))]
    return [[sys.executable, "-m", "coordinator.cli", "local", str(manifest), *options]]


def pipeline_commands(manifest: Path, output: Path, schedule: str) -> list[list[str]]:
    """The commands of torch's pipeline, one for each stage."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rendezvous = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    program = [sys.executable, str(ROOT / "benchmarks" / "pipeline_stage.py"), str(manifest), "--schedule", schedule]
    options = ["--rendezvous", rendezvous, "--output", str(output)]
    return [[*program, "--stage", str(stage), *options] for stage in range(len(PEERS_BY_STAGE))]


def measure(
    commands: list[list[str]], output: Path, variables: Mapping[str, str], workload: Workload, timeout_s: float
) -> SectionResult:
    """Run a section up to its last counted step.

    Raises:
        SectionFailed: it ended by itself, or did not get there in time
    """
    log_file = output / "output.log"
    deadline = time.monotonic() + timeout_s
    first: tuple[int, float, float] | None = None  # number of lines, time, CPU seconds
    with running(commands, log_file, variables) as processes:
        while time.monotonic() < deadline:
            lines = read_lines(output / "metrics.jsonl")
            if first is None and len(lines) >= workload.warmup_steps and is_complete(lines[-1]):
                first = len(lines), time.monotonic(), cpu_seconds()
            elif first is not None and len(lines) >= first[0] + workload.steps:
                cpu_per_s = (cpu_seconds() - first[2]) / (time.monotonic() - first[1])
                return summarise(lines[first[0] :], cpu_per_s)
            if any(process.poll() is not None for process in processes):
                raise SectionFailed(f"it ended early: {tail(log_file)}")
            time.sleep(PROCESS_POLL_S)
    raise SectionFailed(f"it did not do its steps within {timeout_s:.0f} s: {tail(log_file)}")


def summarise(lines: Sequence[StepLine], cpu_per_s: float) -> SectionResult:
    """The figures of the counted steps.

    Raises:
        SectionFailed: a peer was missing
    """
    if not all(is_complete(line) for line in lines):
        raise SectionFailed("a peer was lost in the measurement")
    tokens_per_s = sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines)
    return SectionResult(tokens_per_s, cpu_per_s / tokens_per_s, lines[-1]["loss"])


def is_complete(line: StepLine) -> bool:
    """Whether no peer of a swarm was missing in this step."""
    return line.get("peers") in (None, [1, 1], list(PEERS_BY_STAGE))


def read_lines(file: Path) -> list[StepLine]:
    """All whole lines of a metrics.jsonl that is being written."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def environment(single_threaded: bool, passive: bool) -> Mapping[str, str]:
    """The environment of a section's processes."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = {"PYTHONPATH": paths}
    if single_threaded:
        variables["OMP_NUM_THREADS"] = "1"
    if passive:
        variables["OMP_WAIT_POLICY"] = "passive"
    return os.environ | variables


def tail(log_file: Path) -> str:
    """The last lines of a log, as one."""
    return " | ".join(log_file.read_text(errors="replace").splitlines()[-3:]) or "(no output)"


def load_workload(name: str, settings: Sequence[str]) -> RunManifest:
    """The manifest of a workload, with further settings."""
    workload = WORKLOADS[name]
    return load_manifest(ROOT / "configs" / workload.config, (*SETTINGS, *workload.settings, *settings))


def run_sections(
    manifest: RunManifest, workload: Workload, options: argparse.Namespace
) -> dict[str, list[SectionResult]]:
    """Run all sections as often as asked for; returns the results of each."""
    sections: dict[str, Callable[[Path, Path], list[list[str]]]] = {
        "baseline": lambda file, output: baseline_commands(file, output, options.baseline_threads),
        "swarm": swarm_commands,
        "gpipe": lambda file, output: pipeline_commands(file, output, "gpipe"),
        "1f1b": lambda file, output: pipeline_commands(file, output, "1f1b"),
    }
    names = options.sections
    results: dict[str, list[SectionResult]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="swarm-benchmark-") as folder:
        file = Path(folder) / "manifest.yaml"
        file.write_bytes(manifest.canonical_json())  # JSON is YAML
        for repeat in range(options.repeat):
            shift = repeat % len(names)
            for name in names[shift:] + names[:shift]:
                output = Path(folder) / f"{name}-{repeat}"
                output.mkdir()
                print(f"{name} ({repeat + 1}/{options.repeat}) ...", file=sys.stderr, flush=True)
                is_baseline = name == "baseline"
                variables = environment(not is_baseline, not is_baseline or options.baseline_passive)
                try:
                    result = measure(sections[name](file, output), output, variables, workload, options.timeout_s)
                except SectionFailed as error:
                    raise SectionFailed(f"{name}: {error}") from error
                results[name].append(result)
    return results


def report(results: dict[str, list[SectionResult]]) -> dict[str, dict[str, float]]:
    """Medians, and medians of the ratios to the first section of the same repetition."""

    def ratio(name: str, figure: Callable[[SectionResult], float]) -> float:
        pairs = zip(results[name], next(iter(results.values())), strict=True)
        return round(median(figure(mine) / figure(base) for mine, base in pairs), 3)

    return {
        name: {
            "tokens_per_s": round(median(result.tokens_per_s for result in values), 1),
            "cpu_s_per_token": round(median(result.cpu_s_per_token for result in values), 8),
            "tokens_per_s_ratio": ratio(name, lambda result: result.tokens_per_s),
            "cpu_s_per_token_ratio": ratio(name, lambda result: result.cpu_s_per_token),
            "loss": round(values[-1].loss, 5),
        }
        for name, values in results.items()
    }


def print_table(summary: dict[str, dict[str, float]], title: str) -> None:
    """Print the summary for people."""
    print(f"{title}\n{'':10}{'tokens/s':>12}{'':9}{'CPU ms/token':>14}{'':9}{'loss':>9}")
    for name, row in summary.items():
        print(
            f"{name:10}{row['tokens_per_s']:12.1f}{row['tokens_per_s_ratio']:8.2f}x"
            f"{1e3 * row['cpu_s_per_token']:14.4f}{row['cpu_s_per_token_ratio']:8.2f}x{row['loss']:9.4f}"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORKLOADS, default="demo")
    parser.add_argument("--steps", type=int, help="optimizer steps that are counted")
    parser.add_argument("--warmup-steps", type=int, help="optimizer steps before those")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="ratios are to the first one")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--baseline-threads", type=int, default=os.cpu_count())
    parser.add_argument("--baseline-passive", action="store_true", help="OMP_WAIT_POLICY=passive for it, see above")
    parser.add_argument("--timeout-s", type=float, default=1200.0, help="for each section of each repetition")
    parser.add_argument("--set", action="append", default=[], help="such as training.global_batch_size=64")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    preset = WORKLOADS[options.model]
    workload = Workload(
        preset.config, preset.settings, options.warmup_steps or preset.warmup_steps, options.steps or preset.steps
    )
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        summary = report(run_sections(load_workload(options.model, options.set), workload, options))
    except KeyboardInterrupt:
        sys.exit(130)
    except SectionFailed as error:
        sys.exit(f"throughput: {error}")
    if options.json:
        print(json.dumps(summary))
    else:
        print_table(
            summary, f"{options.model}, {os.cpu_count()} cores, torch {torch.__version__}, {platform.machine()}"
        )


if __name__ == "__main__":
    main()
