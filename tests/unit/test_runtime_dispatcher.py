import asyncio

import anyio
import pytest

from swarm_peer.errors import NotServing
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.runtime.network.transport import Reply
from swarm_peer.wire.messages import AgreeCall, AveragePartCall, StateIndexCall

RUN = "0123456789abcdef" * 2
PART = {"manifest": RUN, "group": bytes(32), "part": 0}
STATE = {"manifest": RUN, "kind": "state"}
AGREE = {"manifest": RUN}


class Replica:
    """Waits with each answer until it may give it, or is cut off."""

    def __init__(self):
        self.under_way = 0
        self.may_answer = anyio.Event()

    async def answer(self, caller, call, tensors):
        self.under_way += 1
        try:
            await self.may_answer.wait()
            return Reply()
        finally:
            await anyio.lowlevel.cancel_shielded_checkpoint()
            self.under_way -= 1


@pytest.fixture
def replicas():
    return {stage: Replica() for stage in (1, 2)}


@pytest.fixture
def dispatcher(replicas):
    async def find_state(caller, call, tensors):
        return await replicas[call.of_stage].answer(caller, call, tensors)

    made = CallDispatcher(manifest_hash=RUN, calls={StateIndexCall: find_state})
    for stage, replica in replicas.items():
        made.add(stage, {AveragePartCall: replica.answer, AgreeCall: replica.answer})
    return made


async def test_a_replica_that_closes_answers_no_call_that_is_under_way_and_keeps_none(dispatcher, replicas):
    """They would hold its weights in memory, while the next stage is made."""
    calls = [
        ("average_part", PART | {"stage": 1}),
        ("state_index", STATE | {"of_stage": 1}),
        ("agree", AGREE),
        ("average_part", PART | {"stage": 2}),
        ("state_index", STATE | {"of_stage": 2}),
    ]
    calling = [asyncio.ensure_future(dispatcher("caller", op, fields, ())) for op, fields in calls]
    await anyio.wait_all_tasks_blocked()
    assert [replica.under_way for replica in replicas.values()] == [3, 2]
    await dispatcher.remove(1)
    assert [replica.under_way for replica in replicas.values()] == [0, 2]
    replicas[2].may_answer.set()
    outcomes = await asyncio.gather(*calling, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [NotServing] * 3 + [Reply] * 2
    with pytest.raises(NotServing, match="this peer serves stage 2, not 1"):
        await dispatcher("caller", *calls[0], ())
