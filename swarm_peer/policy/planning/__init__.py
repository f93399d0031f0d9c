"""How fast a run would be on given peers: the performance model and the planner."""
