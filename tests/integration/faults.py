"""What goes wrong in one peer, as a script has it: `KIND[:NUMBER[:SECONDS]]`. Each fault writes down that it struck.

NUMBER says at which occurrence, from 1. Kinds:

* kill-before-forward, kill-after-forward, kill-after-backward: SIGKILL around the device's work on a microbatch
* kill-before-reply, kill-after-reply: around the reply to a microbatch
* kill-before-averaging, kill-in-averaging, kill-after-averaging: around an averaging round
* drop-reply: the stream breaks instead of a reply
* garbage: all replies from then on carry noise of the right size and NaNs
* stall: SIGSTOP of the whole peer for SECONDS
* partition: calls to other stages get no answer for SECONDS
* clock: the wall clock is off by SECONDS, from the beginning
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import torch

from swarm_peer.errors import CallTimeout
from swarm_peer.model.training import StageTrainer
from swarm_peer.runtime import p2p_transport
from swarm_peer.runtime.averaging import GradientAverager
from swarm_peer.runtime.p2p_transport import P2PTransport
from swarm_peer.wire.messages import Frame, FrameType


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

    import inspect

    setattr(owner, name, async_wrapper if inspect.iscoroutinefunction(original) else wrapper)


def _replies(number: int, instead: Callable[[Any, Frame], Any], forever: bool = False) -> None:
    """Have something else happen than sending the number-th reply that carries a tensor."""
    original = p2p_transport._Stream.send
    replies = 0

    async def send(self: Any, frame: Frame) -> None:
        nonlocal replies
        if frame.type is FrameType.REPLY and frame.tensors and "loss_sum" in (frame.body or {}):
            replies += 1
            if replies == number or (forever and replies > number):
                result = instead(self, frame)
                if isinstance(result, Frame):
                    frame = result
                elif result == "after":
                    await original(self, frame)
                    os.kill(os.getpid(), signal.SIGKILL)
                else:
                    return
        await original(self, frame)

    p2p_transport._Stream.send = send  # type: ignore[method-assign]


def _kill_before_reply(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    _replies(number, lambda stream, frame: die("reply"))


def _kill_after_reply(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    def after(stream: Any, frame: Frame) -> str:
        strike("reply sent")
        return "after"

    _replies(number, after)


def _drop_reply(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    def drop(stream: Any, frame: Frame) -> None:
        strike("reply dropped")
        stream.close()

    _replies(number, drop)


def _garbage(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    def spoil(stream: Any, frame: Frame) -> Frame:
        strike("garbage sent")
        noise = torch.randint(0, 256, (frame.tensors[0].nbytes,), dtype=torch.uint8)
        noise[:4] = torch.tensor([0, 0, 192, 127], dtype=torch.uint8)  # a NaN
        return Frame(frame.type, frame.call_id, frame.op, frame.body, (memoryview(noise.numpy()),))

    _replies(number, spoil, forever=True)


def _in_averaging(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    """Dies when its all-reduce is under way: some parts may have been averaged with it and some without."""
    _around(GradientAverager, "_begin", number, None, lambda name: (time.sleep(0.02), die(name))[0])


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


def _clock(number: int, seconds: float, strike: Strike, die: Strike) -> None:
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)
    strike(f"{seconds} s off")


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
    "clock": _clock,
}
