"""The frozen weights of a run, as its coordinator lists and gives them."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from swarm_peer.model.pretrained import ModelSource
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.base.base_giver import BaseGiver, entries_in
from swarm_peer.runtime.base.base_index import Base, make_base
from swarm_peer.runtime.context import Threads

log = logging.getLogger(__name__)


def with_base(resolved: ResolvedManifest, cache_dir: Path | None) -> tuple[ResolvedManifest, Base | None]:
    """The manifest that names the frozen weights, with their index, where members give them to each other.

    Reads all of the model once: a second per gigabyte. Of a model on the hub, what is not here is downloaded.

    Raises:
        UserError: the model cannot be read
    """
    model = resolved.manifest.model
    if model.adapter is None or model.pretrained is None:
        return resolved, None
    source = ModelSource(model.pretrained, cache_dir)
    if not (source.folder is not None if model.share_base is None else model.share_base):
        if source.folder is None and model.share_base is None:
            text = "base_not_shared model=%s reason=its licence may forbid that: each peer reads it from the hub, "
            log.info(text + "unless model.share_base is set to true", model.pretrained)
        return resolved, None
    log.info("base_is_hashed model=%s: a second for each gigabyte", model.pretrained)
    begun_s = time.monotonic()
    base = make_base(source)
    seconds = time.monotonic() - begun_s
    log.info("base_hashed model=%s tensors=%d seconds=%.1f", model.pretrained, len(base.index.tensors), seconds)
    model = model.model_copy(update={"base_sha256": base.sha256})
    return ResolvedManifest.of(resolved.manifest.model_copy(update={"model": model})), base


def base_giver(resolved: ResolvedManifest, base: Base | None, threads: Threads, cache_dir: Path | None) -> BaseGiver:
    """Gives the frozen weights to peers, if these are to have them from here."""
    name = resolved.manifest.model.pretrained

    def found(base: Base) -> dict[int, Path]:
        return {} if name is None else entries_in(ModelSource(name, cache_dir), base)

    return BaseGiver(threads=threads, found=found, base=base)
