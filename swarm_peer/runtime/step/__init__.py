"""The part of a seat in a round, as the protocol asks for it: drain, average, update weights, and give work away."""
