"""The bytes that a sample's activations and gradients have between stages.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

from swarm_peer.codecs import find_codec
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.link_limit import StageTraffic


def hop_bytes(length: int, width: int, codec: str, with_tokens: bool = True) -> float:
    """Bytes of one sample at one boundary; its T + 1 token ids travel with the activations.

    Args:
        width: values of a token that pass
    """
    return find_codec(codec).num_bytes(length * width) + (4.0 * (length + 1) if with_tokens else 0.0)


def boundary_bytes(resolved: ResolvedManifest) -> float:
    """The bytes that one sample makes two neighbouring stages send each other."""
    manifest, length, width = resolved.manifest, resolved.manifest.data.sequence_length, resolved.boundary_width
    forth = hop_bytes(length, width, manifest.wire.activations)
    return forth + hop_bytes(length, width, manifest.wire.gradients, with_tokens=False)


def stage_traffic(resolved: ResolvedManifest) -> tuple[StageTraffic, ...]:
    """The bytes that one sample makes a peer of each stage send and receive."""
    manifest, length, width = resolved.manifest, resolved.manifest.data.sequence_length, resolved.boundary_width
    forth = hop_bytes(length, width, manifest.wire.activations)
    back = hop_bytes(length, width, manifest.wire.gradients, with_tokens=False)
    return tuple(
        StageTraffic(
            sent_bytes=forth * (not spec.is_last) + back * (not spec.is_first),
            received_bytes=forth * (not spec.is_first) + back * (not spec.is_last),
        )
        for spec in resolved.specs
    )
