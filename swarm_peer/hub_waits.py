"""Says what is waited for where the Hugging Face hub does not answer: its client says nothing for half a minute."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

# A hub that is within reach has answered by then, and most files have come.
TOLD_AFTER_S = 4.0


@contextmanager
def told_if_slow(what: str) -> Iterator[None]:
    """Say so in the log, once, if the context is open for longer than TOLD_AFTER_S seconds.

    Args:
        what: that is asked for, such as a setting with its value
    """
    reason = "it sends large files, or cannot be reached (check the network, or set HF_HUB_OFFLINE=1)"
    timer = threading.Timer(TOLD_AFTER_S, log.warning, ("hub_is_slow for=%s reason=%s", what, reason))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
