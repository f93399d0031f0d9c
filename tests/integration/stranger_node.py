"""Tries to reach a member through a helper, without a pass; ends with an error if anybody helps."""

from __future__ import annotations

import asyncio
import sys

from hivemind.p2p import P2P, PeerID

from swarm_peer.runtime.network.meetings import HELPER
from swarm_peer.runtime.network.short_messages import receive, send
from swarm_peer.wire.help import HelpRequest

# A wish for a reservation, with which libp2p's daemon would relay to this node.
RESERVE = b"\x02\x08\x00"
# One a second.
NUM_TRIES = 20


async def main(address: str, member: str) -> None:
    p2p = await P2P.create(
        host_maddrs=["/ip4/0.0.0.0/tcp/31339"],
        initial_peers=[address],
        use_relay=True,
        auto_nat=True,
        force_reachability="public",
        nat_port_map=False,
    )
    helper = PeerID.from_base58(address.rpartition("/p2p/")[2])
    for is_relay in (False, True):
        _, reader, writer = await p2p.call_binary_stream_handler(helper, HELPER)
        await send(writer, HelpRequest(b"", is_relay, member).values())
        try:
            sys.exit(f"answered: {await asyncio.wait_for(receive(reader, 'help'), 10)}")
        except (asyncio.IncompleteReadError, ConnectionError):
            print("refused to help")
    # A daemon that this one has told that it can be dialled, as AutoNAT does after some seconds, begins to relay anew.
    for _ in range(NUM_TRIES):
        _, reader, writer = await p2p.call_binary_stream_handler(helper, "/libp2p/circuit/relay/0.2.0/hop")
        writer.write(RESERVE)
        try:
            if answer := await asyncio.wait_for(reader.read(100), 10):
                sys.exit(f"libp2p relays: {answer!r}")
        except ConnectionError:
            print("refused to relay")
        writer.close()
        await asyncio.sleep(1)
    await p2p.shutdown()


asyncio.run(main(*sys.argv[1:]))
