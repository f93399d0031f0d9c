"""A run under way: its service, its coordinators, rebalancing, and runs on one machine."""
