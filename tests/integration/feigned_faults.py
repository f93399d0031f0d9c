"""`swarm-peer` on a machine with a fault: `feigned_faults.py clock:SECONDS|driver:VERSION ARGUMENTS`.

No test can set this machine's clock, nor give it a GPU.
"""

import sys
import tempfile
import time
from pathlib import Path


def set_clock(off_s: float) -> None:
    """Have all of this process read a clock that is ahead."""
    real = time.time
    time.time = lambda: real() + off_s


def install_driver(version: str) -> None:
    """Have this machine look as if it had an NVIDIA driver."""
    from swarm_peer.runtime.host import machine_facts

    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Tue Jul 13 16:14:05 UTC 2021\n")
    machine_facts.DRIVER = Path(file.name)


if __name__ == "__main__":
    fault, _, value = sys.argv.pop(1).partition(":")
    if fault == "clock":
        set_clock(float(value))
    else:
        install_driver(value)
    from swarm_peer.cli import run

    run()
