"""The conclusions of `swarm-peer doctor` from what it has measured: pure functions, a finding for each check."""
