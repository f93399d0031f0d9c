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
import logging
import os
import socket
import struct
import sys

import anyio

log = logging.getLogger(__name__)

# From one look for new connections to the next. A connection lasts for hours.
LOOK_S = 2.0
# The largest rate, in bytes per second, that is one: the next one stands for none. TCP finds its pace by itself.
LARGEST_RATE = 2**32 - 2
SO_MAX_PACING_RATE = 47
_PIDFD_GETFD = 438


async def pace_connections(pid: int) -> None:
    """Pace the TCP connections of a child process, those to come as well, until cancelled.

    Where that is not possible, it says so in the log once, and returns.
    """
    if sys.platform != "linux":
        log.info("connections_not_paced reason=%s cannot", sys.platform)
        return
    paced: set[str] = set()
    try:
        while True:
            paced = pace_new(pid, paced)
            await anyio.sleep(LOOK_S)
    except OSError as error:
        log.info("connections_not_paced reason=%s: what that costs is in docs/operating.md, Ports and routers", error)


def pace_new(pid: int, paced: set[str]) -> set[str]:
    """Pace those TCP connections of a child process that are not paced yet.

    Args:
        paced: those that are

    Returns:
        those of them that are still there, and the new ones, by the names of their sockets

    Raises:
        OSError: the process is gone, or the system does not let this one do that
    """
    descriptors = sockets_of(pid)
    found = paced.intersection(descriptors)
    if found == descriptors.keys():
        return found
    process = os.pidfd_open(pid)
    try:
        found.update(
            name for name, descriptor in descriptors.items() if name not in found and _pace(process, descriptor)
        )
    finally:
        os.close(process)
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


def _pace(process: int, descriptor: int) -> bool:
    """Pace a socket of another process, if it is one of TCP. Returns False if it is gone."""
    copy = copy_of(process, descriptor)
    if copy is None:
        return False
    with copy:
        if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6):
            copy.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("I", LARGEST_RATE))
    return True


def copy_of(process: int, descriptor: int) -> socket.socket | None:
    """A socket of another process; None if it has been closed there.

    Args:
        process: descriptor of the process, as of os.pidfd_open

    Raises:
        OSError: the system does not let this process have it
    """
    copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
    if copy >= 0:
        return socket.socket(fileno=copy)
    number = ctypes.get_errno()
    if number == errno.EBADF:
        return None
    raise OSError(number, os.strerror(number))
