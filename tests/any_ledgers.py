"""Strategies that draw ranges of windows, as peers may count them."""

from hypothesis import strategies as st

from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.data.ranges import WindowRange

NUM_SLICES = 4

any_range = st.builds(
    lambda start, length, is_last, index, number: WindowRange(number, index, start, start + length, is_last),
    st.integers(0, 8),
    st.integers(0, 4),
    st.booleans(),
    st.integers(0, NUM_SLICES - 1),
    st.integers(0, 2),
)


def ledger_of(ranges: list[WindowRange]) -> Ledger:
    """A ledger in which these have counted."""
    ledger = Ledger(NUM_SLICES)
    ledger.add(ranges)
    return ledger
