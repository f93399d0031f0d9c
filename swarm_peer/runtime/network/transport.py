"""The interface of the network: `call(peer, body, tensors) -> reply`, with a deadline and with cancellation.

The only implementation that knows of libp2p is p2p_transport.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgpack
from pydantic import ValidationError

from swarm_peer.config_errors import describe
from swarm_peer.errors import ERROR_BY_CODE, CallError, InvalidMessage, RoundClosed
from swarm_peer.policy.run_progress import MAX_ROUND
from swarm_peer.runtime.network.exchanged import Exchanged
from swarm_peer.wire.messages import Body
from swarm_peer.wire.packing import MAX_BYTES, unpack

AnyBody = TypeVar("AnyBody", bound=Body)


@dataclass(slots=True)
class Reply:
    """The answer to a call: the fields of its body, and tensors as bytes."""

    body: dict[str, Any] = field(default_factory=dict)
    tensors: Sequence[memoryview] = ()


# (the caller's proven peer id, operation, body, tensors) -> reply. If it raises a CallError, so does the call.
CallHandler = Callable[[str, str, dict[str, Any], Sequence[memoryview]], Awaitable[Reply]]
# The same for one operation, with a validated body: (caller, body, tensors) -> reply.
Handler = Callable[[str, Any, Sequence[memoryview]], Awaitable[Reply]]


class Transport(ABC):
    """Calls between peers. All methods belong to the event loop's thread.

    Attributes:
        peer_id: id of this peer
    """

    peer_id: str

    @abstractmethod
    async def call(self, peer_id: str, body: Body, tensors: Sequence[memoryview] = (), *, timeout_s: float) -> Reply:
        """Call a peer and wait for its reply.

        If the caller is cancelled, the callee is told and cancels its handler.

        Raises:
            CallTimeout: no reply within `timeout_s`
            PeerUnreachable: no connection, or it broke before the whole reply had arrived
            CallError: of the class that the callee answered with
        """

    @abstractmethod
    async def serve(
        self,
        handler: CallHandler,
        on_unreachable: Callable[[str], None] = lambda peer_id: None,
        is_member: Callable[[str], bool] = lambda peer_id: True,
    ) -> None:
        """Answer calls with this handler from now on, and no more with the one before.

        Args:
            on_unreachable: called with the id of each peer that cannot be reached when this one calls it
            is_member: whether a caller is known to take part in the run; all others together get the room of one
        """

    @abstractmethod
    async def answered(self) -> None:
        """Wait until this peer has written its replies to all calls that are under way."""

    def busiest(self, most: int) -> Sequence[Exchanged]:
        """The peers with which this one exchanges most; none where that is not counted."""
        return ()


def check_body(model: type[AnyBody], fields: dict[str, Any] | None) -> AnyBody:
    """Validate the fields of a body that has arrived.

    Raises:
        InvalidMessage: they do not fit the schema
    """
    try:
        return model.model_validate(fields or {})
    except ValidationError as error:
        raise InvalidMessage(f"{model.__name__}: {describe(error):.300}") from error


def error_body(error: CallError) -> dict[str, Any]:
    """The body that carries a CallError to the caller."""
    round_number = error.round_number if isinstance(error, RoundClosed) else None
    return {"code": error.code, "message": str(error)[:500], "round_number": round_number}


def error_from_body(body: dict[str, Any] | None) -> CallError:
    """The CallError that a body carries; InvalidMessage if the body is malformed."""
    match body:
        case {"code": str() as code, "message": str() as message, "round_number": int() | None as round_number}:
            error_class = ERROR_BY_CODE.get(code, CallError)
            message = message[:500]
            is_round = round_number is not None and 0 <= round_number <= MAX_ROUND
            if error_class is RoundClosed:
                return RoundClosed(message, round_number if is_round else None)
            return error_class(message)
        case _:
            return InvalidMessage("the peer answered with a malformed error")


def pack_fields(model: Body) -> bytes:
    """Encode a body that is too long for a frame's header, to be sent as a tensor."""
    return bytes(msgpack.packb(model.model_dump()))


def unpack_fields(model: type[AnyBody], data: memoryview, *, max_bytes: int = MAX_BYTES) -> AnyBody:
    """Decode a body that `pack_fields` encoded.

    Args:
        max_bytes: see unpack

    Raises:
        InvalidMessage: the bytes are no msgpack, or do not fit the schema
    """
    return check_body(model, unpack(data, model.__name__, max_bytes=max_bytes))
