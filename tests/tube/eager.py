"""What must hold where updates are delayed, and each replica goes on from its own gradient until the average is there.

An update is that of the mean over samples of what the members brought, each from weights of its own. That what a member
brings is of the samples that it has computed is held here, and that it is their gradient in
`tests/unit/test_runtime_modes.py`.
"""

from __future__ import annotations

from invariants import Invariants
from records import Place

from swarm_peer.protocol.epochs import Restart
from swarm_peer.protocol.log import Entry


class EagerInvariants(Invariants):
    """Watches a tube whose updates are delayed, and whose replicas go on from their own gradients."""

    def _check_update(self, place: Place, entry: Entry, restart: Restart) -> None:
        self._compare(place, entry, restart, self.records.mean(place[0], entry, self._zeros(place[0])))
