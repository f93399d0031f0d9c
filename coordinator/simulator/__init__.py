"""A swarm in virtual time: the same policy functions that run live decide here, over traces and drawn peers.

Owns the model of the world (peers, links, downloads, comings and goings) and the accounting. It decides nothing.
"""
