"""Checkpoints of a run: fetched from peers, written, read, exported."""
