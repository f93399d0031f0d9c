"""swarm-peer, writing down which samples it counts in which global step: `recording_peer.py FOLDER OPTIONS...`."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import App, Parameter

from swarm_peer.cli import configure_logging
from swarm_peer.config import PeerOptions
from swarm_peer.runtime.peer import run_peer

app = App()


@app.default
def main(options: Annotated[PeerOptions, Parameter(name="*")]) -> None:
    configure_logging("info")
    with (FOLDER / f"{os.getpid()}.jsonl").open("w") as file:

        def record(step: int, tokens_BS: torch.Tensor) -> None:
            file.write(json.dumps({"step": step, "tokens": tokens_BS.tolist()}) + "\n")
            file.flush()

        run_peer(options, counted=record)


FOLDER = Path(sys.argv.pop(1))
app()
