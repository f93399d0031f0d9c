"""Has Linux pace what libp2p's daemon sends: spread over a round trip, and not all of TCP's window in one burst.

A microbatch's activations are about as large as the queue of a slow link. Sent in one burst, they overrun it beside any
other traffic, and TCP takes the lost packets for a sign to send less.

Linux paces the connections of sockets that have a largest rate (its commit 218af599fa63, "tcp: internal implementation
for pacing", of 2017). The daemon has no option for that, so its parent sets it from outside: since Linux 5.6,
pidfd_getfd(2) gives a process the sockets of its children. A container may forbid that, and other systems have none.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

log = logging.getLogger(__name__)

# From one look for new connections to the next. A connection lasts for hours.
LOOK_S = 2.0
# The largest rate, in bytes per second, that is one: the next one stands for none. TCP finds its pace by itself.
LARGEST_RATE = 2**32 - 2
SO_MAX_PACING_RATE = 47
# Python's os module does not have them wherever the system does.
_PIDFD_OPEN, _PIDFD_GETFD = 434, 438
OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}


async def pace_connections(pid: int) -> None:
    """Pace the TCP connections of a child process, those to come as well, until it ends.

    Where that is not possible, it says so in the log once, and returns.
    """
    if sys.platform != "linux":
        log.info("connections_not_paced reason=%s cannot", sys.platform)
        return
    paced: set[str] = set()
    try:
        with opened(pid) as process:
            while True:
                try:
                    paced = pace_new(pid, process, paced)
                except OSError as error:
                    if error.errno not in OUT_OF_DESCRIPTORS:
                        raise
                await anyio.sleep(LOOK_S)
    except (FileNotFoundError, ProcessLookupError):
        return  # the process has ended
    except OSError as error:
        log.info("connections_not_paced reason=%s: what that costs is in docs/operating.md, Ports and routers", error)


@contextmanager
def opened(pid: int) -> Iterator[int]:
    """A descriptor of a process, which no other process with the same id has.

    Raises:
        OSError: there is no such process, or the system does not give it
    """
    process = _system_call(_PIDFD_OPEN, pid, 0)
    try:
        yield process
    finally:
        os.close(process)


def pace_new(pid: int, process: int, paced: set[str]) -> set[str]:
    """Pace those TCP connections of a child process that are not paced yet.

    Args:
        process: its descriptor
        paced: those that are

    Returns:
        those of them that are still there, and the new ones, by the names of their sockets

    Raises:
        OSError: the process is gone, or the system does not let this one do that
    """
    descriptors = sockets_of(pid)
    found = paced.intersection(descriptors)
    for name in descriptors.keys() - found:
        copy = copy_of(process, descriptors[name])
        if copy is None:
            continue
        with copy:
            if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6):
                copy.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("I", LARGEST_RATE))
        found.add(name)
    return found


def sockets_of(pid: int) -> dict[str, int]:
    """The sockets of a process: their descriptors there, by name."""
    folder, descriptors = f"/proc/{pid}/fd", {}
    for descriptor in os.listdir(folder):
        try:
            name = os.readlink(f"{folder}/{descriptor}")
        except FileNotFoundError:  # it was closed just now
            continue
        if name.startswith("socket:"):
            descriptors[name] = int(descriptor)
    return descriptors


def copy_of(process: int, descriptor: int) -> socket.socket | None:
    """A socket of another process; None if that has closed it, and perhaps uses its number for something else.

    Raises:
        OSError: the process is gone, or the system does not let this one have its sockets
    """
    try:
        copy = _system_call(_PIDFD_GETFD, process, descriptor, 0)
    except OSError as error:
        if error.errno == errno.EBADF:
            return None
        raise
    try:
        return socket.socket(fileno=copy)
    except OSError as error:
        os.close(copy)
        if error.errno == errno.ENOTSOCK:
            return None
        raise


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _system_call(number: int, *arguments: int) -> int:
    result: int = _libc().syscall(number, *arguments)
    if result < 0:
        failure = ctypes.get_errno()
        raise OSError(failure, os.strerror(failure))
    return result
