"""Tasks that wait for what other tasks change."""

import anyio
import pytest

from swarm_peer.runtime.condition import Condition


async def test_those_that_wait_for_what_holds_go_on():
    changed, present, went_on = Condition(), {0}, []

    async def wait(number):
        await changed.wait_for(lambda: number in present)
        went_on.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(wait, number)
        await anyio.wait_all_tasks_blocked()
        assert went_on == [0], "it holds already"
        present.add(2)
        changed.notify()
        await anyio.wait_all_tasks_blocked()
        assert went_on == [0, 2]
        present.add(1)
        changed.notify()
    assert went_on == [0, 2, 1]


async def test_what_holds_no_more_when_its_turn_comes_is_waited_for():
    changed, free, taken = Condition(), [1], []

    async def take():
        await changed.wait_for(lambda: bool(free))
        taken.append(free.pop())
        changed.notify()

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(take)
        await anyio.wait_all_tasks_blocked()
        assert taken == [1]
        free.append(2)
        changed.notify()
        await anyio.wait_all_tasks_blocked()
        assert taken == [1, 2], "both were woken, and one of them took it"
        free.append(3)
        changed.notify()
    assert taken == [1, 2, 3]


async def test_who_waits_for_something_else_goes_on_waiting_and_who_is_cancelled_is_forgotten():
    changed, asked = Condition(), []

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(changed.wait_for, lambda: bool(asked.append(1)))
        await anyio.wait_all_tasks_blocked()
        waiting = list(changed._waiting)
        changed.notify()
        changed.notify()
        await anyio.sleep(0.01)
        assert len(asked) == 2, "once at first, and once for both"
        assert list(changed._waiting) == waiting, "its task has not run"
        tasks.cancel_scope.cancel()
    assert not changed._waiting


async def test_an_error_is_that_of_the_task_that_waits():
    changed, broken, has_ended = Condition(), [], anyio.Event()

    def holds():
        if broken:
            raise ValueError("broken")
        return False

    async def fail():
        with pytest.raises(ValueError, match="broken"):
            await changed.wait_for(holds)
        has_ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fail)
        await anyio.wait_all_tasks_blocked()
        broken.append(True)
        changed.notify()
        await has_ended.wait()
