"""Which stage each peer serves: capacities, the search for moves, and when a move pays."""
