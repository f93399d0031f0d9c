"""Which samples of the data have counted."""
