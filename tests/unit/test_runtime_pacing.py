"""The TCP connections of a child process are paced: as the child reads it from its own sockets."""

import logging
import os
import socket
import sys
from subprocess import PIPE, Popen

import pytest

from swarm_peer.runtime.network.pacing import LARGEST_RATE, pace_connections, pace_new

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone paces")

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
    with Popen([sys.executable, "-c", CHILD], stdin=PIPE, stdout=PIPE, text=True) as process:
        yield Child(process)
        process.stdin.close()


def test_connections_that_a_child_has_made_or_taken_are_paced_and_no_other_socket_is_touched(child):
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = child.do("call", server.getsockname()[1])
        assert set(before.values()) == {UNPACED}
        first = pace_new(child.pid, set())
        with socket.create_connection(("127.0.0.1", child.port)):
            rates = child.do("accept")
    assert {name: rate for name, rate in rates.items() if rate != UNPACED} == {
        "calling": LARGEST_RATE,
        "listening": LARGEST_RATE,
        "accepted": LARGEST_RATE,  # as the socket that listens
    }
    second = pace_new(child.pid, first)
    assert first < second
    child.do("close", "accepted")
    assert pace_new(child.pid, second) == first, "no name is kept of what is gone"
    assert len(os.listdir("/proc/self/fd")) < 100


def test_it_costs_nothing_where_nothing_is_new(child, monkeypatch):
    known = pace_new(child.pid, set())
    monkeypatch.delattr(os, "pidfd_open")
    assert pace_new(child.pid, known) == known


async def test_what_cannot_be_paced_is_told_once(child, caplog, monkeypatch):
    def refuse(pid):
        raise PermissionError("the container forbids it")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with caplog.at_level(logging.INFO):
        await pace_connections(child.pid)
        await pace_connections(2**22 + 1)  # more than Linux has
    first, second = caplog.messages
    assert first.startswith("connections_not_paced reason=the container forbids it")
    assert second.startswith("connections_not_paced reason=[Errno 2] No such file")
