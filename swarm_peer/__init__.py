"""A peer of a decentralized pipeline-parallel training run (SWARM parallelism)."""

__version__ = "0.1.0"
