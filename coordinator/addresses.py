"""Files of addresses: where a coordinator listens, and where its peers did when it last saw them."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

# Some of the peers are gone when a coordinator comes back, and some cannot be dialled from where it is.
MAX_KNOWN = 32


def write_addresses(path: Path, addresses: Sequence[str]) -> None:
    """Whoever reads it meanwhile finds all of them, or those of before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text("\n".join(addresses) + "\n")
    partial.replace(path)


class KnownPeers:
    """The addresses of a run's peers, kept in the run's folder: through them its coordinator finds the run again."""

    def __init__(self, output: Path):
        self._path = output / "peers"
        self._kept: set[str] = set()

    def read(self) -> list[str]:
        return self._path.read_text().split() if self._path.exists() else []

    def keep(self, addresses: Sequence[str]) -> None:
        """Some of these, at random. Where there are none, those of before stay: peers may be out of sight."""
        if addresses and set(addresses) != self._kept:
            self._kept = set(addresses)
            write_addresses(self._path, random.sample(addresses, min(MAX_KNOWN, len(addresses))))
