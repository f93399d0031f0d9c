"""Commands by which the owner of a machine has it back for a while: `pause` and `resume`."""

from __future__ import annotations

import time
from typing import Annotated

from cyclopts import Parameter

Name = Annotated[
    str,
    Parameter(name="PEER", help="Names of peers, or the ends of their ids; all of this user's here, if none is given."),
]
# A peer hands over within `--grace-s`, by default 20, and half as long again, before it frees its memory.
HANDOVER_S = 60.0
# It looks twice a second.
NOTICED_S = 5.0
LOOK_S = 0.1


def pause(*peers: Name) -> None:
    """Have peers on this machine leave its device alone, until they are told to resume.

    A peer hands its work over, frees the device's memory and stays a member of its run. It stays paused if it is
    started again meanwhile.
    """
    _tell(peers, is_paused=True)


def resume(*peers: Name) -> None:
    """Have paused peers serve again, unless hours, other use or the daily limit keep them paused."""
    _tell(peers, is_paused=False)


def _tell(names: tuple[str, ...], *, is_paused: bool) -> None:
    from swarm_peer.runtime.host.running_peers import chosen, running_folder, running_peers, tell

    folder = running_folder()
    told = chosen(running_peers(folder), names)
    for peer in told:
        tell(folder, peer, is_paused=is_paused)
    waiting = {peer.peer_id: peer for peer in told}
    end_s = time.monotonic() + (HANDOVER_S if is_paused else NOTICED_S)
    while waiting and time.monotonic() < end_s:
        seen = {peer.peer_id: peer for peer in running_peers(folder)}
        for peer_id, peer in list(waiting.items()):
            now = seen.get(peer_id)
            if now is None:
                print(f"{peer.who} has ended")
            elif is_paused and now.is_at_rest:
                alone = f"; {now.left_alone}" if now.left_alone else ""
                print(f"{now.who}: {now.note}; the device's memory is free{alone}")
            elif not is_paused and now.state != "paused":
                print(f"{now.who} takes part again")
            else:
                continue
            del waiting[peer_id]
        time.sleep(LOOK_S)
    for peer in waiting.values():
        now = next((each for each in running_peers(folder) if each.peer_id == peer.peer_id), peer)
        print(f"{now.who}: {'still hands over its work' if is_paused else now.note}")
