"""Commands of swarm-peer beside joining a run, each in a module of its own that imports nothing heavy."""
