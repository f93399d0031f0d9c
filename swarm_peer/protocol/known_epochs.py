"""The epochs that one seat knows to have been chosen, and which of them it tells others. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from swarm_peer.protocol.epochs import KEPT_EPOCHS, MAX_VOTERS, Certified, Epoch, without_old
from swarm_peer.protocol.statements import EpochId, KeySigned, Sign

# The holder of the run key tells all of each epoch with such a number, signed with the key.
ANCHORED_EVERY = KEPT_EPOCHS // 2
# Places and statements of epochs in one message of 1 MiB; a seat that has missed more asks again.
MAX_TOLD = 2500


class KnownEpochs:
    """The epochs that a seat has followed, and some that it has heard of since.

    Args:
        first: an epoch that the run key has signed
        sign_as_key: signs with the run key; None if this process does not hold it

    Attributes:
        newest: the one that the seat is in
        named: the epochs of what the seat may have to show others, which it does not forget
        kept: others that it remembers
    """

    def __init__(self, first: Certified, sign_as_key: Sign | None = None):
        self.newest = first.epoch
        self.kept = KEPT_EPOCHS
        self._chain = [first]
        self._followed = {first.epoch.id: first}
        # Followed or not: those that are certified by the one before in a message, or by the key; the last heard last.
        self._past = {first.epoch.id: first}
        self._num_needed = 0
        self.named: Callable[[], Iterable[EpochId]] = tuple
        self._sign_as_key = sign_as_key

    @property
    def chain(self) -> tuple[Certified, ...]:
        """Those that the seat has followed last, in their order."""
        return tuple(self._chain)

    @property
    def num_past(self) -> int:
        """How many are kept besides."""
        return len(self._past)

    def epoch_of(self, epoch_id: EpochId) -> Epoch | None:
        """One that has been chosen and is not forgotten, by its id."""
        known = self._certified(epoch_id)
        return known.epoch if known is not None else None

    def _certified(self, epoch_id: EpochId) -> Certified | None:
        return self._followed.get(epoch_id) or self._past.get(epoch_id)

    def learn(self, epochs: Iterable[Certified]) -> bool:
        """Follow each of these epochs that is certified and newer; remember those that are older.

        Returns:
            whether the newest one has changed
        """
        before: Epoch | None = None
        has_changed = False
        for certified in epochs:
            epoch, own = certified.epoch, self.newest
            if len(certified.certificate) > MAX_VOTERS + certified.is_of_key:  # all would tell them on
                continue
            is_certified = certified.is_of_key or (before is not None and certified.follows(before))
            if epoch.id > own.id and (certified.is_of_key or certified.follows(own)):
                self._follow([*self._chain, self._anchored(certified)])
            elif epoch.id == own.id and self._takes_the_place_of_newest(certified):
                self._follow([*self._chain[:-1], certified])
            elif certified.is_of_key and self._lacks_key_of(epoch):
                # A place to begin from: those before it are not told any more.
                self._follow([certified if each.epoch.id == epoch.id else each for each in self._chain])
            # A seat that was a voter once can certify others than have followed, also later ones than the newest.
            elif is_certified and epoch.id <= own.id and self.epoch_of(epoch.id) in (None, epoch):
                self._remember(certified if certified.is_of_key else self._certified(epoch.id) or certified)
            else:
                continue
            before, has_changed = epoch, has_changed or self.newest != own
        if len(self._past) > self.kept + self._num_needed:
            self._forget()
        return has_changed

    def _lacks_key_of(self, epoch: Epoch) -> bool:
        """Whether an epoch is in the chain without the run key's signature."""
        known = self._followed.get(epoch.id)
        return known is not None and known.epoch == epoch and not known.is_of_key

    def _takes_the_place_of_newest(self, certified: Certified) -> bool:
        """Two epochs of one id are a liar's work: all take the one that the run key has signed, or else the same one.

        Where few tickets choose, one of them may do so alone, at any time: there the first stays.
        """
        own, before = self._chain[-1], self._chain[-2:][0].epoch
        is_chosen = certified.is_of_key or (before.is_divided and certified.follows(before))
        return is_chosen and _rank(certified) < _rank(own)

    def _follow(self, chain: list[Certified]) -> None:
        for each in chain:
            if self._past.get(each.epoch.id) is not each:
                self._remember(each)
        self._chain = without_old(chain, self.kept)
        self.newest = self._chain[-1].epoch
        self._followed = {each.epoch.id: each for each in self._chain}

    def _remember(self, certified: Certified) -> None:
        self._past.pop(certified.epoch.id, None)
        self._past[certified.epoch.id] = certified

    def _forget(self) -> None:
        """Forget what nobody may have to show. The rest keeps its way to the run key, or nobody would believe it."""
        needed = {*self._followed, *self.named()}
        newest = [past for past in self._past if past not in needed][-self.kept :]
        ways = {each.epoch.id for past in (*needed, *newest) for each in self.up_to(past)}
        self._past = {past: each for past, each in self._past.items() if past in ways or past in needed}
        self._num_needed = max(len(self._past) - self.kept, 0)

    @property
    def to_anchor(self) -> tuple[Certified, ...]:
        """The newest epoch that this process has signed with the run key, while others' may be far before it.

        Those who hear of it need not keep those before it. Where its own coordinator votes, they hear of each.
        """
        is_due = self._sign_as_key is not None and self.newest.id.number % ANCHORED_EVERY == 0
        return (self._chain[-1],) if is_due and self.newest.id.number else ()

    def _anchored(self, certified: Certified) -> Certified:
        """The epoch with the run key's signature besides, if this process holds the key: a place to begin from."""
        if self._sign_as_key is None or certified.is_of_key:
            return certified
        signed = self._sign_as_key(KeySigned(certified.epoch.hash))
        return Certified(certified.epoch, (*certified.certificate, signed))

    def since(self, epoch_id: EpochId) -> tuple[Certified, ...]:
        """Those that come after one: as many as one message can hold."""
        told, size = list[Certified](), 0
        for certified in (each for each in self._chain if each.epoch.id > epoch_id):
            size += len(certified.epoch.places) + len(certified.certificate)
            if told and size > MAX_TOLD:
                break
            told.append(certified)
        return tuple(told)

    def up_to(self, epoch_id: EpochId) -> tuple[Certified, ...]:
        """One, after those before it from one that the run key has signed; nothing if that is not known."""
        told = list[Certified]()
        while (known := self._certified(epoch_id)) is not None:
            told.insert(0, known)
            if known.is_of_key:
                return tuple(told)
            epoch_id = epoch_id._replace(number=epoch_id.number - 1)
        return ()


def _rank(certified: Certified) -> tuple[bool, str]:
    return not certified.is_of_key, certified.epoch.hash
