"""What a seat does in a round, as the protocol asks for it: drain, average, update the weights; and give its work away."""
