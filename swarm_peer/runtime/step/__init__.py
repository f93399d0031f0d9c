"""What a seat does in a round, as the protocol asks for it: drains, averages, updates the weights, gives work away."""
