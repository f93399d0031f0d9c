"""Which samples of the data have counted, and which peer may read which slice."""
