"""Decisions: pure functions and small state machines of (view, parameters, now, rng) that return their reason.

Nothing here may import more than the standard library and numpy, since the simulator calls this very code with a
virtual clock. A test checks the imports.
"""
