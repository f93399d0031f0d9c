"""The log that a seat's work is of, and what the seat brought to entries that another log may lack. Pure.

A seat may be put out just after entries to which it brought something: the others then go on without these entries
(docs/protocol.md, "Epochs"). It learns so from the log that it follows next.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm_peer.protocol.log import Contribution, Log, is_lacking
from swarm_peer.protocol.statements import Seat


class FollowedLog:
    """A seat's log, over all of the logs that take one another's place.

    Attributes:
        log: the one that the seat follows; None before the first
    """

    def __init__(self) -> None:
        self.log: Log | None = None
        # Contributions in entries of earlier logs, with the entries' rounds, by the entries' hashes.
        self._brought: dict[str, tuple[int, Sequence[Contribution]]] = {}

    def follow(self, log: Log, me: Seat) -> None:
        """Follow another log, or the same one still.

        Args:
            me: the seat, also in the log before
        """
        if self.log is None or self.log.restart != log.restart:
            self._brought = {}  # a run that goes back gives up the updates since then, of all seats
        elif self.log is not log:
            for entry in (committed.entry for committed in self.log.committed):
                brings = [each for part in entry.cut.parts if part.seat == me for each in part.brings]
                self._brought[entry.hash] = entry.cut.round, brings
        self.log = log

    def take_lost(self) -> list[Contribution]:
        """Return, once, this seat's contributions in entries that the log has others in the place of.

        The log keeps the newest entries alone. It is taken to hold all older ones.
        """
        if self.log is None or not self._brought:
            return []
        decided = {entry: each for entry, each in self._brought.items() if each[0] < self.log.next_round}
        self._brought = {entry: each for entry, each in self._brought.items() if entry not in decided}
        held = {each for committed in self.log.committed for each in committed.entry.cut.brings}
        lacking = (brings for entry, (number, brings) in decided.items() if is_lacking(self.log, entry, number + 1))
        return [each for brings in lacking for each in brings if each not in held]
