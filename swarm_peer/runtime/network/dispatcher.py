"""Hands each call of another peer to the part of this peer that answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swarm_peer.errors import InvalidMessage, NotServing
from swarm_peer.runtime.network.transport import AnyBody, Handler, Reply, check_body
from swarm_peer.wire.messages import Body


class CallDispatcher:
    """The CallHandler of a peer: checks each call, and hands it to the handler of its operation."""

    def __init__(self, *, manifest_hash: str, stage: int, calls: Mapping[type[Body], Handler]):
        """Make the dispatcher of one stage.

        Args:
            calls: the handler of each operation, by the schema of its body
        """
        self._hash = manifest_hash
        self._stage = stage
        self._calls = {schema.model_fields["op"].default: (schema, handler) for schema, handler in calls.items()}

    async def __call__(self, caller: str, op: str, body: dict[str, Any], tensors: Sequence[memoryview]) -> Reply:
        known = self._calls.get(op)
        if known is None:
            raise InvalidMessage(f"unknown operation {op[:40]!r}")
        schema, handler = known
        call = check_run(schema, body, self._hash)
        stage = getattr(call, "stage", self._stage)
        if stage != self._stage:
            raise NotServing(f"this peer serves stage {self._stage}, not {stage}")
        return await handler(caller, call, tensors)


def check_run(schema: type[AnyBody], body: dict[str, Any], manifest_hash: str) -> AnyBody:
    """Validate the body of a call.

    Raises:
        InvalidMessage: the body does not fit the schema, or the call is for another run
    """
    call = check_body(schema, body)
    manifest = getattr(call, "manifest", manifest_hash)
    if manifest != manifest_hash:
        raise InvalidMessage(f"call for the run with manifest {manifest}; this one has {manifest_hash}")
    return call
