"""Frames: how one message and its tensors travel on a stream.

A frame is `[header length: u32][payload length: u64][header: msgpack][payload: the tensors, one after the other]`. It
states its length because a dropped libp2p stream reads as a plain end of stream: a shorter frame was cut off.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgpack

from swarm_peer.errors import InvalidMessage
from swarm_peer.wire.packing import unpack

PREFIX = struct.Struct("!IQ")
# The largest part of a header is the progress counts of some hundred stage-0 peers.
MAX_HEADER_BYTES = 2**20
MAX_TENSORS = 8


class FrameType(IntEnum):
    """The kinds of frames, by their number on the wire."""

    CALL = 0
    REPLY = 1
    ERROR = 2
    CANCEL = 3
    HELLO = 4  # the caller's pass: the first frame of each stream


@dataclass(slots=True)
class Frame:
    """One message on a stream. `op` names the operation of a call; replies and errors carry the id of their call."""

    type: FrameType
    call_id: int
    op: str = ""
    body: dict[str, Any] | None = None
    tensors: Sequence[memoryview] = ()

    def head(self) -> bytes:
        """All bytes of the frame but its tensors."""
        sizes = [tensor.nbytes for tensor in self.tensors]
        header = msgpack.packb([int(self.type), self.call_id, self.op, self.body, sizes])
        return bytes(PREFIX.pack(len(header), sum(sizes)) + header)


def parse_lengths(prefix: bytes, max_payload_bytes: int, max_header_bytes: int = MAX_HEADER_BYTES) -> tuple[int, int]:
    """The lengths of header and payload, checked before anything is allocated.

    Raises:
        InvalidMessage: one of them is too long
    """
    header_bytes, payload_bytes = PREFIX.unpack(prefix)
    if header_bytes > max_header_bytes or payload_bytes > max_payload_bytes:
        raise InvalidMessage(
            f"frame of {header_bytes} + {payload_bytes} bytes; at most {max_header_bytes} + {max_payload_bytes} go"
        )
    return header_bytes, payload_bytes


def parse_frame(header: bytes, payload: memoryview) -> Frame:
    """Build a frame from its two parts; the tensors are views of the payload.

    Raises:
        InvalidMessage: the header is malformed or too large to build, or its sizes do not add up to the payload
    """
    match unpack(header, "header"):
        case [int() as kind, int() as call_id, str() as op, dict() | None as body, tuple() as sizes] if (
            0 <= kind <= FrameType.HELLO
            and len(sizes) <= MAX_TENSORS
            and all(isinstance(size, int) and size >= 0 for size in sizes)
            and sum(sizes) == len(payload)
        ):
            tensors, offset = [], 0
            for size in sizes:
                tensors.append(payload[offset : offset + size])
                offset += size
            return Frame(FrameType(kind), call_id, op, body, tensors)
        case _:
            raise InvalidMessage("header is not [type, id, op, body, sizes that add up to the payload]")


def revocations_in(hello: Frame) -> bytes:
    """The list of revocations in the first frame of a stream.

    Raises:
        InvalidMessage: the frame is another one
    """
    told = (hello.body or {}).get("revocations")
    if hello.type is not FrameType.HELLO or hello.tensors or not isinstance(told, bytes):
        raise InvalidMessage("a stream begins with its caller's pass, and what was revoked")
    return told
