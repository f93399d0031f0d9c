"""How fast is each codec, how many bytes does it make, and how large is its error? One thread, as a busy peer has.

Speeds are in MB of fp32 a second, the best of some tries; codecs alternate, so that others on the machine hurt all
alike. `stochastic` is how gradients go, which makes a difference to int4_hadamard and int5_hadamard alone. Errors are
relative L2 errors of a round trip of normally distributed numbers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from swarm_peer.codecs import CODECS
from swarm_peer.wire.codecs import decode, encode, encoded_bytes

# A hop of configs/demo.yaml, one of configs/gpt2-124m.yaml, and one of a model of 7 billion parameters.
SHAPES = ((8, 128, 192), (4, 1024, 768), (2, 2048, 4096))


def seconds(work: Callable[[], object]) -> float:
    """The time that some work takes, results on the CPU included."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(shape: tuple[int, ...], device: str, tries: int) -> dict[str, dict[str, float]]:
    """The best times of encoding to nearest, encoding stochastically and decoding, by codec."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
    best: dict[str, dict[str, float]] = {codec: {} for codec in CODECS}
    for _ in range(tries + 1):  # the first of them imports and allocates
        for codec, times in best.items():
            data = encode(tensor, codec)
            for name, work in (
                ("nearest", partial(encode, tensor, codec)),
                ("stochastic", partial(encode, tensor, codec, 1)),
                ("decode", partial(decode, data, shape, codec, device)),
            ):
                times[name] = min(times.get(name, float("inf")), seconds(work))
    return best


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tries", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| shape | codec | bytes a number | encode | stochastic | decode | error | stochastic |")
    print("|---|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        megabytes = 4 * tensor.numel() / 1e6
        for codec, times in measure(shape, options.device, options.tries).items():
            errors = [
                float((decode(encode(tensor, codec, seed), shape, codec) - tensor).norm() / tensor.norm())
                for seed in (None, 1)
            ]
            speeds = " | ".join(f"{megabytes / times[name]:,.0f}" for name in ("nearest", "stochastic", "decode"))
            size = encoded_bytes(shape, codec) / tensor.numel()
            print(f"| {shape} | {codec} | {size:.3f} | {speeds} | {errors[0]:.2g} | {errors[1]:.2g} |")


if __name__ == "__main__":
    main()
