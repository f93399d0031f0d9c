"""Mistakes in the core that schedules and walks have to find: each is the class with one thing wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swarm_peer.protocol.epochs import Certified
from swarm_peer.protocol.membership import NO_BALLOT, Membership
from swarm_peer.protocol.messages import Fetch, News
from swarm_peer.protocol.statements import KeySigned


class ForgetsPromises(Membership):
    """A voter promises an earlier ballot after a later one."""

    def _handle_prepare(self, ballot: Any) -> None:
        self._promised = NO_BALLOT
        super()._handle_prepare(ballot)


class OverlooksWhatWasAccepted(Membership):
    """A proposer proposes its own wishes where a voter has accepted others."""

    def _handle_promise(self, sender: Any, accepted: Any) -> None:
        super()._handle_promise(sender, None)


class AcceptsEarlierBallots(Membership):
    """A voter accepts in a ballot that it has promised not to accept in."""

    def _handle_accept(self, ballot: Any, wishes: Any) -> None:
        self._promised = NO_BALLOT
        super()._handle_accept(ballot, wishes)


class OneVoteIsEnough(Membership):
    """A proposer takes one vote for a quorum."""

    def _handle_vote(self, accepted: Any) -> None:
        if self._proposed is not None and accepted.body.ballot == self._ballot:
            self._announce(Certified(self._proposed[0], (accepted,)))


class ListensToOldEpochs(Membership):
    """A message of an older epoch has its effect."""

    def receive(self, now_s: float, message: Any) -> Any:
        """See Membership."""
        if message.epoch < self.epoch.id and not isinstance(message.body, News | Fetch):
            self._now_s = now_s
            self._handle(message.sender, message.body)
            return self._take_out()
        return super().receive(now_s, message)


class KeepsWhatItAccepted(Membership):
    """A voter takes what it has accepted for one number for the next one's."""

    def _begin_epoch(self) -> None:
        kept = getattr(self, "_accepted", None)
        super()._begin_epoch()
        self._accepted = kept


class TermsComeTwice(Membership):
    """A coordinator that has started again signs a term that an earlier life of it has signed."""

    def _announce(self, certified: Any) -> None:
        if certified.is_of_key:
            assert self._sign_as_key is not None
            term = certified.epoch.id._replace(author=self.me._replace(life=0))
            epoch = replace(certified.epoch, id=term)
            certified = Certified(epoch, (self._sign_as_key(KeySigned(epoch.hash)),))
        super()._announce(certified)


class FindsNobodySilent(Membership):
    """A voter puts nobody out."""

    def _silent(self) -> Any:
        return frozenset()


class MeetsNobody(Membership):
    """Two sides that do not know each other any more never meet."""

    def tick(self, now_s: float) -> Any:
        """See Membership."""
        self.acquaintances = ()
        return super().tick(now_s)


# With walks and schedules that find them.
BY_WALKS = {ForgetsPromises: 562, OverlooksWhatWasAccepted: 80, AcceptsEarlierBallots: 158}
BY_SCHEDULES = {OneVoteIsEnough: 48, ListensToOldEpochs: 158, KeepsWhatItAccepted: 80, FindsNobodySilent: 3}
# In 70 schedules no coordinator starts again and then decides in a term of its own that is not the newest, and no two
# sides part for good.
NOT_FOUND = (TermsComeTwice, MeetsNobody)
