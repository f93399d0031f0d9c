"""The log of a program: lines of `time level event key=value` on stderr, whatever libraries and peers bring into it."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

log = logging.getLogger(__name__)

# Control characters and Unicode's ends of lines, by their escapes. Peers choose much of what the log and errors quote:
# a line break would begin a line that looks like the log's own, and a terminal would obey the rest.
ESCAPES = {code: ascii(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}


def on_one_line(text: str) -> str:
    """The text with escapes instead of control characters: one line that commands no terminal."""
    return text.translate(ESCAPES)


class LineFormatter(logging.Formatter):
    """Writes a message on one line, whatever it quotes, and a traceback on indented lines below."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        return on_one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """A traceback. Its error may quote line breaks, too, but no indented line looks like the log's own."""
        return "\n".join(f"  {on_one_line(line)}" for line in super().formatException(ei).split("\n"))


class RepeatFilter(logging.Filter):
    """Lets the same complaint through once a minute, if each look at the DHT, try to write or reading repeats it."""

    EVENTS = (
        *("invalid_record", "look_incomplete", "peers_not_kept"),
        *("config_keys_ignored", "images_left_out", "tokenizer_assumed", "tokenizer_knows_few", "python_warning"),
    )
    EVERY_S = 60.0
    MOST_REMEMBERED = 1024

    def __init__(self) -> None:
        super().__init__()
        self._next_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be written."""
        message = record.getMessage()
        if not message.startswith(self.EVENTS):
            return True
        if record.created < self._next_s.get(message, 0.0):
            return False
        if len(self._next_s) >= self.MOST_REMEMBERED:
            self._next_s.clear()
        self._next_s[message] = record.created + self.EVERY_S
        return True


def as_lines(handler: logging.Handler, level: str | int) -> None:
    """Have a handler of the log write what is at least so severe, as `time level event key=value`."""
    handler.setLevel(level)
    handler.addFilter(RepeatFilter())
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(message)s"))


class LibraryLogger(logging.Logger):
    """The logger of a library, whose errors go into our log.

    Some libraries, when they are imported, give theirs a handler that writes lines of another format, beside ours or in
    their place, and another level. That is without effect here.
    """

    propagate = property(lambda self: True, lambda self, value: None)

    def addHandler(self, hdlr: logging.Handler) -> None:
        """Ignored."""

    def setLevel(self, level: int | str) -> None:
        """Ignored."""

    @classmethod
    def adopt(cls, name: str) -> None:
        """Make a library's logger one of these, before or after the library has been imported."""
        logger = logging.getLogger(name)
        logger.setLevel(logging.ERROR)
        logger.handlers.clear()
        logger.__class__ = cls


def _log_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Python's way to show a warning, as a line of the log."""
    log.warning("python_warning category=%s place=%s:%d text=%s", category.__name__, filename, lineno, message)


def configure_logging(level: str) -> None:
    """Log to stderr as `time level event key=value`; other libraries log errors alone, and show no bars in a file."""
    logging.addLevelName(logging.WARNING, "WARN")  # as hivemind does, when it is imported: so from the first line on
    handler = logging.StreamHandler(sys.stderr)
    as_lines(handler, level.upper())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    for name in ("datasets", "transformers", "huggingface_hub", "httpx", "httpx2", "fsspec", "matplotlib", "torch"):
        LibraryLogger.adopt(name)
    LibraryLogger.adopt("bitsandbytes")  # on some CPUs it asks for a package that nobody needs here
    warnings.showwarning = _log_warning
    if not sys.stderr.isatty():
        for variable in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(variable, "1")
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the tokenizers warn about every fork otherwise
    os.environ.setdefault("USE_LEGACY_BFLOAT16", "0")
    # Child processes of this one's interpreter import no modules from the folder that it was started in.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
