"""The machine a peer runs on: processes, preemption, metrics, folders and devices."""
