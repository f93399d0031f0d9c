"""This node lets a peer take part in a run if its pass has neither expired nor been revoked."""

from __future__ import annotations

import logging
from contextlib import suppress

from swarm_peer.errors import InvalidMessage, NotAdmitted
from swarm_peer.runtime.context import Clock
from swarm_peer.runtime.host.identities import KeptFile
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.passes import Invite, OpenedPass, Revocations, Revoked, open_pass
from swarm_peer.wire.records import unseal

log = logging.getLogger(__name__)

# Passes that are remembered, at some 1000 bytes each.
MAX_REMEMBERED = 4096
# A peer that has not been seen for so long is taken to have gone, and another may come by the same ticket.
SEEN_S = 60.0


class PassChecker:
    """Checks passes. Belongs to the event loop's thread.

    Args:
        run_id: the run's public key; None if the run is open to everybody
        own_pass: this node's pass
    """

    def __init__(self, run_id: str | None, *, clock: Clock, own_pass: bytes = b""):
        self.own_pass = own_pass
        self._run_id = run_id
        self._clock = clock
        self._known: dict[tuple[str, bytes], OpenedPass] = {}  # oldest first
        self._seen_s: dict[str, dict[str, float]] = {}  # peers by ticket
        # All of any list, since nothing is ever let in again: two folders may have made lists without each other's.
        self._revoked_tickets = set[str]()
        self._revoked_peers = set[str]()
        self._serial = 0
        self.revocations = b""  # the newest list's envelope, to be passed on
        self._kept_in: KeptFile | None = None

    @classmethod
    def for_holder(cls, invite: Invite | None, identity: Identity, clock: Clock) -> PassChecker:
        """A checker for whoever holds an invite; for an open run without one."""
        if invite is None:
            return cls(None, clock=clock)
        return cls(invite.run_id, clock=clock, own_pass=invite.pass_for(identity.peer_id))

    def open_to_everybody(self) -> None:
        """Ask nobody for a pass from now on: the run's manifest says so."""
        self._run_id = None

    @property
    def is_open(self) -> bool:
        """Whether everybody may take part."""
        return self._run_id is None

    def check(self, peer_id: str, data: bytes) -> OpenedPass | None:
        """Check the pass that a peer shows, or that a record of that peer carries.

        Returns:
            the pass; None if that peer needs none: the run's coordinator does not, and in an open run nobody does

        Raises:
            NotAdmitted: the peer may not take part; the message says why
        """
        if self._run_id is None or peer_id == self._run_id:
            return None
        if not data:
            raise NotAdmitted("this run is by invitation: ask its operator for an invite")
        known = self._holding(peer_id, data)
        self._count(known)
        return known

    def check_told(self, peer_id: str, data: bytes) -> None:
        """Check the pass of a peer that somebody else shows: whoever has seen it can, so the peer need not be here.

        Raises:
            NotAdmitted: the peer may not take part
        """
        if self._run_id is not None and peer_id != self._run_id:
            self._holding(peer_id, data)

    def check_own(self, peer_id: str) -> None:
        """Check this node's own pass; how many others came by its ticket is for those to say who let it in.

        Raises:
            NotAdmitted: it has expired, or was revoked
        """
        if self._run_id is not None and peer_id != self._run_id:
            self._holding(peer_id, self.own_pass)

    def _holding(self, peer_id: str, data: bytes) -> OpenedPass:
        """The pass, if it is the peer's and neither expired nor revoked.

        Raises:
            NotAdmitted: it is not
        """
        known = self._known.get((peer_id, data)) or self._open(peer_id, data)
        if known.ticket.expires < self._clock.unix_s():
            raise NotAdmitted(f"the invite {known.ticket.label} has expired: ask the run's operator for a new one")
        if peer_id in self._revoked_peers or known.ticket.key in self._revoked_tickets:
            raise NotAdmitted(f"the invite {known.ticket.label} was revoked by the run's operator")
        return known

    def _open(self, peer_id: str, data: bytes) -> OpenedPass:
        assert self._run_id is not None
        try:
            known = open_pass(data, self._run_id)
        except InvalidMessage as error:
            raise NotAdmitted(f"this pass is none of run {self._run_id}: {error}") from error
        if known.peer_id != peer_id:
            raise NotAdmitted(f"this pass is {known.peer_id}'s, not {peer_id}'s")
        if len(self._known) >= MAX_REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[peer_id, data] = known
        return known

    def _count(self, known: OpenedPass) -> None:
        """Note that the peer is here.

        Raises:
            NotAdmitted: as many others are as the ticket is for
        """
        now_s = self._clock.monotonic_s()
        seen_s = self._seen_s.setdefault(known.ticket.key, {})
        most = min(known.ticket.at_once, MAX_REMEMBERED)
        if known.peer_id not in seen_s and len(seen_s) >= most:
            for peer_id in [peer_id for peer_id, at_s in seen_s.items() if at_s < now_s - SEEN_S]:
                del seen_s[peer_id]
            if len(seen_s) >= most:
                raise NotAdmitted(f"the invite {known.ticket.label} is for {most} peers at a time, and all are here")
        seen_s[known.peer_id] = now_s

    def own_ticket(self, peer_id: str) -> str:
        """The key of the ticket by which this node was invited; empty for the holder of the run's key.

        Args:
            peer_id: this node's
        """
        return "" if peer_id == self._run_id else self._open(peer_id, self.own_pass).ticket.key

    def came_by(self, peer_id: str, ticket: str) -> bool:
        """Whether a peer has shown a pass of this ticket here, which stands. The holder of the run's key has none."""
        if peer_id == self._run_id:
            return not ticket
        is_shown = peer_id in self._seen_s.get(ticket, {})
        return is_shown and ticket not in self._revoked_tickets and peer_id not in self._revoked_peers

    def is_revoked(self, peer_id: str) -> bool:
        """Whether the operator has revoked a peer, or all invites by which this node has seen it come."""
        tickets = {ticket for ticket, seen_s in self._seen_s.items() if peer_id in seen_s}
        return peer_id in self._revoked_peers or (bool(tickets) and tickets <= self._revoked_tickets)

    def members(self) -> dict[str, list[str]]:
        """The peers that this node has seen lately, by the key of their ticket."""
        return {ticket: list(seen_s) for ticket, seen_s in self._seen_s.items() if seen_s}

    @property
    def revoked(self) -> Revoked:
        """All that this node knows to be revoked."""
        return Revoked(self._serial, frozenset(self._revoked_tickets), frozenset(self._revoked_peers))

    def learn(self, revocations: bytes) -> bool:
        """Revoke what is in a list, and pass it on if it is newer than all that are known.

        Returns:
            whether it is newer

        Raises:
            InvalidMessage: the run key has not signed it
        """
        if self._run_id is None or not revocations or revocations == self.revocations:
            return False
        record = unseal(Revocations, revocations, self._run_id, self._run_id)
        self._revoked_tickets.update(record.tickets)
        self._revoked_peers.update(record.peers)
        if record.serial <= self._serial:
            return False
        log.info("revocations_learnt serial=%d", record.serial)
        self._serial, self.revocations = record.serial, revocations
        if self._kept_in is not None:
            self._kept_in.write(revocations)
        return True

    def keep_in(self, file: KeptFile) -> None:
        """Read from a file what an earlier start of this peer knew to be revoked, and keep there what is learnt."""
        with suppress(InvalidMessage):
            self.learn(file.read())
        self._kept_in = file
