"""The coordinator's log in the folder of its run, for when the terminal is gone."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from coordinator.watch.promises import Promises
from swarm_peer.errors import SwarmError
from swarm_peer.logs import as_lines

log = logging.getLogger(__name__)

LOG_FILE = "coordinator.log"
# A full file is renamed to coordinator.log.1, and that to coordinator.log.2, which goes.
MAX_BYTES = 10 * 2**20
OLD_FILES = 2


@contextmanager
def logged_to(output: Path, promises: Promises) -> Iterator[None]:
    """While the context is open, write log lines from level info on to a file in this folder, also those not printed.

    The error that ends the context is written there as well.

    Args:
        promises: told if lines are lost
    """
    file = _LogFile(output / LOG_FILE, promises)
    root, level = logging.getLogger(), logging.getLogger().level
    as_lines(file, logging.INFO)
    root.addHandler(file)
    root.setLevel(min(level, logging.INFO))
    try:
        yield
    except Exception as error:
        is_bug = not isinstance(error, SwarmError)
        # In the file alone: the program prints it.
        file.handle(
            log.makeRecord(
                log.name, logging.ERROR, __file__, 0, "ended reason=%s", (error,), sys.exc_info() if is_bug else None
            )
        )
        raise
    finally:
        root.setLevel(level)
        root.removeHandler(file)
        with suppress(OSError):  # of a full disk, which the lines before have told of
            file.close()


class _LogFile(RotatingFileHandler):
    """Says once that the file cannot be written to, rather than with a traceback for each line."""

    def __init__(self, path: Path, promises: Promises):
        super().__init__(path, maxBytes=MAX_BYTES, backupCount=OLD_FILES, encoding="utf-8", delay=True)
        self._promises = promises
        self._has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Tell of the first line that is lost."""
        self._promises.broken(f"{LOG_FILE} lacks lines", sys.exc_info()[1])
        if not self._has_failed:
            self._has_failed = True
            log.warning("log_not_kept path=%s reason=%s", self.baseFilename, sys.exc_info()[1])
