"""The shares of a vector that members average, and the average of encoded parts, bit by bit. Pure.

Members add what they have received in one order and encode it once, so that all of them hold the same numbers. With a
codec that needs feedback, a member adds up **leftovers**: what it has brought, or has averaged, and not yet sent. They
are of the unit of what is brought, a gradient times its weight, and belong to positions: who averages a position may
change from one averaging round to the next. Over all members, an average times the total weight and the leftovers make
the sum of what was brought.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from swarm_peer.codecs.base import Codec

# Values of a part, at the most: 2 MB of fp32, half a megabyte in 8 bit. Twice as many hold up the event loop for twice
# as long; half as many take it a fifth more time in all.
MAX_PART_VALUES = 2**19
# Values that a member sends to all others at a time. In a large stage the parts are smaller: each waits for one to
# every other member, and those for one member must not come further apart than averaging.chunk_timeout_s.
MAX_VALUES_AT_ONCE = 2**22
# No sum of all members' values is larger, since each part is checked for that. It leaves room in fp32 for what codecs
# multiply and add before they encode.
LARGEST_SUM = 2.0**110
# Means that are larger count as not finite at the member that has them, so that its parts pass that check for all
# weights of up to 2^45 together.
LARGEST_MEAN = 2.0**64
# With feedback, a member brings sums and leftovers, and none that is larger: it passes the check among 2^13 members.
LARGEST_BROUGHT = 2.0**96
# Large parts are whole multiples of this, which is one of all blocks that codecs work on.
PART_MULTIPLE = 4096


def part_values(num_values: int, num_members: int) -> int:
    """How many of `num_values` values make a part, among so many members; the last one may be shorter.

    All members average as many parts, or nearly, and so as many values.
    """
    most = min(MAX_PART_VALUES, MAX_VALUES_AT_ONCE // num_members)
    most -= most % PART_MULTIPLE if most > PART_MULTIPLE else 0
    share = -(-num_values // num_members)
    values = max(1, -(-share // -(-share // most))) if share else 1
    multiples = -(-values // PART_MULTIPLE)
    return min(multiples * PART_MULTIPLE, most) if multiples > 1 else values


def shares_of(values: Tensor, num_members: int) -> list[tuple[Tensor, ...]]:
    """The parts of flat values that each member averages, as views: neighbours, of which some have one more."""
    parts = torch.split(values, part_values(len(values), num_members)) if len(values) else ()
    bounds = [len(parts) * index // num_members for index in range(num_members + 1)]
    return [parts[begin:end] for begin, end in pairwise(bounds)]


def mean_of_parts(parts: Sequence[Tensor], weights: Sequence[float], total: float) -> Tensor:
    """The sum of one part of each member, in the members' order, times their weights, divided by the total."""
    mean = torch.zeros(len(parts[0]))
    for part, weight in zip(parts, weights, strict=True):
        mean.add_(part, alpha=weight)
    return mean.div_(total)


def encode_part(part: Tensor, codec: Codec, seed: int, leftover: Tensor | None = None, factor: float = 1.0) -> Tensor:
    """Encode a part, or an average, and note what is lost by that.

    Args:
        leftover: to which it is added, times a factor
    """
    encoded = codec.encode(part if codec.scale == 1.0 else part * codec.scale, seed)
    if leftover is not None:
        leftover.add_(part - decode_part(encoded, codec, len(part)), alpha=factor)
    return encoded


def decode_part(encoded: Tensor, codec: Codec, num_values: int) -> Tensor:
    """Decode a part, or an average, to what its receiver computes with."""
    values = codec.decode(encoded, num_values)
    return values if codec.scale == 1.0 else values / codec.scale


def averaged(brought: Mapping[str, Tensor], total: float, codec: Codec, leftovers: Mapping[str, Tensor]) -> Tensor:
    """The average that members come to, in one process.

    Args:
        brought: flat values of each member
        total: weight of all that the values are sums of
        codec: one that rounds without chance
        leftovers: of each member, of the values' size, to which the codec's losses are added
    """
    members = sorted(brought)
    shares = {peer: shares_of(brought[peer], len(members)) for peer in members}
    left = {peer: shares_of(leftovers[peer], len(members)) for peer in members}
    averages = []
    for index, owner in enumerate(members):
        for number, own in enumerate(shares[owner][index]):
            parts = []
            for peer in members:
                part = shares[peer][index][number]
                encoded = part if peer == owner else encode_part(part, codec, 0, left[peer][index][number])
                parts.append(part if peer == owner else decode_part(encoded, codec, len(part)))
            mean = mean_of_parts(parts, [1.0] * len(parts), total)
            encoded = encode_part(mean, codec, 0, left[owner][index][number], total)
            averages.append(decode_part(encoded, codec, len(own)))
    return torch.cat(averages)
