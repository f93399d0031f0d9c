"""Initial peers as people type them: addresses, invites, and files of both."""

from __future__ import annotations

from swarm_peer.addresses import peer_address


def check_initial_peers(values: tuple[str, ...]) -> None:
    """Check addresses and invites. @FILE, which names a file of them, is read later.

    Raises:
        UserError: see peer_address; or an invite is damaged
    """
    # Imported here, so that `--help` stays quick.
    from swarm_peer.wire.passes import INVITE_PREFIX, Invite

    for value in values:
        if value.startswith(INVITE_PREFIX):
            Invite.parse(value)
        elif not value.startswith("@"):
            peer_address(value)
