"""Effects: processes, sockets, threads, files. peer.py wires the parts together; the parts do not know each other."""
