"""Counts what libp2p's daemon sends and receives over TCP, as the kernel has it: the DHT's traffic and headers, too.

The daemon's parent asks the kernel about the daemon's sockets (pacing.py says how, and where that is not possible).
"""

from __future__ import annotations

import logging
import socket
import struct
import sys
from collections.abc import Callable
from typing import NamedTuple

import anyio

from swarm_peer.runtime.host.pacing import OUT_OF_DESCRIPTORS, copy_of, opened, sockets_of

log = logging.getLogger(__name__)

# From one look to the next. The last bytes of a connection, after the last look at it, are not counted.
LOOK_S = 1.0
# Headers of IP and TCP in a packet, with TCP's timestamps.
HEADER_BYTES = 52
# Where Linux has these in its struct tcp_info (include/uapi/linux/tcp.h): since 4.19 all of them.
_RECEIVED, _SEGMENTS, _SENT = struct.Struct("=128xQ"), struct.Struct("=136xII"), struct.Struct("=200xQ")
_ALL_BYTES = 208


class Carried(NamedTuple):
    """Bytes on the wire."""

    sent: int = 0
    received: int = 0


class ConnectionCounts:
    """The bytes of all TCP connections that a process has had."""

    def __init__(self) -> None:
        self._by_socket: dict[str, Carried] = {}
        self._ended = Carried()

    def look(self, pid: int, process: int) -> Carried:
        """The bytes that have been carried since the connections began; those that have ended included.

        Args:
            process: a descriptor of it

        Raises:
            OSError: the process is gone, or the system does not let this one look
        """
        descriptors = sockets_of(pid)
        for name in self._by_socket.keys() - descriptors.keys():
            self._ended = _sum(self._ended, self._by_socket.pop(name))
        for name, descriptor in descriptors.items():
            if (copy := copy_of(process, descriptor)) is not None:
                with copy:
                    if (carried := _carried_by(copy)) is not None:
                        self._by_socket[name] = carried
        return _sum(self._ended, *self._by_socket.values())


def _sum(*each: Carried) -> Carried:
    return Carried(sum(one.sent for one in each), sum(one.received for one in each))


def _carried_by(copy: socket.socket) -> Carried | None:
    """The bytes of one connection; None if the socket is none, or the kernel is too old to tell."""
    if copy.type != socket.SOCK_STREAM or copy.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    told = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(told) < _ALL_BYTES:
        return None
    (received,), (segments_out, segments_in) = _RECEIVED.unpack_from(told), _SEGMENTS.unpack_from(told)
    (sent,) = _SENT.unpack_from(told)
    return Carried(sent + HEADER_BYTES * segments_out, received + HEADER_BYTES * segments_in)


async def count_connections(pid: int, tell: Callable[[int, int], None]) -> None:
    """Tell how many bytes the connections of a child process have sent and received, until it ends.

    Where that is not possible, it says so in the log once, and returns.
    """
    if sys.platform != "linux":
        log.info("bytes_estimated reason=%s has no such counts", sys.platform)
        return
    counts = ConnectionCounts()
    try:
        with opened(pid) as process:
            while True:
                try:
                    tell(*counts.look(pid, process))
                except OSError as error:
                    if error.errno not in OUT_OF_DESCRIPTORS:
                        raise
                await anyio.sleep(LOOK_S)
    except (FileNotFoundError, ProcessLookupError):
        return  # the process has ended
    except OSError as error:
        log.info("bytes_estimated reason=%s: traffic is counted as far as this program sends it", error)
