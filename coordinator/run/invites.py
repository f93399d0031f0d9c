"""The invites to a run, in its folder: who was given one, who came by it, and what was revoked.

The folder holds the run's key, so whoever may write there may invite. Files with secrets are for their owner alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from swarm_peer.errors import InvalidMessage, UserError
from swarm_peer.files import OWNER, lock, replace_file
from swarm_peer.wire.identity import Identity, is_peer_id
from swarm_peer.wire.passes import MAX_TICKETS_REVOKED, Invite, Revocations, Revoked
from swarm_peer.wire.records import seal, unseal

# In the run's folder. The first holds secrets.
INVITE = "invite"
ISSUED = "invites.jsonl"
MEMBERS = "members.json"
REVOCATIONS = "revocations"

DAY_S = 24 * 3600
# Of the invite that `serve` prints, and of those that coordinators give themselves.
STANDING_DAYS = 365
STANDING_LABEL = "serve"
COORDINATOR_LABEL = "coordinator"
ANY_NUMBER = 2**20 - 1
# Characters of a peer's id that tell it apart from others.
LEAST_OF_ID = 6
# Peers that are written down for each ticket. The holder of its key can make new ones all the time.
MAX_MEMBERS = 1000


@dataclass(frozen=True)
class Issued:
    """An invite that was given to somebody, without its secret.

    Attributes:
        key: of its ticket
        expires: Unix seconds
        at_once: how many peers may be in the run by it at a time
    """

    label: str
    key: str
    expires: int
    at_once: int


@dataclass(frozen=True)
class Listed:
    """An invite as its run's operator sees it.

    Attributes:
        expires: Unix seconds
        state: holds, expired or revoked
        peers: ids of those that have come by it
        revoked_peers: those of them that may take part no more
    """

    label: str
    expires: int
    at_once: int
    state: str
    peers: tuple[str, ...]
    revoked_peers: tuple[str, ...]


def coordinator_invite(run_key: Identity) -> Invite:
    """An invite for a coordinator itself, which is never written down."""
    expires = int(time.time()) + STANDING_DAYS * DAY_S
    return Invite.issue(run_key, (), label=COORDINATOR_LABEL, expires=expires, at_once=ANY_NUMBER)


class InviteBook:
    """The files of one run's folder that its invites are in."""

    def __init__(self, folder: Path):
        self._folder = folder

    def issue(self, run_key: Identity, addresses: Sequence[str], *, label: str, seconds: int, at_once: int) -> Invite:
        """Make an invite, and note to whom it was given.

        Raises:
            UserError: the label cannot be one, or an invite that still holds has it
        """
        now = int(time.time())
        if any(known.label == label and known.state == "holds" for known in self.listed(run_key.peer_id, now)):
            raise UserError(f"--label {label}: an invite has this label already; name another one")
        try:
            invite = Invite.issue(run_key, addresses, label=label, expires=now + seconds, at_once=at_once)
        except ValueError as error:
            raise UserError(f"--label {label!r}: at most 64 letters, digits and . _ @ + -, and at least one") from error
        self._note(invite)
        return invite

    def standing(self, run_key: Identity, addresses: Sequence[str]) -> Invite:
        """The invite that `serve` prints: the one in the folder, or a new one; it is kept there for other commands."""
        known = self.kept(run_key)
        if known is None:
            expires = int(time.time()) + STANDING_DAYS * DAY_S
            known = Invite.issue(run_key, addresses, label=STANDING_LABEL, expires=expires, at_once=ANY_NUMBER)
            self._note(known)
        invite = Invite(known.run_id, tuple(addresses), known.ticket, known.key)
        replace_file(self._folder / INVITE, invite.text() + "\n", mode=OWNER)
        return invite

    def kept(self, run_key: Identity) -> Invite | None:
        """The invite in the folder; None if there is none, or it is damaged, or holds no longer."""
        with suppress(OSError, UserError):
            known = Invite.parse((self._folder / INVITE).read_text(encoding="utf-8").strip())
            if known.run_id == run_key.peer_id and not self._is_over(known):
                return known
        return None

    def _is_over(self, invite: Invite) -> bool:
        ticket, revoked = invite.opened_ticket(), tuple[str, ...]()
        with suppress(UserError):  # the coordinator warns of a list that it cannot read
            revoked = self.revocations(invite.run_id).tickets
        return ticket.expires < time.time() + DAY_S or ticket.key in revoked

    def _note(self, invite: Invite) -> None:
        ticket = invite.opened_ticket()
        issued = Issued(ticket.label, ticket.key, ticket.expires, ticket.at_once)
        path = self._folder / ISSUED
        with self._locked():
            # Not appended to: a power failure could leave half a line.
            known = path.read_text(encoding="utf-8") if path.exists() else ""
            replace_file(path, known + json.dumps(asdict(issued)) + "\n")

    @contextmanager
    def _locked(self, *, waits: bool = True) -> Iterator[None]:
        """Let no other process change the lists while this one does, such as a command and the coordinator at once.

        Raises:
            BlockingIOError: another one does, and this one is not to wait
        """
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            lock(fcntl.flock, folder, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB), self._folder)
            yield
        finally:
            os.close(folder)

    def issued(self) -> list[Issued]:
        """All invites that were given to somebody, the oldest first."""
        path, issued = self._folder / ISSUED, list[Issued]()
        try:
            for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
                issued.append(Issued(**json.loads(line)))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError) as error:
            number = len(issued) + 1
            raise UserError(f"{path}: line {number} is no invite ({error}); remove it, and keep the others") from error
        return issued

    def members(self) -> dict[str, list[str]]:
        """The peers that have come, by the key of their ticket, as the run's coordinator has seen them."""
        try:
            return dict(json.loads((self._folder / MEMBERS).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # the coordinator writes it anew
            return {}

    def labels(self) -> dict[str, str]:
        """The label of the invite that each peer has come by, by peer id; that of `serve` says nothing of anybody."""
        members = self.members()
        issued = (each for each in self.issued() if each.label != STANDING_LABEL)
        return {peer: each.label for each in issued for peer in members.get(each.key, ())}

    def listed(self, run_id: str, now: int) -> list[Listed]:
        """All invites with their state at some Unix time, the oldest first."""
        revoked, members = self.revocations(run_id), self.members()
        listed = []
        for issued in self.issued():
            state = "revoked" if issued.key in revoked.tickets else "expired" if issued.expires < now else "holds"
            peers = tuple(members.get(issued.key, ()))
            revoked_peers = tuple(peer for peer in peers if peer in revoked.peers)
            listed.append(Listed(issued.label, issued.expires, issued.at_once, state, peers, revoked_peers))
        return listed

    def keep_members(self, members: Mapping[str, Iterable[str]]) -> None:
        """Write down which peers have come, the first MAX_MEMBERS of each ticket."""
        known = self.members()
        merged = {
            key: list(dict.fromkeys([*known.get(key, ()), *sorted(members.get(key, ()))]))[:MAX_MEMBERS]
            for key in {*known, *members}
        }
        if merged != known:
            replace_file(self._folder / MEMBERS, json.dumps(merged), mode=0o644)

    def envelope(self) -> bytes:
        """The list of revocations, as the run key has signed it; empty if nothing was revoked."""
        path = self._folder / REVOCATIONS
        return path.read_bytes() if path.exists() else b""

    def revocations(self, run_id: str) -> Revocations:
        """The invites and peers that the operator has revoked.

        Raises:
            UserError: the file is not the list of this run
        """
        envelope = self.envelope()
        if not envelope:
            return Revocations(serial=0, tickets=(), peers=())
        try:
            return unseal(Revocations, envelope, run_id, run_id)
        except InvalidMessage as error:
            raise UserError(
                f"{self._folder / REVOCATIONS} is not this run's list of what was revoked ({error}): nothing in it is "
                f"in force; move it away"
            ) from error

    def merge(self, run_key: Identity, heard: Revoked) -> bytes:
        """Write down what another folder of this run has revoked, so that the next list from here does not lack it.

        Args:
            heard: all that this node knows to be revoked

        Returns:
            the envelope of this folder's list, which holds all of that

        Raises:
            UserError: the file is not the list of this run, or both lists together are too long
            OSError: it cannot be written now; another process may be changing it
        """
        with self._locked(waits=False):
            own = self.revocations(run_key.peer_id)
            known = Revoked(own.serial, frozenset(own.tickets), frozenset(own.peers))
            tickets, peers = known.tickets | heard.tickets, known.peers | heard.peers
            lacks_some = (tickets, peers) != (known.tickets, known.peers)
            is_unheard = own.serial <= heard.serial and (tickets, peers) != (heard.tickets, heard.peers)
            if lacks_some or is_unheard:
                self._write_revocations(run_key, Revoked(max(own.serial, heard.serial), tickets, peers))
            return self.envelope()

    def _write_revocations(self, run_key: Identity, revoked: Revoked) -> None:
        """Write a list under the next serial.

        Raises:
            UserError: it is too long
        """
        if max(len(revoked.tickets), len(revoked.peers)) > MAX_TICKETS_REVOKED:
            raise UserError(
                f"at most {MAX_TICKETS_REVOKED} invites and as many peers can be revoked: begin another run"
            )
        tickets, peers = tuple(sorted(revoked.tickets)), tuple(sorted(revoked.peers))
        record = Revocations(serial=revoked.serial + 1, tickets=tickets, peers=peers)
        replace_file(self._folder / REVOCATIONS, seal(record, run_key.peer_id, run_key), mode=0o644)

    def revoke(self, run_key: Identity, whom: str) -> str:
        """Revoke an invite with its peers, by its label, or one peer, by its id or the end of it.

        Returns:
            what was revoked, in words

        Raises:
            UserError: there is no such invite or several such peers, or too many were revoked
        """
        with self._locked():
            known = self.revocations(run_key.peer_id)
            tickets, peers = set(known.tickets), set(known.peers)
            of_label = {issued.key for issued in self.issued() if issued.label == whom}
            if of_label:
                tickets |= of_label
            else:
                whom = self._peer_by(whom)
                peers.add(whom)
            self._write_revocations(run_key, Revoked(known.serial, frozenset(tickets), frozenset(peers)))
        return f"the invite {whom} and all peers that came by it" if of_label else f"the peer {whom}"

    def _peer_by(self, text: str) -> str:
        """The peer of this id, or that has come and whose id ends like this, as `status` shows it.

        Raises:
            UserError: there is none, or several
        """
        if is_peer_id(text):
            return text
        come = {peer for peers in self.members().values() for peer in peers}
        found = sorted(peer for peer in come if len(text) >= LEAST_OF_ID and peer.endswith(text))
        if len(found) == 1:
            return found[0]
        if found:
            raise UserError(f"{text}: the ids of {len(found)} peers end like this, name more of it: {', '.join(found)}")
        labels = ", ".join(sorted({issued.label for issued in self.issued()})) or "none"
        raise UserError(
            f"{text}: neither the label of an invite (known: {labels}) nor the id of a peer, or its end, that has come"
        )
