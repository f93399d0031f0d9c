"""Plans before a run: peers described, GPUs, the work of stages, the report."""
