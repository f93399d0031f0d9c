"""Evaluation and sampling through a live run's pipeline."""
