"""A coordinator that takes weights for diverged as soon as the peers say so, for tests that do not wait."""

from coordinator.cli import run
from swarm_peer.policy import standstill

if __name__ == "__main__":
    standstill.DIVERGED_S = 1.0
    run()
