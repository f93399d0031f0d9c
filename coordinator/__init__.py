"""The lightweight coordinator of a swarm: bootstrap, manifest, monitoring. Never on the data path."""
