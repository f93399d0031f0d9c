"""What the code above needs of a network: `call(peer, op, body, tensors) -> reply`, with a deadline and cancellation.

The only implementation that knows of libp2p is p2p_transport.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgpack
from pydantic import ValidationError

from swarm_peer.config import describe
from swarm_peer.errors import ERROR_BY_CODE, CallError, InvalidMessage, StepClosed
from swarm_peer.wire.messages import Body

AnyBody = TypeVar("AnyBody", bound=Body)


@dataclass(slots=True)
class Reply:
    body: dict[str, Any] = field(default_factory=dict)
    tensors: Sequence[memoryview] = ()


# (caller's proven peer id, op, body, tensors) -> reply; a CallError that it raises reaches the caller as such.
CallHandler = Callable[[str, str, dict[str, Any], Sequence[memoryview]], Awaitable[Reply]]
# The same for one kind of call, its body checked: (caller, body, tensors) -> reply
Handler = Callable[[str, Any, Sequence[memoryview]], Awaitable[Reply]]


class Transport(ABC):
    """Calls between peers. All methods belong to the event loop's thread.

    Attributes:
        unreachable: told of each peer that cannot be dialled
    """

    peer_id: str
    unreachable: Callable[[str], None] = staticmethod(lambda peer_id: None)

    @abstractmethod
    async def call(self, peer_id: str, body: Body, tensors: Sequence[memoryview] = (), *, timeout_s: float) -> Reply:
        """Call a peer and wait for its reply.

        If the caller is cancelled, the callee is told and cancels its handler.

        Raises:
            CallTimeout: no reply within `timeout_s`
            PeerUnreachable: no connection, or it broke before the reply was whole
            CallError: any other class of the tree, as the callee answered it
        """

    @abstractmethod
    async def serve(self, handler: CallHandler) -> None:
        """Answer calls from now on; once."""

    @abstractmethod
    async def answered(self) -> None:
        """Wait until the replies to all calls that are under way here are written."""


def check_body(model: type[AnyBody], fields: dict[str, Any] | None) -> AnyBody:
    """Validate what arrived against its schema.

    Raises:
        InvalidMessage
    """
    try:
        return model.model_validate(fields or {})
    except ValidationError as error:
        raise InvalidMessage(f"{model.__name__}: {describe(error):.300}") from error


def error_body(error: CallError) -> dict[str, Any]:
    """How a CallError travels."""
    step = error.step if isinstance(error, StepClosed) else None
    return {"code": error.code, "message": str(error)[:500], "step": step}


def error_from_body(body: dict[str, Any] | None) -> CallError:
    match body:
        case {"code": str() as code, "message": str() as message, "step": int() | None as step}:
            error_class = ERROR_BY_CODE.get(code, CallError)
            message = message[:500]
            return StepClosed(message, step) if error_class is StepClosed else error_class(message)
        case _:
            return InvalidMessage("the peer answered with an error that is none of ours")


def pack_fields(model: Body) -> bytes:
    return bytes(msgpack.packb(model.model_dump()))


def unpack_fields(model: type[AnyBody], data: memoryview) -> AnyBody:
    """Inverse of pack_fields, for bodies that are too long for a header.

    Raises:
        InvalidMessage
    """
    try:
        return check_body(model, msgpack.unpackb(data, use_list=False))
    except (ValueError, msgpack.UnpackException) as error:
        raise InvalidMessage(f"{model.__name__}: no msgpack ({error})") from error
