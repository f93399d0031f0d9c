"""Do adapters learn as well in a swarm whose peers keep being killed as in one process of PEFT? Real chats, NF4, LoRA.

For each seed, SmolLM2-135M-Instruct (`make runs/smollm2-135m-instruct/config.json`) gets adapters twice, beginning with
the same ones:

* in a swarm of 3 stages x 2 peers on this machine, over real libp2p on loopback. Every so many optimizer steps the
  older peer of the stage whose turn it is is killed by SIGKILL, and another one started in its place;
* in one process of transformers, PEFT and bitsandbytes (plain_peft.py), which shares no code with the swarm. It takes
  the samples that the swarm's entries hold, in their order.

Compared are the losses of the same held-out chats, and then PEFT alone reads the folder that the swarm has saved. The
chats are those of the package chatterbot-corpus (BSD), in English, each once: it is downloaded into runs/.

Each result is a line of `--results`; those that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import yaml
from safetensors.torch import save_file
from wan_report import add_line, commit, provenance, read_lines

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

from swarm import LiveSwarm, SwarmRun, run_swarm

from coordinator.config_files import load_manifest
from coordinator.run.resolving import resolve_manifest
from swarm_peer.config import RunManifest
from swarm_peer.runtime.data.slices import validation_samples

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "smollm2-135m-chat.yaml"
MODEL = ROOT / "runs" / "smollm2-135m-instruct"
CORPUS = ROOT / "runs" / "chatterbot-corpus"
CORPUS_PACKAGE = "chatterbot-corpus==1.3.3"
PLAIN = Path(__file__).with_name("plain_peft.py")
# The model's own, without the system message that it puts before each chat: half of the tokens, none of them learnt.
TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NUM_STAGES, RANK = 3, 16
# Beside a token's id, as samples carry it.
NOT_LEARNT, IDS = 1 << 30, (1 << 29) - 1
# The last steps are for the newest peer to serve in.
QUIET_STEPS = 8
RUN_TIMEOUT_S = 7200.0


class Killer:
    """The script: kills a peer every so many optimizer steps, stage by stage, and counts its `kills`."""

    def __init__(self, every: int):
        self._every = every
        self.kills = 0

    async def __call__(self, swarm: LiveSwarm) -> None:
        alive = [[f"{stage}.{number}" for number in range(2)] for stage in range(NUM_STAGES)]
        last = swarm.service.manifest.training.steps - QUIET_STEPS
        while (step := self._every * (self.kills + 1)) <= last:
            await swarm.until(lambda step=step: swarm.optimizer_step >= step, f"step {step}", RUN_TIMEOUT_S)
            stage = self.kills % NUM_STAGES
            heir = f"{stage}.heir-{self.kills}"
            swarm.kill(alive[stage].pop(0))
            swarm.start(stage, heir)
            alive[stage].append(heir)
            self.kills += 1
            await swarm.until(lambda heir=heir: "serving stage=" in swarm.log(heir), f"{heir} serves", RUN_TIMEOUT_S)


class Pair(NamedTuple):
    """Two trainings of the same adapters."""

    seed: int
    steps: int
    every: int
    settings: tuple[str, ...]

    def manifest(self, chats: Path, adapters: Path) -> RunManifest:
        """The manifest of the swarm.

        Raises:
            UserError: the settings do not fit it
        """
        own = (
            f"seed={self.seed}",
            f"model.pretrained={MODEL}",
            "model.base=nf4",
            f"model.adapter={json.dumps({'begin_with': str(adapters)})}",
            f"stages.count={NUM_STAGES}",
            "stages.peers_to_start=2",
            f"data.dataset={chats}",
            "data.packing=false",
            f"data.chat_template={json.dumps(TEMPLATE)}",
            # Three of four chats are shorter; the others are cut.
            "data.sequence_length=40",
            "data.validation_documents=64",
            f"training.steps={self.steps}",
            f"training.validation_every={max(1, self.steps // 3)}",
            "training.validation_samples=64",
            # One process clips the norm of all adapters at once, and each stage of a swarm that of its own.
            "training.max_grad_norm=null",
            "optimizer.learning_rate=5.0e-4",
            "schedule.warmup_steps=20",
        )
        return load_manifest(CONFIG, (*own, *self.settings))


def write_chats(file: Path) -> int:
    """Write the corpus as chats, each once, and return how many there are."""
    if not CORPUS.exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(CORPUS)]
        subprocess.run([*install, CORPUS_PACKAGE], check=True)
    chats: dict[tuple[str, ...], None] = {}
    for path in sorted((CORPUS / "chatterbot_corpus" / "data" / "english").glob("*.yml")):
        for turns in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            chats[tuple(map(str, turns))] = None
    with file.open("w") as lines:
        for chat in chats:
            messages = [
                {"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(chat)
            ]
            lines.write(json.dumps({"messages": messages}) + "\n")
    return len(chats)


def plain(threads: int, command: str, **arguments: object) -> dict[str, Any]:
    """Run a command of the program of PEFT's in a process of its own; returns what it has found."""
    words = [sys.executable, str(PLAIN), "--threads", str(threads), command]
    for name, value in arguments.items():
        values = value if isinstance(value, (tuple, list)) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=RUN_TIMEOUT_S)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_samples(file: Path, run: SwarmRun, manifest: RunManifest) -> None:
    """Write the samples of each optimizer step and the held-out ones, as transformers takes them."""
    kinds = [("train", torch.cat(run.counted[line["round"]])) for line in run.lines]
    kinds.append(("held_out", torch.from_numpy(validation_samples(manifest, manifest.training.validation_samples))))
    tensors = {}
    for number, (kind, marked_BS) in enumerate(kinds):
        ids_BS, is_learnt_BS = (marked_BS & IDS).long(), (marked_BS & NOT_LEARNT) == 0
        tensors[f"{kind}/{number}/input_ids"] = ids_BS
        tensors[f"{kind}/{number}/labels"] = ids_BS.where(is_learnt_BS, torch.full_like(ids_BS, -100))
    save_file(tensors, file)


def train_swarm(pair: Pair, folder: Path, threads: int) -> dict[str, Any]:
    """Train adapters in a swarm, and write the samples that its entries hold."""
    num_chats = write_chats(chats := folder / "chats.jsonl")
    plain(threads, "begin", model=MODEL, output=folder / "first", seed=pair.seed, rank=RANK)
    manifest = resolve_manifest(pair.manifest(chats, folder / "first")).manifest
    killer, started = Killer(pair.every), time.monotonic()
    run = run_swarm(manifest, [2] * NUM_STAGES, folder, RUN_TIMEOUT_S, script=killer)
    seconds = round(time.monotonic() - started)
    write_samples(folder / "samples.safetensors", run, manifest)
    last: Mapping[str, Any] = next((line for line in reversed(run.lines) if "validation_loss" in line), {})
    recorded = [sum(map(len, run.counted[line["round"]])) for line in run.lines]
    return {
        "chats": num_chats,
        "kills": killer.kills,
        "steps": len(run.lines),
        "samples": sum(line["samples"] for line in run.lines),
        "samples_recorded": sum(recorded),
        "validation_step": last.get("optimizer_step"),
        "validation_samples": last.get("validation_samples"),
        "validation_loss": last.get("validation_loss"),
        "losses": [line["loss"] for line in run.lines],
        "seconds": seconds,
    }


def train_plainly(pair: Pair, folder: Path, threads: int) -> dict[str, Any]:
    """Train the same adapters in one process, on the samples of the swarm's."""
    manifest = pair.manifest(folder / "chats.jsonl", folder / "first")
    optimizer, schedule = manifest.optimizer, manifest.schedule
    assert (optimizer.name, optimizer.weight_decay, schedule.name, schedule.final_fraction) == (
        "adamw",
        0,
        "cosine",
        0.1,
    )
    return plain(
        threads,
        "train",
        model=MODEL,
        adapters=folder / "first",
        samples=folder / "samples.safetensors",
        output=folder / "plain",
        learning_rate=optimizer.learning_rate,
        betas=optimizer.betas,
        warmup_steps=schedule.warmup_steps,
        steps=manifest.training.steps,
    )


def read_by_peft(pair: Pair, folder: Path, threads: int) -> dict[str, Any]:
    """The loss that PEFT alone finds for the folder that the swarm has saved."""
    samples = folder / "samples.safetensors"
    return plain(threads, "evaluate", model=MODEL, adapters=folder / "model", samples=samples)


ARMS = {"swarm": train_swarm, "plain": train_plainly, "exported": read_by_peft}


def measure(pair: Pair, folder: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The results of all arms of a pair; those of `--results` are not repeated."""
    key: list[Any] = [pair.seed, pair.steps, pair.every, list(pair.settings)]
    found = {entry["arm"]: entry for entry in read_lines(options.results) if entry["pair"] == key}
    for arm, function in ARMS.items():
        if arm not in found:
            if arm == "swarm":
                folder.mkdir(parents=True)
            where = folder if arm == "swarm" else Path(found["swarm"]["folder"])
            entry = {"arm": arm, "pair": key, "commit": commit(), "folder": str(where)}
            found[arm] = entry | function(pair, where, options.threads)
            add_line(options.results, found[arm])
    return found


def row(pair: Pair, found: Mapping[str, Mapping[str, Any]]) -> tuple[float, str]:
    """The relative difference of the losses, both as PEFT finds them, and a row of the table."""
    swarm, one = found["swarm"], found["plain"]
    difference = found["exported"]["validation_loss"] / one["validation_loss"] - 1
    cells = (
        str(pair.seed),
        str(swarm["kills"]),
        *(f"{loss:.4f}" for loss in (one["validation_before"], one["validation_loss"])),
        f"{found['exported']['validation_loss']:.4f}",
        f"{difference:+.2%}",
        # Where a peer has just come, its share of the held-out samples may be missing; and so may a step's validation.
        f"{swarm['validation_loss']} ({swarm['validation_samples']} samples, step {swarm['validation_step']})",
        *(str(each["seconds"]) for each in (swarm, one)),
    )
    return difference, f"| {' | '.join(cells)} |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=25, help="optimizer steps from one kill to the next")
    parser.add_argument("--threads", type=int, default=1, help="of the one process")
    parser.add_argument(
        "--set", dest="settings", nargs="+", default=[], help="of the manifest, as in swarm-coordinator"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "fine-tuning", help="for the runs' files")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "fine-tuning.jsonl")
    options = parser.parse_args()
    print(f"{provenance()}\n")
    print("| seed | kills | before | one process | swarm | difference | own word | swarm, s | one process, s |")
    print("|---" * 9 + "|", flush=True)
    differences = []
    for seed in options.seeds:
        pair = Pair(seed, options.steps, options.every, tuple(options.settings))
        folder = options.folder / f"{time.strftime('%Y%m%d-%H%M%S')}-seed-{seed}"
        difference, line = row(pair, measure(pair, folder, options))
        differences.append(difference)
        print(line, flush=True)
    print(f"\nMean difference: {fmean(differences):+.2%}")


if __name__ == "__main__":
    main()
