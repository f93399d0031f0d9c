"""The commands of swarm-coordinator: they parse and check options, and call the code that does the work."""
