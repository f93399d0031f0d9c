"""How many microbatches a replica takes at once."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class Capacity:
    """Microbatches that the device's memory has room for: as it was computed, and fewer once the device has run out.

    The computation leaves out what libraries need for themselves, and what other programs take later. Belongs to the
    event loop's thread.

    Args:
        microbatches: that have room by what is known of the model and the device
    """

    def __init__(self, microbatches: int):
        self.microbatches = microbatches

    def ran_out(self, inside: int) -> None:
        """The device has run out of memory: take fewer from now on, but at least one.

        Args:
            inside: microbatches that were inside the replica then
        """
        fewer = max(min(self.microbatches, inside) - 1, 1)
        if fewer < self.microbatches:
            self.microbatches = fewer
            log.warning("out_of_memory microbatches=%d until=this peer restarts or changes its stage", fewer)
