"""States of stages: stored, served, indexed, transferred, and kept for when a stage has lost its peers."""
