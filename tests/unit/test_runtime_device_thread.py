import asyncio
import gc
import threading
import weakref
from contextlib import suppress
from types import SimpleNamespace

import anyio
import pytest
import torch

from swarm_peer.errors import HopFailed, SwarmError
from swarm_peer.runtime.host.device_errors import is_out_of_memory
from swarm_peer.runtime.host.machine import SystemClock, SystemThreads
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.stage.device_thread import (
    _BROKEN_AFTER_S,
    _FAILURES_OF_BROKEN,
    DeviceThread,
    Priority,
    SpeedMeter,
)


class Jobs:
    """Jobs that note when they run; those that are `held` wait for `release` in the device thread."""

    def __init__(self, device_thread):
        self.device_thread = device_thread
        self.log = []
        self._release = {}

    def job(self, name):
        return lambda: self.log.append(name)

    async def hold(self, name, priority=Priority.FORWARD):
        """Have a job occupy the thread, and return when it does."""
        loop, running = asyncio.get_running_loop(), asyncio.Event()
        self._release[name] = threading.Event()

        def held():
            loop.call_soon_threadsafe(running.set)
            assert self._release[name].wait(10)
            self.log.append(name)
            return name

        task = asyncio.ensure_future(self.device_thread.run(priority, held))
        await running.wait()
        return task

    def release(self, name):
        self._release[name].set()


def after_turns(loop, num_turns, callback):
    """Call back after some turns of the event loop."""
    if num_turns:
        loop.call_soon(after_turns, loop, num_turns - 1, callback)
    else:
        callback()


@pytest.fixture
def device_thread():
    thread = DeviceThread(clock=SystemClock(), threads=SystemThreads(), metrics=PeerMetrics())
    yield thread
    thread.stop()
    assert not any(other.name == "device" for other in threading.enumerate())


@pytest.fixture
def speed():
    return SpeedMeter(PeerMetrics())


@pytest.fixture
def jobs(device_thread):
    jobs = Jobs(device_thread)
    yield jobs
    for event in jobs._release.values():
        event.set()


async def test_results_and_exceptions_come_back(device_thread):
    assert await device_thread.run(Priority.FORWARD, lambda: threading.current_thread().name) == "device"
    error = ValueError("broken")

    def fail():
        raise error

    with pytest.raises(ValueError, match="broken") as caught:
        await device_thread.run(Priority.FORWARD, fail)
    assert caught.value is error
    assert await device_thread.run(Priority.FORWARD, lambda: 1) == 1, "the thread has outlived it"


class Weights:
    """What a job works with: gigabytes."""


def test_nothing_of_a_job_that_has_ended_is_kept(device_thread):
    """The stage that a peer has left has to be out of memory before the next one is made, without any further job.

    In an event loop of its own: in Python 3.10, the tasks of pytest-asyncio hold the last exception.
    """
    gone = []

    def compute(fails):
        weights, result = Weights(), Weights()
        gone.append(weakref.ref(weights))

        def job():
            activations = Weights()
            gone.extend([weakref.ref(activations), weakref.ref(result)])
            assert weights
            if fails:
                raise ValueError("no memory")
            return result

        return job

    async def run_jobs():
        await device_thread.run(Priority.FORWARD, compute(fails=False))
        with suppress(ValueError):
            await device_thread.run(Priority.FORWARD, compute(fails=True))
        await asyncio.sleep(0.05)
        assert [ref() for ref in gone] == [None] * 6

    gc.disable()
    try:
        asyncio.run(run_jobs())
    finally:
        gc.enable()


async def test_backward_goes_before_forward_and_old_before_new(device_thread, jobs):
    held = await jobs.hold("held")
    order = [
        ("evaluate", Priority.EVALUATE),
        ("forward 1", Priority.FORWARD),
        ("backward 1", Priority.BACKWARD),
        ("forward 2", Priority.FORWARD),
        ("backward 2", Priority.BACKWARD),
        ("step", Priority.STEP),
    ]
    waiting = [asyncio.ensure_future(device_thread.run(priority, jobs.job(name))) for name, priority in order]
    await anyio.wait_all_tasks_blocked()
    jobs.release("held")
    await asyncio.gather(held, *waiting)
    assert jobs.log == ["held", "step", "backward 1", "backward 2", "forward 1", "forward 2", "evaluate"]


async def test_a_job_that_is_cancelled_before_its_turn_is_not_run(device_thread, jobs):
    held = await jobs.hold("held")
    waiting = asyncio.ensure_future(device_thread.run(Priority.BACKWARD, jobs.job("cancelled")))
    await anyio.wait_all_tasks_blocked()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not held.done(), "the cancellation has not waited for its turn"
    jobs.release("held")
    await held
    await device_thread.run(Priority.EVALUATE, jobs.job("last"))
    assert jobs.log == ["held", "last"]


async def test_a_job_that_is_cancelled_while_it_runs_is_finished_first(device_thread, jobs):
    held = await jobs.hold("held")
    held.cancel()
    await anyio.wait_all_tasks_blocked()
    assert not held.done()
    jobs.release("held")
    with pytest.raises(asyncio.CancelledError):
        await held
    assert jobs.log == ["held"]


async def test_a_second_cancellation_does_not_cut_the_wait_short(device_thread, jobs):
    held = await jobs.hold("held")
    for _ in range(3):
        held.cancel()
        await anyio.wait_all_tasks_blocked()
        assert not held.done()
    jobs.release("held")
    with pytest.raises(asyncio.CancelledError):
        await held


async def test_a_cancelled_scope_does_not_end_before_the_job_that_runs(device_thread, jobs):
    """A cancelled scope of anyio's cancels again and again whatever its tasks wait for."""
    loop, running, release = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def job():
        loop.call_soon_threadsafe(running.set)
        assert release.wait(10)
        jobs.log.append("done")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(device_thread.run, Priority.BACKWARD, job)
        await running.wait()
        tasks.cancel_scope.cancel()
        after_turns(loop, 20, release.set)
    assert jobs.log == ["done"]


async def test_what_a_cancelled_job_raises_is_dropped(device_thread):
    loop, running, release = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def fail():
        loop.call_soon_threadsafe(running.set)
        assert release.wait(10)
        raise ValueError("dropped")

    task = asyncio.ensure_future(device_thread.run(Priority.FORWARD, fail))
    await running.wait()
    task.cancel()
    await anyio.wait_all_tasks_blocked()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task


def measure(speed, priority, *seconds):
    for last in seconds:
        speed.observe(priority, 4 * last, 4)


def test_throughput_is_that_of_forward_and_backward_together(speed):
    measure(speed, Priority.FORWARD, 0.25, 0.25, 0.25, 0.25)
    measure(speed, Priority.BACKWARD, 0.75, 0.75)
    assert speed.samples_per_s == 0.0, "not before both were measured"
    measure(speed, Priority.BACKWARD, 0.75)
    assert speed.samples_per_s == pytest.approx(1.0)


@pytest.mark.parametrize("seconds", [(50.0, 1.0, 1.5), (1.0, 50.0, 50.0), (2.0, 1.5, 1.0)])
def test_slow_passes_among_the_first_do_not_count(speed, seconds):
    measure(speed, Priority.FORWARD, *seconds)
    measure(speed, Priority.BACKWARD, 1.0, 1.0, 1.0)
    assert speed.samples_per_s == pytest.approx(1 / 2)
    measure(speed, Priority.FORWARD, 11.0)
    assert speed.samples_per_s == pytest.approx(1 / (2 + 0.1 * (11 - 1))), "later ones are smoothed"


async def test_only_training_passes_that_succeed_are_measured_and_each_replica_for_itself(device_thread, speed):
    def fail():
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        await device_thread.run(Priority.FORWARD, fail, 5, speed)
    for priority in (Priority.STEP, Priority.EVALUATE, Priority.QUERY):
        await device_thread.run(priority, lambda: None, 5, speed)
    assert speed._passes == {Priority.FORWARD: 0, Priority.BACKWARD: 0}
    other = SpeedMeter(PeerMetrics())
    await device_thread.run(Priority.FORWARD, lambda: None, 5, speed)
    await device_thread.run(Priority.BACKWARD, lambda: None, 5, other)
    assert speed._passes == {Priority.FORWARD: 1, Priority.BACKWARD: 0}
    assert other._passes == {Priority.FORWARD: 0, Priority.BACKWARD: 1}


# --- a device that fails


class Device:
    """A device thread whose clock the test moves, and what its jobs come to."""

    def __init__(self):
        self.now_s = 0.0
        clock = SimpleNamespace(monotonic_s=lambda: self.now_s)
        self.thread = DeviceThread(clock=clock, threads=SystemThreads(), metrics=PeerMetrics())

    async def attempt(self, error=None, priority=Priority.FORWARD, after_s=0.0):
        def job():
            if error is not None:
                raise error

        self.now_s += after_s
        with suppress(Exception):
            await self.thread.run(priority, job)

    def is_broken(self):
        return self.thread._broken.is_set()


@pytest.fixture
def device():
    device = Device()
    yield device
    device.thread.stop()


def out_of_memory():
    error = HopFailed("this stage ran out of device memory")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    return error


@pytest.mark.parametrize("error", [RuntimeError("cuDNN error: failed\nmore"), out_of_memory()])
@pytest.mark.parametrize("forward_fits", [False, True])
async def test_a_device_that_fails_for_long_is_broken(device, error, forward_fits):
    for _ in range(_FAILURES_OF_BROKEN):
        await device.attempt(None if forward_fits else error)
        await device.attempt(error, Priority.BACKWARD)
    assert not device.is_broken(), "others may have taken the memory for a moment"
    await device.attempt(None if forward_fits else error)
    await device.attempt(error, Priority.BACKWARD, after_s=_BROKEN_AFTER_S)
    with pytest.raises(SwarmError, match=r"failed at all microbatches for a minute, the last time with: .*; start"):
        await device.thread.watch()


@pytest.mark.parametrize(
    ("error", "priority"),
    [
        (None, Priority.FORWARD),  # one microbatch in the middle
        (HopFailed("a later stage could not be reached"), None),
        (RuntimeError("a query that this program cannot compute"), Priority.QUERY),
    ],
)
async def test_a_device_that_works_is_not_broken(device, error, priority):
    broken = RuntimeError("cuDNN error: failed")
    for _ in range(2 * _FAILURES_OF_BROKEN):
        if error is None:
            await device.attempt(broken, after_s=_BROKEN_AFTER_S / 2)
            await device.attempt(None, priority)
        else:
            await device.attempt(error, priority or Priority.FORWARD, after_s=_BROKEN_AFTER_S / 2)
    assert not device.is_broken()


async def test_two_failures_far_apart_are_no_broken_device(device):
    for after_s in (0.0, 10 * _BROKEN_AFTER_S):
        await device.attempt(RuntimeError("cuDNN error: failed"), after_s=after_s)
    assert not device.is_broken()


@pytest.mark.parametrize("priority", Priority)
async def test_a_gpu_that_this_process_has_lost_is_broken_at_once(device, priority):
    await device.attempt(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), priority)
    assert not device.is_broken(), "that is a lack of memory"
    await device.attempt(RuntimeError("CUDA error: device-side assert triggered\nSearch for"), priority)
    with pytest.raises(SwarmError, match=r"^the device has failed: CUDA error: device-side assert triggered; start"):
        await device.thread.watch()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
        (None, False),
    ],
)
def test_what_is_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


def test_the_cpus_allocator_is_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)


def test_a_limited_link_is_known_at_once_and_the_device_where_it_is_slower():
    meter = SpeedMeter(PeerMetrics(), 5.0)
    assert (meter.samples_per_s, meter.is_limited) == (5.0, False)

    def measured(seconds):
        for _ in range(200):
            meter.observe(Priority.FORWARD, seconds / 2, 1)
            meter.observe(Priority.BACKWARD, seconds / 2, 1)

    measured(0.1)
    assert meter.samples_per_s == 5.0
    assert meter.is_limited
    assert meter.device_samples_per_s == pytest.approx(10.0)
    measured(0.5)
    assert meter.samples_per_s == pytest.approx(2.0, rel=1e-3)
    assert not meter.is_limited
