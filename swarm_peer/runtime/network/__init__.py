"""How a peer reaches other peers: calls, the DHT, the directory of peers, and the agreement among them."""
