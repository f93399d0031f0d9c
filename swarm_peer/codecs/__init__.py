"""The codecs of whatever travels, by the names that a manifest gives them. Knows neither manifests nor messages.

A further codec is a class in a file of its own, derived from `codecs/base.py: Codec`, and a line here.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from swarm_peer.codecs.base import Codec

# Each codec's name, and where it is: it is imported when it is first used, since a manifest is checked without torch.
CODECS = {
    "none": "swarm_peer.codecs.floats:FP32",
    "fp16": "swarm_peer.codecs.floats:FP16",
    "bf16": "swarm_peer.codecs.floats:BF16",
    "blockwise_8bit": "swarm_peer.codecs.blockwise:BLOCKWISE_8BIT",
    "int5_hadamard": "swarm_peer.codecs.hadamard:INT5_HADAMARD",
    "int4_hadamard": "swarm_peer.codecs.hadamard:INT4_HADAMARD",
    "topk_2bit": "swarm_peer.codecs.sparse:TOPK_2BIT",
    "sign": "swarm_peer.codecs.sign:SIGN",
}

# These lose so much that it has to be added to what is encoded next: what is averaged step by step can wait, while an
# activation and its gradient are sent once.
NEED_FEEDBACK = frozenset({"topk_2bit", "sign"})
# The codec of averages at the beginning and the end of a run that uses one of these.
DENSE = "blockwise_8bit"

# The codec of whatever travels as it is, in every run.
PLAIN = "none"


def find_codec(name: str) -> Codec:
    """The codec of a name that has been checked."""
    return _load(CODECS[name])


@cache
def _load(place: str) -> Codec:
    codec: Codec = resolve_name(place)
    return codec


def check_codec_of_wires(name: str) -> str:
    """Check the name of a codec of what is sent once, for a field of a pydantic model.

    Raises:
        PydanticCustomError: there is no such codec, or what it loses would have to be sent later
    """
    return check_codec(name, [each for each in CODECS if each not in NEED_FEEDBACK])


def check_codec(name: str, names: Collection[str] = CODECS) -> str:
    """Check the name of a codec, for a field of a pydantic model.

    Raises:
        PydanticCustomError: there is no such codec
    """
    if name not in names:
        *others, last = map(repr, names)
        raise PydanticCustomError(
            "literal_error", "Input should be {expected}", {"expected": f"{', '.join(others)} or {last}"}
        )
    return name
