import asyncio
import logging
import signal
import subprocess
import sys

import pytest

from swarm_peer.runtime.host.processes import run_loop


def test_a_full_collection_does_not_visit_what_was_imported() -> None:
    script = "import gc, torch; from swarm_peer.runtime.host import processes; processes.spare_imports(); "
    script += "assert gc.get_freeze_count() > 100_000; assert len(gc.get_objects()) < 10_000"
    subprocess.run([sys.executable, "-c", script], check=True)


# In a process of its own: pytest would take the interrupt for its own end.
SIGNALLED = """
import os, signal, anyio
from swarm_peer.runtime.host.processes import signals_set

async def main():
    told = anyio.Event()
    async with signals_set(told):
        os.kill(os.getpid(), signal.SIGHUP)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            print("goes on", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
        await told.wait()
        print("leaves in order", flush=True)
        os.kill(os.getpid(), signal.SIGHUP)
        await anyio.sleep(0.01)
        print("still", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        await anyio.sleep_forever()

try:
    anyio.run(main)
finally:
    print("does not end at once")
"""


@pytest.mark.parametrize(("command", "said"), [((), []), (("nohup",), ["goes on"])])
def test_the_first_signal_ends_a_peer_in_order_and_the_second_at_once(command, said):
    done = subprocess.run([*command, sys.executable, "-c", SIGNALLED], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [*said, "leaves in order", "still"], done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 128 + signal.SIGTERM


class FailedTask:
    """As asyncio prints a task of hivemind's client."""

    def __init__(self, method):
        self._method = method

    def __repr__(self):
        return f"<Task finished coro=<ControlClient.{self._method}() done, defined at control.py:212>>"


def test_what_hivemind_drops_is_no_error_and_what_we_do_is(caplog):
    async def drop(*contexts):
        for context in contexts:
            asyncio.get_running_loop().call_exception_handler(context)

    hung_up = {"message": "Unhandled exception", "exception": RuntimeError("cannot reuse already awaited coroutine")}
    ours = {"message": "Unhandled exception", "exception": RuntimeError("ours")}
    writing, handling = FailedTask("_write_to_persistent_conn"), FailedTask("_handler")
    failed = {"message": "Task exception was never retrieved"}
    gone = {**failed, "future": writing, "exception": ConnectionResetError()}
    other = {**failed, "future": writing, "exception": RuntimeError("other")}
    handler = {**failed, "future": handling, "exception": RuntimeError("handler")}  # ours runs in that task
    silent = {"message": "Future exception was never retrieved", "exception": asyncio.TimeoutError()}
    callback = {"message": "Exception in callback", "exception": asyncio.TimeoutError("callback")}
    task = {**failed, "exception": asyncio.TimeoutError("task")}
    with caplog.at_level(logging.WARNING):
        run_loop(drop, hung_up, gone, silent, ours, other, handler, callback, task)
    reported = [str(record.exc_info[1]) for record in caplog.records]
    assert reported == ["ours", "other", "handler", "callback", "task"]


def test_what_a_program_returns_is_not_printed_for_nothing():
    """It may be the weights of all stages."""
    printed = []

    class Large:
        def __repr__(self):
            printed.append(self)
            return "large"

    large = Large()

    async def program():
        return large

    assert run_loop(program) is large
    assert not printed
