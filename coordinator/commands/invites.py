"""Commands for who takes part in a run by invitation: `invite`, `invites` and `revoke`. None of them asks the network.

A coordinator that serves the run from the same folder tells its peers what was revoked, within seconds.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from coordinator.commands.console import open_console
from coordinator.commands.shared_options import Json, RunFolder, RunKey
from swarm_peer.errors import UserError
from swarm_peer.peer_options import RUN

# As many as a ticket can say (swarm_peer/wire/passes.py); importing that would make --help slow.
MAX_AT_ONCE = 2**20 - 1
SECONDS = {"h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}


def invite(
    run: RunFolder = None,
    /,
    *,
    label: Annotated[str, RUN],
    expires: Annotated[str, RUN] = "30d",
    at_once: Annotated[int, RUN, Parameter(validator=Number(gt=0, lte=MAX_AT_ONCE))] = 8,
    identity_path: RunKey = None,
) -> None:
    """Print an invite to a run, which whoever has it joins with. Keep it as secret as a password.

    Args:
        label: Whom it is for: a name, by which it is listed and revoked.
        expires: For how long it holds, in hours, days or weeks, such as 12h, 7d or 4w.
        at_once: How many peers may take part by it at the same time.
    """
    from coordinator.run.found_runs import ending_of, folder_of_run
    from coordinator.run.invites import InviteBook
    from coordinator.run.lasting_peers import addresses_to_name
    from coordinator.run.run_key import run_key_of

    folder = folder_of_run(run)
    if ending := ending_of(folder):
        raise UserError(ending)
    addresses = addresses_to_name(folder)
    if not addresses:
        raise UserError(f"{folder}: no address of its run is kept there yet; serve the run first")
    seconds, run_key = _seconds(expires), run_key_of(folder, identity_path)
    made = InviteBook(folder).issue(run_key, addresses, label=label, seconds=seconds, at_once=at_once)
    print(f"swarm-peer --stage auto --initial-peers {made.text()}")


def _seconds(text: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]{0,4})([hdw])", text)
    if match is None:
        raise UserError(f"--expires {text}: expected one or more hours, days or weeks, such as 12h, 7d or 4w")
    return int(match[1]) * SECONDS[match[2]]


def invites(run: RunFolder = None, /, *, identity_path: RunKey = None, json_: Json = False) -> None:
    """List the invites to a run, and which peers have come by each."""
    from coordinator.run.found_runs import folder_of_run
    from coordinator.run.invites import ANY_NUMBER, InviteBook
    from coordinator.run.run_key import run_key_of

    folder = folder_of_run(run)
    listed = InviteBook(folder).listed(run_key_of(folder, identity_path).peer_id, int(time.time()))
    if json_:
        print(json.dumps([asdict(each) for each in listed]))
        return
    from rich.table import Table

    table = Table("label", "holds until", "at once", "state", "peers that came")
    for each in listed:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.expires))
        at_once = "any" if each.at_once == ANY_NUMBER else str(each.at_once)
        peers = [f"…{peer[-8:]}{' (revoked)' * (peer in each.revoked_peers)}" for peer in each.peers]
        table.add_row(each.label, until, at_once, each.state, "\n".join(peers))
    open_console().print(table)


def revoke(
    whom: Annotated[
        str,
        RUN,
        Parameter(
            name="LABEL|PEER", help="An invite, with all peers that came by it; or a peer, by the end of its id."
        ),
    ],
    run: RunFolder = None,
    /,
    *,
    identity_path: RunKey = None,
) -> None:
    """Revoke an invite, or let one peer take part no more."""
    from coordinator.run.found_runs import folder_of_run
    from coordinator.run.invites import InviteBook
    from coordinator.run.run_key import run_key_of

    folder = folder_of_run(run)
    revoked = InviteBook(folder).revoke(run_key_of(folder, identity_path), whom)
    print(f"Revoked: {revoked}.")
