"""The test tube's program: `python tests/tube SEED`, `python tests/tube seeds --count 1000`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent

os.environ["SWARM_AGREED"] = "1"

if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings have the same order everywhere
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONHASHSEED": "0"})
    sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
    from command import app

    app()
