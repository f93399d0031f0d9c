"""GPUs by name, with the vendors' figures in gpus.yaml."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from coordinator.yaml_text import parse_yaml
from swarm_peer.errors import UserError
from swarm_peer.settings import Section

# Vendor and series say nothing that the model number does not.
_NOISE = re.compile(r"nvidia|amd|geforce|tesla|instinct|rtx|[^a-z0-9]")


class Gpu(Section):
    """One entry of gpus.yaml."""

    name: str
    aliases: tuple[str, ...] = ()
    fp32: float = Field(gt=0)
    """peak TFLOP/s"""
    fp16: float | None = Field(None, gt=0)
    """peak TFLOP/s of matrix units that add up in fp32"""
    bf16: float | None = Field(None, gt=0)
    """peak TFLOP/s of matrix units"""
    memory_gb: float = Field(gt=0)
    source: str

    def tflops(self, precision: Literal["fp32", "bf16", "fp16"]) -> float:
        """Peak at a precision.

        Raises:
            UserError: it has no fast arithmetic of that type
        """
        peak: float | None = getattr(self, precision)
        if peak is None:
            other = "fp16" if self.fp16 is not None else "fp32"
            raise UserError(
                f"gpu {self.name} has no {precision}: choose another precision, such as --set model.precision={other}, "
                f"or leave that GPU out"
            )
        return peak


@cache
def gpus() -> tuple[Gpu, ...]:
    """All entries of gpus.yaml."""
    content = parse_yaml(Path(__file__).with_name("gpus.yaml").read_text(encoding="utf-8"))
    return tuple(Gpu.model_validate(entry) for entry in content)


def find_gpu(name: str) -> Gpu:
    """The GPU of this name, in any case, as a person or a driver writes it, with or without vendor and series.

    Raises:
        UserError: it is not in the table; names those that look alike
    """
    known = {_plain(alias): gpu for gpu in gpus() for alias in (gpu.name, *gpu.aliases)}
    plain = _plain(name)
    if plain in known:
        return known[plain]
    nearest = list(dict.fromkeys(known[match].name for match in get_close_matches(plain, known, n=4, cutoff=0.4)))
    hint = f"nearest are {', '.join(nearest)}" if nearest else f"known are {', '.join(gpu.name for gpu in gpus())}"
    raise UserError(f"gpu {name!r} is not in the table ({hint}): correct it, or give tflops and memory_gb by hand")


def _plain(name: str) -> str:
    return _NOISE.sub("", name.lower())
