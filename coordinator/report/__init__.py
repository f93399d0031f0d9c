"""A page about a run, made from the run's folder."""
