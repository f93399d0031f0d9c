"""msgpack from others: what it unpacks to is bounded before anything is built of it.

A byte of msgpack can stand for an empty dictionary of 64 bytes, and five bytes can announce an array of four billion
values. So a message is read through once, with nothing built, to see that it holds all the values that it announces;
then arrays and dictionaries are counted as they are built. A megabyte costs at most some 30 MB and 50 ms.
"""

from __future__ import annotations

from typing import Any

import msgpack

from swarm_peer.errors import InvalidMessage

# Values in one array, and arrays and dictionaries in one message, of any depth. A gradient that is handed over has the
# most of them: two for each microbatch that it has counted (messages.py, MAX_COUNTED_IDS).
MAX_ITEMS = 1 << 15
# A message without those of its fields that are plain bytes, which cost no more than their length.
MAX_BYTES = 1 << 20
# The first bytes of plain bytes in msgpack, by the length of their length.
_PLAIN_BYTES = (0xC4, 0xC5, 0xC6)
# No message and no record has so many fields. Each unknown one would be an error to describe.
MAX_KEYS = 32


def unpack(data: bytes | memoryview, name: str, *, max_items: int = MAX_ITEMS, max_bytes: int = MAX_BYTES) -> Any:
    """The values that some bytes stand for, arrays as tuples.

    Args:
        name: of the message, for the error
        max_items: most values in one array, and most arrays and dictionaries in all
        max_bytes: the longest message, if those of its fields are left out that are plain bytes

    Raises:
        InvalidMessage: the bytes are no msgpack, or stand for too many values; the text begins with `name`
    """
    num_containers = 0

    def count(container: Any) -> Any:
        nonlocal num_containers
        num_containers += 1
        if num_containers > max_items:
            raise ValueError(f"more than {max_items} arrays and dictionaries")
        return container

    try:
        _read_through(data, max_bytes)
        return msgpack.unpackb(
            data,
            use_list=False,
            list_hook=count,
            object_hook=count,
            ext_hook=_refuse,
            timestamp=1,
            max_array_len=min(len(data), max_items),
            max_map_len=min(len(data), MAX_KEYS),
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise InvalidMessage(f"{name}: no msgpack ({str(error) or type(error).__name__:.100})") from error


def _read_through(data: bytes | memoryview, max_bytes: int) -> None:
    """Check that the data holds all the values that it announces, and not too many bytes of them; build nothing."""
    reader = msgpack.Unpacker(max_buffer_size=max(len(data), 1))
    reader.feed(data)
    if len(data) <= max_bytes:
        reader.skip()
        return
    num_bytes = len(data)
    if (num_fields := reader.read_map_header()) > MAX_KEYS:
        raise ValueError(f"{num_fields} fields")
    for _ in range(num_fields):
        reader.skip()
        begin = reader.tell()
        reader.skip()
        if data[begin] in _PLAIN_BYTES:
            num_bytes -= reader.tell() - begin
    if num_bytes > max_bytes:
        raise ValueError(f"{num_bytes} bytes beside those of plain bytes; at most {max_bytes} go")


def _refuse(code: int, data: bytes) -> None:
    raise ValueError(f"an extension type {code}")
