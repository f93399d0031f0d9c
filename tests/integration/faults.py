"""What goes wrong in one peer, as a script has it: `KIND[:NUMBER[:SECONDS]]`. Each fault writes down that it struck.

NUMBER says at which occurrence, from 1. Kinds:

* kill-before-forward, kill-after-forward, kill-after-backward: SIGKILL around the device's work on a microbatch
* kill-before-reply, kill-after-reply: around the reply to a microbatch
* kill-before-averaging, kill-in-averaging, kill-after-averaging: around an averaging round
* drop-reply: the stream breaks instead of a reply
* garbage: all replies from then on carry noise of the right size and NaNs
* stall: SIGSTOP of the whole peer for SECONDS
* partition: calls to other stages get no answer for SECONDS
* cut-off: from the first time that it asks stage-mates for a state, they cannot be reached for SECONDS
* slow: the device takes SECONDS for a sample, forward and backward, in a stage of average cost
* clock: the wall clock is off by SECONDS, from the beginning
* device-breaks: at the NUMBERth forward pass the GPU fails, and from then on at all that it is asked for
* little-memory: the GPU gives the peer NUMBER megabytes
* stock: no fault: a paused peer notes what it still holds
* midnight: no fault: it comes in SECONDS, by this peer's time zone
* moves: no fault: the peer is assigned to another stage NUMBER times, at most once in a round, and notes what it uses
"""

import asyncio
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgpack
import torch

from swarm_peer.errors import CallTimeout, PeerUnreachable
from swarm_peer.model.costs import forward_flops
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime import mover
from swarm_peer.runtime.host.processes import free_memory
from swarm_peer.runtime.host.running_peers import PeerFiles, RunningPeer
from swarm_peer.runtime.network.frame_stream import FrameStream
from swarm_peer.runtime.network.p2p_transport import P2PTransport
from swarm_peer.runtime.replica import Replica
from swarm_peer.runtime.step.averaging import GradientAverager
from swarm_peer.wire.frames import PREFIX, FrameType
from swarm_peer.wire.records import Assignment


def inject(fault: str, folder: Path) -> None:
    kind, number, seconds = (*fault.split(":"), "1", "0")[:3]

    def strike(what: str) -> None:
        (folder / f"{os.getpid()}.fired").write_text(f"{fault} {what}\n")

    def die(what: str) -> None:
        strike(what)
        os.kill(os.getpid(), signal.SIGKILL)

    _KINDS[kind](int(number), float(seconds), strike, die)


Strike = Callable[[str], None]


def _around(owner: Any, name: str, number: int, before: Strike | None, after: Strike | None) -> None:
    """Call `before` or `after` around the number-th call of a method, coroutine function or not."""
    original = getattr(owner, name)
    calls = 0

    def counted() -> bool:
        nonlocal calls
        calls += 1
        return calls == number

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        strikes = counted()
        if strikes and before:
            before(name)
        result = original(*args, **kwargs)
        if strikes and after:
            after(name)
        return result

    async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
        strikes = counted()
        if strikes and before:
            before(name)
        result = await original(*args, **kwargs)
        if strikes and after:
            after(name)
        return result

    setattr(owner, name, async_wrapper if inspect.iscoroutinefunction(original) else wrapper)


def _replies(number: int, instead: Callable[[Any], Any], forever: bool = False) -> None:
    """Have something else happen than sending the number-th reply to a microbatch.

    Args:
        instead: told of the stream; may return what is sent in place of the reply's tensors
    """
    original = FrameStream.send
    replies = 0

    async def send(self: Any, head: bytes, tensors: Any = (), *args: Any) -> bool:
        nonlocal replies
        kind, _, _, body, _ = msgpack.unpackb(head[PREFIX.size :])
        if kind == FrameType.REPLY and tensors and "loss_sum" in (body or {}):
            replies += 1
            if replies == number or (forever and replies > number):
                result = await instead(self)
                if result is None:
                    return False
                tensors = result(tensors)
        return bool(await original(self, head, tensors, *args))

    FrameStream.send = send  # type: ignore[method-assign]


def _kill_before_reply(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    async def before(stream: Any) -> None:
        die("reply")

    _replies(number, before)


def _kill_after_reply(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    async def after(stream: Any) -> Callable[[Any], Any]:
        # The reply is written within this time, if it is written at all.
        asyncio.get_running_loop().call_later(0.05, die, "reply sent")
        return lambda tensors: tensors

    _replies(number, after)


def _drop_reply(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    async def drop(stream: Any) -> None:
        strike("reply dropped")
        stream.close()

    _replies(number, drop)


def _garbage(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    def spoil(tensors: Any) -> Any:
        noise = torch.randint(0, 256, (tensors[0].nbytes,), dtype=torch.uint8)
        noise[:4] = torch.tensor([0, 0, 192, 127], dtype=torch.uint8)  # a NaN
        return (memoryview(noise.numpy()),)

    async def send_noise(stream: Any) -> Callable[[Any], Any]:
        strike("garbage sent")
        return spoil

    _replies(number, send_noise, forever=True)


def _in_averaging(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    """Dies when its all-reduce is under way: some parts may have been averaged with it and some without."""
    _around(GradientAverager, "handle_part", number, None, die)


def _stall(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    def stop(name: str) -> None:
        strike(f"stalls for {seconds} s")
        code = f"import time, os, signal; time.sleep({seconds}); os.kill({os.getpid()}, signal.SIGCONT)"
        subprocess.Popen([sys.executable, "-c", code])
        os.kill(os.getpid(), signal.SIGSTOP)

    _around(StageTrainer, "forward", number, stop, None)


def _partition(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    original = P2PTransport.call
    calls = 0
    until = 0.0

    async def call(self: Any, peer_id: str, body: Any, tensors: Any = (), *, timeout_s: float) -> Any:
        nonlocal calls, until
        if body.op == "microbatch":
            calls += 1
            if calls == number:
                until = time.monotonic() + seconds
                strike(f"no microbatch gets through for {seconds} s")
            while time.monotonic() < until:
                begin = time.monotonic()
                await anyio.sleep(min(timeout_s, until - begin))
                raise CallTimeout("partitioned")
        return await original(self, peer_id, body, tensors, timeout_s=timeout_s)

    P2PTransport.call = call  # type: ignore[method-assign]


def _slow(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    """Nothing computes while it waits, so peers that share cores here are as many devices."""

    def last_until(trainer: StageTrainer, begin: float, share: float, num_samples: int) -> None:
        costs = forward_flops(trainer.resolved)
        relative = costs[trainer.spec.index] * len(costs) / sum(costs)
        time.sleep(max(0.0, begin + share * seconds * relative * num_samples - time.perf_counter()))

    forward, backward = StageTrainer.forward, StageTrainer.backward

    def slow_forward(self: Any, tokens_BS: Any, *args: Any) -> Any:
        begin = time.perf_counter()
        result = forward(self, tokens_BS, *args)
        last_until(self, begin, 1 / 3, len(tokens_BS))
        return result

    def slow_backward(self: Any, forward_pass: Any, *args: Any, **options: Any) -> Any:
        begin, num_samples = time.perf_counter(), len(forward_pass._result)
        result = backward(self, forward_pass, *args, **options)
        last_until(self, begin, 2 / 3, num_samples)
        return result

    StageTrainer.forward, StageTrainer.backward = slow_forward, slow_backward  # type: ignore[method-assign]
    strike(f"{seconds} s a sample")


def _clock(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)
    strike(f"{seconds} s off")


def _cut_off(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    original = P2PTransport.call
    until: float | None = None

    async def call(self: Any, peer_id: str, body: Any, tensors: Any = (), *, timeout_s: float) -> Any:
        nonlocal until
        if body.op == "state_index" and not body.entry:  # no snapshot: those of lost stages can be had
            if until is None:
                until = time.monotonic() + seconds
                strike(f"stage-mates cannot be reached for {seconds} s")
            if time.monotonic() < until:
                self._on_unreachable(peer_id)
                raise PeerUnreachable("cut off")
        return await original(self, peer_id, body, tensors, timeout_s=timeout_s)

    P2PTransport.call = call  # type: ignore[method-assign]


def _moves(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    used: list[dict[str, int]] = []

    async def assign(*, me: str, stage: int, view: Callable[[], SwarmView], **_: object) -> Assignment:
        """Serve a round, take stock, and move to the next stage; after the last move stay."""
        here = round_of(view(), me)
        while round_of(view(), me) <= here:  # noqa: ASYNC110
            await anyio.sleep(0.05)
        free_memory()  # as a peer does between two stages: here the next one may have its state already
        status = Path("/proc/self/status").read_text()  # noqa: ASYNC240
        used.append(
            {
                "tasks": len(asyncio.all_tasks()),
                "threads": threading.active_count(),
                "files": len(os.listdir("/proc/self/fd")),
                "replicas": sum(isinstance(item, Replica) for item in gc.get_objects()),
                "resident_kb": int(status.split("VmRSS:")[1].split()[0]),
            }
        )
        strike(json.dumps(used))
        if len(used) > number:
            await anyio.sleep_forever()
        to_stage = (stage + 1) % view().num_stages
        return Assignment(peer=me, announced=0, from_stage=stage, to_stage=to_stage, reason="the test says so")

    def round_of(view: SwarmView, me: str) -> int:
        known = view.peer(me)
        return -1 if known is None else known.round_number

    mover.wait_for_assignment = assign  # type: ignore[attr-defined]


def _stock(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    show = PeerFiles.show

    def take_stock(files: PeerFiles, about: RunningPeer) -> None:
        """Before a paused peer says that it is at rest, write down what it still holds."""
        if about.is_at_rest and about != files._shown:
            free_memory()
            held = gc.get_objects()
            tensors = [each for each in held if isinstance(each, torch.Tensor)]
            trainers = sum(isinstance(each, StageTrainer) for each in held)
            strike(json.dumps({"trainers": trainers, "tensor_bytes": sum(each.nbytes for each in tensors)}))
        show(files, about)

    PeerFiles.show = take_stock  # type: ignore[method-assign]


def _midnight(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    local = time.localtime()
    past_s = local.tm_hour * 3600 + local.tm_min * 60 + local.tm_sec - local.tm_gmtoff
    west_s = (past_s + seconds) % (24 * 3600)
    os.environ["TZ"] = f"NOWHERE+{west_s // 3600:.0f}:{west_s % 3600 // 60:.0f}:{west_s % 60:.0f}"
    time.tzset()
    strike(time.strftime("%H:%M:%S"))


def _device_breaks(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    """A kernel fails an assertion: from then on, all that this process asks of the GPU fails."""

    def fail(name: str) -> None:
        strike("the GPU fails")
        torch.zeros(1, device="cuda")[torch.full((1,), 9, device="cuda")]
        torch.cuda.synchronize()

    _around(StageTrainer, "forward", number, fail, None)


def _little_memory(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    """The GPU gives this process so many megabytes, and does not say so."""

    def limit(name: str) -> None:
        strike(f"{number} MB")
        torch.cuda.set_per_process_memory_fraction(number * 1e6 / torch.cuda.mem_get_info()[1])

    _around(StageTrainer, "__init__", 1, limit, None)


_KINDS: dict[str, Callable[[int, float, Strike, Strike], None]] = {
    "kill-before-forward": lambda n, s, strike, die: _around(StageTrainer, "forward", n, die, None),
    "kill-after-forward": lambda n, s, strike, die: _around(StageTrainer, "forward", n, None, die),
    "kill-after-backward": lambda n, s, strike, die: _around(StageTrainer, "backward", n, None, die),
    "kill-before-reply": _kill_before_reply,
    "kill-after-reply": _kill_after_reply,
    "kill-before-averaging": lambda n, s, strike, die: _around(GradientAverager, "average", n, die, None),
    "kill-in-averaging": _in_averaging,
    "kill-after-averaging": lambda n, s, strike, die: _around(GradientAverager, "average", n, None, die),
    "drop-reply": _drop_reply,
    "garbage": _garbage,
    "stall": _stall,
    "partition": _partition,
    "cut-off": _cut_off,
    "slow": _slow,
    "clock": _clock,
    "moves": _moves,
    "stock": _stock,
    "midnight": _midnight,
    "device-breaks": _device_breaks,
    "little-memory": _little_memory,
}
