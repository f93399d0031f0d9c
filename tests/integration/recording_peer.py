"""swarm-peer, writing down which samples it counts in which global step: `recording_peer.py FOLDER FAULT OPTIONS...`.

FAULT is empty, or something that goes wrong in this peer: see faults.py.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import App, Parameter
from every_second_round import install_if_wanted

from swarm_peer.logs import configure_logging
from swarm_peer.peer_options import PeerOptions
from swarm_peer.policy.data.ranges import SampleId
from swarm_peer.policy.placement.rebalancing import StageChoice
from swarm_peer.protocol.epochs import Restart
from swarm_peer.protocol.log import Committed
from swarm_peer.runtime import startup
from swarm_peer.runtime.stage.executor import StageExecutor
from swarm_peer.runtime.stage.rounds import ReplicaRound
from swarm_peer.runtime.stage.stage_client import Microbatch
from swarm_peer.runtime.step.round_reports import RoundReports
from swarm_peer.wire.identity import Identity

app = App()
# The stage that a peer with `--stage auto` begins in.
FIRST_STAGE = "FIRST_STAGE"
# Set where tests must know which replicas a microbatch went through.
RECORD_ROUTES = "RECORD_ROUTES"


def record_routes(path: Path) -> None:
    """Write down each microbatch that is counted here: its id, the stage, the round."""
    backward = StageExecutor._backward

    def write(executor: StageExecutor, entered: ReplicaRound, microbatch: Microbatch, *args: Any) -> Any:
        result = backward(executor, entered, microbatch, *args)
        entry = {"stage": executor._trainer.spec.index, "round": entered.number, "id": microbatch.id.hex()}
        with path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        return result

    StageExecutor._backward = write  # type: ignore[method-assign]


def record_entries(path: Path) -> None:
    """Write down which samples each entry of stage 0 holds: what was counted here and is in none has not counted."""
    ended = RoundReports.ended

    def write(reports: RoundReports, committed: Committed, restart: Restart) -> None:
        cut = committed.entry.cut
        if cut.stage == 0 and cut.averages:
            held = [[*item.slice_id, window] for item in cut.samples for window in range(item.start, item.end)]
            with path.open("a") as file:
                file.write(json.dumps({"round": cut.round, "samples": held}) + "\n")
        ended(reports, committed, restart)

    RoundReports.ended = write  # type: ignore[method-assign]


@app.default
def main(folder: Path, fault: str, /, options: Annotated[PeerOptions, Parameter(name="*")]) -> None:
    configure_logging("info")
    install_if_wanted()
    if fault:
        from faults import inject

        inject(fault, folder)
    with (folder / f"{os.getpid()}.jsonl").open("a") as file:

        def record(round_number: int, tokens_BS: torch.Tensor, samples: Sequence[SampleId], microbatch: bytes) -> None:
            entry = {
                "round": round_number,
                "time": time.time(),
                "tokens": tokens_BS.tolist(),
                "samples": samples,
                "id": microbatch.hex(),
            }
            file.write(json.dumps(entry) + "\n")
            file.flush()

        if os.environ.get(RECORD_ROUTES):
            assert options.identity_path is not None
            record_routes(folder / f"{Identity.load_or_create(options.identity_path).peer_id}.route")
        if (stage := os.environ.get(FIRST_STAGE)) is not None:
            startup.choose_stage = lambda *_, **__: StageChoice(int(stage), "the test says so")
        record_entries(folder / f"{os.getpid()}.entries")
        startup.run_peer(options, counted=record)


if __name__ == "__main__":
    app(sys.argv[1:])
