"""swarm-peer: parse, load, run. Heavy imports come last, so that --help is quick."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter
from pydantic import ValidationError

from swarm_peer import __version__
from swarm_peer.config import PeerOptions, describe
from swarm_peer.errors import Interrupted, SwarmError, UserError

app = App(name="swarm-peer", version=__version__, help_format="plaintext")


@app.default
def main(options: Annotated[PeerOptions, Parameter(name="*")]) -> None:
    """Join a training run and serve one stage of its model, until Ctrl+C or the run's end."""
    configure_logging(options.log_level)
    _exit_on_sigterm()
    from swarm_peer.runtime.startup import run_peer

    run_peer(options)


def _exit_on_sigterm() -> None:
    """Exit at once on SIGTERM, until the peer takes part in the run and has something to hand over."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))


def configure_logging(level: str) -> None:
    """Log to stderr as `time level event key=value`; other libraries log errors alone."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    for name in ("hivemind", "datasets", "transformers", "httpx", "httpx2", "fsspec", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the tokenizers warn about every fork otherwise
    os.environ.setdefault("USE_LEGACY_BFLOAT16", "0")


def run_app(application: App) -> Callable[[], None]:
    """A console entry point: an error that the user can mend is one line on stderr and exit code 2, no traceback."""

    def run() -> None:
        try:
            application(sys.argv[1:], exit_on_error=False, print_error=False, result_action="return_value")
        except (UserError, CycloptsError, ValidationError) as error:
            # The check that failed says more than Cyclopts does: which value is wrong, and what to do.
            cause = error.__cause__ if isinstance(error, CycloptsError) and error.__cause__ else error
            text = describe(cause) if isinstance(cause, ValidationError) else " ".join(str(error).split())
            print(f"{application.name[0]}: {text}", file=sys.stderr)
            sys.exit(2)
        except SwarmError as error:
            print(f"{application.name[0]}: {error}", file=sys.stderr)
            sys.exit(130 if isinstance(error, Interrupted) else 1)
        except KeyboardInterrupt:
            sys.exit(130)

    return run


run = run_app(app)

if __name__ == "__main__":
    run()
