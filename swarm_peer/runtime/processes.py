"""Child processes that never outlive us."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent dies. To be called first thing in a child.

    Without it, a peer that is killed leaves its DHT, averager and libp2p daemon running, and the swarm goes on using
    them. Linux only; elsewhere it does nothing.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)
