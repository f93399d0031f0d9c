"""Every error that crosses a module boundary, in one tree.

SwarmError
├── UserError               an option or a setting cannot work: one line, exit code 2
│   └── HubFailed           the hub did not give something, perhaps for the moment: try again, or say so and end
├── Interrupted             a signal ended it before its work was done: exit code 130
└── CallError               a call to another peer failed
    ├── Busy                it is full, or does not know us yet -> try another peer now
    ├── RoundClosed         the peer has ended this round       -> stop: count the microbatch in a later round
    ├── NotServing          wrong stage, joining or draining    -> try another peer, avoid this one
    ├── PeerUnreachable     no connection, or it broke          -> try another peer, avoid this one
    ├── CallTimeout         no reply before the deadline        -> try another peer, avoid this one
    ├── InvalidMessage      the peer sent an invalid message    -> try another peer, avoid this one
    ├── NoRoom              neither memory nor disk has room    -> try another peer, or again later
    ├── NotAdmitted         the callee does not accept the pass -> try another peer, avoid this one
    └── HopFailed           a later stage could not be reached  -> try again, the peer itself is well
        └── NotFinite       numbers there were not finite       -> the same; if it always is so, the weights are broken
"""

from __future__ import annotations

import errno
import os
import sys
from typing import ClassVar


class SwarmError(Exception):
    """Base of all errors of this project."""


class UserError(SwarmError):
    """One line that says what is wrong, which value, and what to do."""


class HubFailed(UserError):
    """The Hugging Face hub did not give what was asked for: the name may be wrong, or the hub out of reach for now."""


class Interrupted(SwarmError):
    """Ctrl+C or SIGTERM, where going on would have been possible."""


class CallError(SwarmError):
    """A call to another peer failed; the class says what the caller does next."""

    code: ClassVar[str] = "failed"
    avoid: ClassVar[bool] = True  # is the peer itself to blame?


class Busy(CallError):
    """The callee holds as many microbatches as it may, or does not know yet that the caller may send it any."""

    code = "busy"
    avoid = False


class RoundClosed(CallError):
    """The callee has ended the round that the call belongs to.

    Attributes:
        round_number: the round that the callee is in; None if it is not known
    """

    code = "round_closed"
    avoid = False

    def __init__(self, message: str, round_number: int | None = None):
        super().__init__(message)
        self.round_number = round_number


class NotServing(CallError):
    """The callee does not serve the stage: it serves another one, is still joining, or is leaving."""

    code = "not_serving"


class PeerUnreachable(CallError):
    """There was no connection to the callee, or it broke."""

    code = "unreachable"


class CallTimeout(CallError):
    """No reply came before the deadline."""

    code = "timeout"


class InvalidMessage(CallError):
    """A message is malformed, badly signed, or contradicts the run."""

    code = "invalid"


class NoRoom(CallError):
    """There is no room for what a peer would send."""

    code = "no_room"


class NotAdmitted(CallError):
    """The callee does not let the caller take part in the run: it has no pass, or one that is not valid any more."""

    code = "not_admitted"


class HopFailed(CallError):
    """The callee could not reach a later stage; it is well itself."""

    code = "hop_failed"
    avoid = False


class NotFinite(HopFailed):
    """The numbers that the callee or a later stage has computed are not finite, or beyond reason."""

    code = "not_finite"


ERROR_BY_CODE: dict[str, type[CallError]] = {
    cls.code: cls
    for cls in (
        CallError,
        Busy,
        RoundClosed,
        NotServing,
        PeerUnreachable,
        CallTimeout,
        InvalidMessage,
        NotAdmitted,
        HopFailed,
        NotFinite,
    )
}


def first_line(error: Exception) -> str:
    """The first line of an exception's message, short enough to be part of a one-line message."""
    text = str(error).strip()
    return text.splitlines()[0][:200].rstrip(".") if text else type(error).__name__


def last_line(error: BaseException | None) -> str:
    """The last line of an exception's message, where the first ones only say what kind of thing is wrong."""
    return str(error).strip().splitlines()[-1].strip()[:200].rstrip(".") if str(error).strip() else type(error).__name__


def machine_fault(error: BaseException) -> str | None:
    """Say what this machine lacks, where, and what to do, if that has led to an error; None if something else has.

    Errors that the files themselves may be to blame for, such as a missing one, are none of these.
    """
    seen = set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, OSError) and cause.errno in _REMEDIES:
            place = f": {cause.filename}" if cause.filename else ""
            return f"{os.strerror(cause.errno)}{place}; {_REMEDIES[cause.errno]}"
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return None


def check_letters(path: str) -> None:
    """Check that a path can be had in this shell's encoding: Python says of one that cannot that there is none.

    Raises:
        UserError: it has letters that the encoding lacks
    """
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise UserError(missing_letters(error)) from error


def missing_letters(error: UnicodeEncodeError) -> str:
    """Say which letters of a path this shell's encoding lacks, and what to do."""
    letters = error.object[error.start : error.end]
    encoding = sys.getfilesystemencoding()
    return f"this shell's encoding ({encoding}) has no {letters!a}: take a UTF-8 locale (LC_ALL=C.UTF-8)"


_ANOTHER_FOLDER = "(--output for a run, --cache-dir for what is downloaded, TMPDIR for temporary files)"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), f"free some space, or name a folder elsewhere {_ANOTHER_FOLDER}"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), f"let this user use it, or name another folder {_ANOTHER_FOLDER}"),
    errno.EROFS: f"name a folder that can be written to {_ANOTHER_FOLDER}",
    errno.ENAMETOOLONG: f"name a folder with a shorter path {_ANOTHER_FOLDER}",
    **dict.fromkeys((errno.ENOLCK, errno.ENOSYS), f"name a folder whose file system has locks {_ANOTHER_FOLDER}"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "let this process open more files, with `ulimit -n 65536`"),
    **dict.fromkeys((errno.EIO, errno.ESTALE), f"mend that disk, or name a folder elsewhere {_ANOTHER_FOLDER}"),
    errno.ENOMEM: "end what else uses this machine's memory",
}


def forget_frames(error: BaseException) -> None:
    """Let go of what the frames hold that an error came through, and those that led to it.

    An error that a worker thread or a task group has raised refers to itself by way of them. Without this, states of
    gigabytes that frames hold would stay until the garbage collector finds them.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None
