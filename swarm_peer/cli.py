"""swarm-peer: parse, load, run. Heavy imports come last, so that --help is quick."""

from __future__ import annotations

import io
import logging
import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from math import inf
from types import FrameType
from typing import Annotated

from cyclopts import App, ConsumeMultipleError, CycloptsError, MissingArgumentError, Parameter
from pydantic import ValidationError

from swarm_peer import __version__
from swarm_peer.addresses import check_metrics_place, check_own_addresses
from swarm_peer.commands.doctor import doctor
from swarm_peer.commands.pause import pause, resume
from swarm_peer.config_errors import describe
from swarm_peer.errors import Interrupted, SwarmError, UserError, machine_fault, missing_letters
from swarm_peer.initial_peers import check_initial_peers
from swarm_peer.logs import configure_logging, on_one_line
from swarm_peer.peer_options import PeerOptions

log = logging.getLogger(__name__)

# torch makes sockets there whose names add 34 bytes, and with its last byte a socket's path has at most 108.
MAX_TEMPORARY_BYTES = 73
STDOUT = 1  # its descriptor
# Variables that name that folder. Python passes over one that does not work, and torch does not.
TEMPORARY = ("TMPDIR", "TEMP", "TMP", "TEMPDIR")


def make_app(name: str, examples: str) -> App:
    """A program, with what its help says of defaults and at its end."""
    return App(
        name=name,
        version=f"{name} {__version__}",
        help_format="rst",
        help_epilogue=examples,
        default_parameter=Parameter(show_default=_shown_default),
    )


def add_commands(application: App, examples: Mapping[Callable[..., None], str]) -> None:
    """Give a program commands, each with its examples, a line each."""
    for command, example in examples.items():
        lines = "".join(f"\n| {line}" for line in example.splitlines())
        application.command(command, help_epilogue="Example:\n" + lines)


def _shown_default(value: object) -> str | None:
    """A default as it would be typed; None, which shows nothing, where it says nothing either."""
    if value is None or value is False or value in ((), inf):
        return None
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


# Of each command beside joining a run, in the order of use. Without one of them in front, options are of joining.
EXAMPLES: dict[Callable[..., None], str] = {
    doctor: "swarm-peer doctor\nswarm-peer doctor swarm-invite-lMQgavLkz0...",
    pause: "swarm-peer pause\nswarm-peer pause anna",
    resume: "swarm-peer resume",
}

app = make_app(
    "swarm-peer",
    """Example, with the invite that swarm-coordinator prints:
  swarm-peer --initial-peers swarm-invite-lMQgavLkz0...""",
)
app.usage = "Usage: swarm-peer [COMMAND] [OPTIONS]"
add_commands(app, EXAMPLES)


@app.default
def main(*, options: Annotated[PeerOptions, Parameter(name="*")]) -> None:
    """Join a training run and serve one stage of its model, until Ctrl+C or the run's end."""
    configure_logging(options.log_level)
    _exit_on_sigterm()
    check_initial_peers(options.initial_peers)
    check_own_addresses(options.host_maddrs, options.announce_maddrs)
    check_metrics_place(options.metrics_host, options.metrics_port)
    from swarm_peer.runtime.startup import run_peer

    run_peer(options)


def _exit_on_sigterm() -> None:
    """Exit at once on SIGTERM, until the peer takes part in the run and has something to hand over."""

    def leave(number: int, frame: FrameType | None) -> None:
        # A second one, such as that which `timeout` sends to the group, would interrupt the end with a traceback.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)


def run_app(application: App) -> Callable[[], None]:
    """A console entry point: an error that the user can mend is one line on stderr and exit code 2, no traceback."""

    def run() -> None:
        name = application.name[0]
        _open_streams()
        try:
            _check_surroundings()
            application(sys.argv[1:], exit_on_error=False, print_error=False, result_action="return_value")
        except (UserError, CycloptsError, ValidationError) as error:
            print(f"{name}: {on_one_line(_explain(name, error))}", file=sys.stderr)
            sys.exit(2)
        except SwarmError as error:
            print(f"{name}: {on_one_line(str(error))}", file=sys.stderr)
            sys.exit(130 if isinstance(error, Interrupted) else 1)
        except UnicodeEncodeError as error:
            if sys.getfilesystemencoding() == "utf-8":
                raise
            print(f"{name}: {missing_letters(error)}", file=sys.stderr)
            sys.exit(2)
        except BrokenPipeError:
            if not _has_no_reader(STDOUT):  # but a connection of the program has failed
                raise
            # The reader, such as `head`, has enough. Python would complain when it flushes at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
            sys.exit(1)
        except OSError as error:
            if (fault := machine_fault(error)) is None:
                raise
            log.debug("machine_fault", exc_info=True)
            print(f"{name}: {on_one_line(fault)}", file=sys.stderr)
            # Objects of libraries that are half made, such as uvloop's, complain as they go.
            sys.excepthook = sys.unraisablehook = _say_nothing
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(130)

    return run


def _open_streams() -> None:
    """Lead streams nowhere that whoever started this program has closed (2>&-).

    Python has None in their place. The next file to be opened would take the number of one, and libraries write there.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))


def _say_nothing(*_: object) -> None:
    """Python's way to show an error, for those of which one has been told the cause."""


def _has_no_reader(descriptor: int) -> bool:
    """Whether nobody reads any more what is written to a pipe."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _check_surroundings() -> None:
    """Check, and set right where possible, what of its surroundings a program cannot do without.

    Raises:
        UserError: something that the user can mend
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the terminal may know few letters, and models write any
    for option, value in pairwise(sys.argv[1:]):
        if option.startswith("--") and option != "--prompt" and not value:
            raise UserError(f"{option} has an empty value: give one, or leave it out (is a shell variable unset?)")
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the folder that this was started in is gone: change to another one") from error
    for argument in sys.argv[1:]:
        # Python reads bytes that are no text in the locale's encoding as lone surrogates.
        if any(0xD800 <= ord(character) <= 0xDFFF for character in argument):
            raise UserError(
                f"{argument!a} is no text in this shell's encoding ({sys.getfilesystemencoding()}): type it in "
                f"that encoding, take a UTF-8 locale (LC_ALL=C.UTF-8), or rename the file"
            )
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise UserError(f"{error.strerror}: name a folder that can be written to in TMPDIR") from error
    for name in TEMPORARY:
        if (named := os.environ.get(name)) and not os.access(named, os.W_OK | os.X_OK):
            raise UserError(f"{name} names {named}, which is no folder that can be written to: correct or unset it")
    if (length := len(os.fsencode(folder))) > MAX_TEMPORARY_BYTES:
        raise UserError(
            f"the path of the folder for temporary files has {length} bytes, and sockets in it can have "
            f"{MAX_TEMPORARY_BYTES}: name a folder with a shorter one in TMPDIR ({folder})"
        )


def _explain(program: str, error: UserError | CycloptsError | ValidationError) -> str:
    """An error that the user can mend, in one line."""
    # The check that failed says more than Cyclopts does: which value is wrong, and what to do.
    cause = error.__cause__ if isinstance(error, CycloptsError) else error
    if isinstance(cause, ValidationError):
        return describe(cause, name=_option)
    if isinstance(error, CycloptsError):
        command = " ".join((program, *(error.command_chain or ())))
        return f"{_explain_parsing(error)}; see {command} --help"
    return " ".join(str(error).split())


def _explain_parsing(error: CycloptsError) -> str:
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.argument.name
        if isinstance(error, ConsumeMultipleError) or error.keyword is not None:
            return f"{error.keyword or name} needs a value"
        about = " ".join((error.argument.parameter.help or "").split()).rstrip(".")
        return f"{name} is missing" + (f" ({about[:1].lower()}{about[1:]})" if about else "")
    # Cyclopts lists the first commands after its suggestion; --help lists all of them.
    return " ".join(str(error).split()).partition(" Available commands: ")[0].rstrip(".")


def _option(place: tuple[int | str, ...]) -> str:
    """The option that a place in PeerOptions is."""
    return f"--{place[0]}".replace("_", "-")


run = run_app(app)

if __name__ == "__main__":
    run()
