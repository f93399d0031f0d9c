"""The TCP connections of a child process are paced: as the child reads it from its own sockets."""

import errno
import logging
import os
import socket
import sys
from subprocess import PIPE, Popen

import pytest

from swarm_peer.runtime.host import pacing
from swarm_peer.runtime.host.pacing import LARGEST_RATE, copy_of, opened, pace_connections, pace_new

CHILD = """
import os, socket, sys
sockets = {
    "listening": socket.create_server(("127.0.0.1", 0)),
    "datagrams": socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "local": socket.socketpair()[0],
}
print(sockets["listening"].getsockname()[1], flush=True)
for line in sys.stdin:
    match line.split():
        case ["call", port]:
            sockets["calling"] = socket.create_connection(("127.0.0.1", int(port)))
        case ["accept"]:
            sockets["accepted"] = sockets["listening"].accept()[0]
        case ["close", name]:
            sockets.pop(name).close()
    rates = {name: each.getsockopt(socket.SOL_SOCKET, 47, 8) for name, each in sockets.items()}
    print({name: int.from_bytes(rate, sys.byteorder) for name, rate in rates.items()}, flush=True)
"""
UNPACED = 2**64 - 1


class Child:
    def __init__(self, process: Popen):
        self._process = process
        self.pid = process.pid
        self.port = int(process.stdout.readline())

    def do(self, *words) -> dict[str, int]:
        """Returns the largest rates of its sockets."""
        print(*words, file=self._process.stdin, flush=True)
        return eval(self._process.stdout.readline())


@pytest.fixture
def child():
    if sys.platform != "linux":
        pytest.skip("Linux alone paces")
    with Popen([sys.executable, "-c", CHILD], stdin=PIPE, stdout=PIPE, text=True) as process:
        started = Child(process)
        try:
            with opened(process.pid) as descriptor:
                copy_of(descriptor, 0)
        except PermissionError:  # as in a container
            pytest.skip("this system gives nobody the sockets of a child")
        else:
            yield started
        finally:
            process.stdin.close()


def test_connections_that_a_child_has_made_or_taken_are_paced_and_no_other_socket_is_touched(child):
    num_open = len(os.listdir("/proc/self/fd"))
    with opened(child.pid) as process:
        with socket.create_server(("127.0.0.1", 0)) as server:
            before = child.do("call", server.getsockname()[1])
            assert set(before.values()) == {UNPACED}
            first = pace_new(child.pid, process, set())
            with socket.create_connection(("127.0.0.1", child.port)):
                rates = child.do("accept")
        assert {name: rate for name, rate in rates.items() if rate != UNPACED} == {
            "calling": LARGEST_RATE,
            "listening": LARGEST_RATE,
            "accepted": LARGEST_RATE,  # as the socket that listens
        }
        second = pace_new(child.pid, process, first)
        assert first < second
        child.do("close", "accepted")
        assert pace_new(child.pid, process, second) == first, "no name is kept of what is gone"
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_where_nothing_is_new_no_socket_is_copied(child, monkeypatch):
    with opened(child.pid) as process:
        known = pace_new(child.pid, process, set())
        monkeypatch.delattr(pacing, "copy_of")
        assert pace_new(child.pid, process, known) == known


def test_a_number_that_is_used_for_something_else_meanwhile_is_passed_over(child):
    num_open = len(os.listdir("/proc/self/fd"))
    with opened(child.pid) as process:
        assert copy_of(process, 0) is None, "a pipe"
        assert copy_of(process, 999) is None, "closed"
    assert len(os.listdir("/proc/self/fd")) == num_open


async def test_what_cannot_be_paced_is_told_once_and_an_end_is_not(child, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    await pace_connections(2**22 + 1)  # more processes than Linux has
    assert caplog.messages == []

    def refuse(*_):
        raise PermissionError(errno.EPERM, "the container forbids it")

    monkeypatch.setattr(pacing, "copy_of", refuse)
    await pace_connections(child.pid)
    [line] = caplog.messages
    assert line.startswith("connections_not_paced reason=[Errno 1] the container forbids it")


async def test_a_want_of_descriptors_is_waited_for(child, monkeypatch):
    failures = [errno.EMFILE, errno.ENFILE, errno.EPERM]
    monkeypatch.setattr(pacing, "LOOK_S", 0.0)

    def fail(*_):
        raise OSError(failures.pop(0), "")

    monkeypatch.setattr(pacing, "copy_of", fail)
    await pace_connections(child.pid)
    assert failures == []
