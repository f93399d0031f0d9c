"""The bytes of a child process's TCP connections are counted as the kernel counts them."""

import errno
import logging
import socket
import sys
from subprocess import PIPE, Popen

import pytest

from swarm_peer.runtime.host import connections
from swarm_peer.runtime.host.connections import HEADER_BYTES, ConnectionCounts, count_connections
from swarm_peer.runtime.host.pacing import copy_of, opened

CHILD = """
import socket, sys
kept = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM), *socket.socketpair()]
calling = None
for line in sys.stdin:
    match line.split():
        case ["call", port]:
            calling = socket.create_connection(("127.0.0.1", int(port)))
        case ["send", count]:
            calling.sendall(bytes(int(count)))
        case ["read", count]:
            left = int(count)
            while left:
                left -= len(calling.recv(left))
        case ["close"]:
            calling.close()
    print("done", flush=True)
"""


class Child:
    def __init__(self, process: Popen):
        self._process = process
        self.pid = process.pid

    def do(self, *words) -> None:
        print(*words, file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "done\n"


@pytest.fixture
def child():
    if sys.platform != "linux":
        pytest.skip("Linux alone counts")
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


def read_all(taken, num_bytes):
    left = num_bytes
    while left:
        left -= len(taken.recv(left))


def test_connections_are_counted_with_their_headers_also_once_they_have_ended(child):
    counts = ConnectionCounts()
    with opened(child.pid) as process, socket.create_server(("127.0.0.1", 0)) as server:
        assert counts.look(child.pid, process) == (0, 0)
        for number in (1, 2):
            child.do("call", server.getsockname()[1])
            with server.accept()[0] as taken:
                child.do("send", 100_000)
                read_all(taken, 100_000)
                taken.sendall(bytes(50_000))
                child.do("read", 50_000)
                sent, received = counts.look(child.pid, process)
                # A packet has up to 64 KB on loopback; each has a header, and so have acknowledgements.
                assert number * 100_000 + HEADER_BYTES <= sent < number * 105_000
                assert number * 50_000 + HEADER_BYTES <= received < number * 55_000
            child.do("close")
            assert counts.look(child.pid, process) >= (sent, received)


async def test_what_cannot_be_counted_is_told_once_and_an_end_is_not(child, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    told = []
    await count_connections(2**22 + 1, lambda *carried: told.append(carried))  # more processes than Linux has
    assert (caplog.messages, told) == ([], [])
    monkeypatch.setattr(connections, "LOOK_S", 0.0)
    failures = [errno.EMFILE, errno.EPERM]

    def fail(*_):
        raise OSError(failures.pop(0), "the container forbids it")

    monkeypatch.setattr(connections, "copy_of", fail)
    child.do("begin")  # it has its sockets now
    await count_connections(child.pid, lambda *carried: told.append(carried))
    [line] = caplog.messages
    assert line.startswith("bytes_estimated reason=[Errno 1] the container forbids it")
    assert told == []
