"""Every error that crosses a module boundary, in one tree.

SwarmError
├── UserError               what a person typed or configured cannot work: one line, exit code 2
├── Interrupted             a signal ended it before its work was done: exit code 130
└── CallError               a call to another peer failed
    ├── Busy                the peer is full                    -> try another peer now
    ├── StepClosed          the peer is past this global step   -> stop: the microbatch belongs to a later step
    ├── NotServing          wrong stage, joining or draining    -> try another peer, avoid this one
    ├── PeerUnreachable     no connection, or it broke          -> try another peer, avoid this one
    ├── CallTimeout         no reply before the deadline        -> try another peer, avoid this one
    ├── InvalidMessage      the peer sent what cannot be right  -> try another peer, avoid this one
    └── HopFailed           a later stage could not be reached  -> try again, the peer itself is well
"""

from typing import ClassVar


class SwarmError(Exception):
    """Base of all errors of this project."""


class UserError(SwarmError):
    """One line that says what is wrong, which value, and what to do."""


class Interrupted(SwarmError):
    """Ctrl+C or SIGTERM, where going on would have been possible."""


class CallError(SwarmError):
    """A call to another peer failed; the class says what the caller does next."""

    code: ClassVar[str] = "failed"
    retry: ClassVar[bool] = True  # may the same microbatch be tried on another peer?
    avoid: ClassVar[bool] = True  # is the peer itself to blame?


class Busy(CallError):
    code = "busy"
    avoid = False


class StepClosed(CallError):
    """The callee has closed the step that the call belongs to.

    Attributes:
        step: the callee's own global step, where it is known
    """

    code = "step_closed"
    retry = False
    avoid = False

    def __init__(self, message: str, step: int | None = None):
        super().__init__(message)
        self.step = step


class NotServing(CallError):
    code = "not_serving"


class PeerUnreachable(CallError):
    code = "unreachable"


class CallTimeout(CallError):
    code = "timeout"


class InvalidMessage(CallError):
    code = "invalid"


class HopFailed(CallError):
    code = "hop_failed"
    avoid = False


ERROR_BY_CODE: dict[str, type[CallError]] = {
    cls.code: cls
    for cls in (
        CallError,
        Busy,
        StepClosed,
        NotServing,
        PeerUnreachable,
        CallTimeout,
        InvalidMessage,
        HopFailed,
    )
}
