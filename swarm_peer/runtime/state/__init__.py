"""States of stages: stored, served, indexed, transferred, and recovered after a stage has lost its peers."""
