"""Hands each call of another peer to the part of this peer that answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anyio

from swarm_peer.errors import InvalidMessage, NotServing
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.network.transport import AnyBody, Handler, Reply, check_body
from swarm_peer.wire.messages import Body

# Stands for the stage of an operation that no replica has.
_NOBODY = -1


class CallDispatcher:
    """The CallHandler of a peer: checks each call, and hands it to the handler of its operation and stage.

    A call that names no stage goes to the peer's own handler of it, or else to that of the first replica. Belongs to
    the event loop's thread.
    """

    def __init__(self, *, manifest_hash: str, calls: Mapping[type[Body], Handler] | None = None):
        """Make the dispatcher of a peer without replicas.

        Args:
            calls: the handlers that belong to no stage, by the schemas of the calls' bodies
        """
        self._hash = manifest_hash
        self._calls: dict[int | None, dict[str, tuple[type[Body], Handler]]] = {}
        self._under_way: dict[anyio.CancelScope, int | None] = {}  # the stages that calls under way are about
        self._ended = Condition()
        self.add(None, calls or {})

    def add(self, stage: int | None, calls: Mapping[type[Body], Handler]) -> None:
        """Answer the calls for a stage from now on, beside those that are answered already.

        Args:
            stage: None for calls that belong to none
            calls: the handler of each operation, by the schema of its body
        """
        added = {schema.model_fields["op"].default: (schema, calls[schema]) for schema in calls}
        self._calls[stage] = self._calls.get(stage, {}) | added

    async def remove(self, stage: int) -> None:
        """Answer no more calls for a stage, and end those under way, which hold what the stage has in memory."""
        del self._calls[stage]
        left = [scope for scope, of_stage in self._under_way.items() if of_stage == stage]
        for scope in left:
            scope.cancel()
        await self._ended.wait_for(lambda: self._under_way.keys().isdisjoint(left))

    async def __call__(self, caller: str, op: str, body: dict[str, Any], tensors: Sequence[memoryview]) -> Reply:
        stages = [stage for stage in self._calls if stage is not None]
        answering = next((stage for stage, calls in self._calls.items() if op in calls), _NOBODY)
        if answering == _NOBODY:
            # Between two stages a peer has no replica, and all calls of replicas are unknown to it.
            raise InvalidMessage(f"unknown operation {op[:40]!r}") if stages else NotServing("this peer has no stage")
        call = check_run(self._calls[answering][op][0], body, self._hash)
        answering = getattr(call, "stage", answering)
        if op not in self._calls.get(answering, {}):
            raise NotServing(f"this peer serves stage {', '.join(map(str, stages))}, not {answering}")
        with anyio.CancelScope() as scope:
            self._under_way[scope] = getattr(call, "of_stage", answering)
            try:
                return await self._calls[answering][op][1](caller, call, tensors)
            finally:
                del self._under_way[scope]
                self._ended.notify()
        raise NotServing("this peer has left the stage meanwhile")


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
