"""The coordinator of a run: publishes the manifest, watches the run, saves the model at its end.

It is not on the data path: kill it and training goes on; started again with its key, it carries on from what the DHT
says.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from coordinator.metrics import CoordinatorMetrics
from coordinator.run_watch import MetricsFile, RunWatch
from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, SwarmError, UserError
from swarm_peer.model.architecture import parse_model_config, resolve_model
from swarm_peer.model.export import export_model
from swarm_peer.model.partition import stages_of
from swarm_peer.model.training import max_state_bytes
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.dht import SwarmDHT
from swarm_peer.runtime.directory import Directory
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.p2p_transport import P2PTransport
from swarm_peer.runtime.signal import Signal
from swarm_peer.runtime.state_transfer import fetch_state
from swarm_peer.runtime.tokenizers import load_tokenizer
from swarm_peer.wire.messages import STATE_CHUNK_BYTES, StateIndexCall
from swarm_peer.wire.records import MANIFESTS_KEY, EndRecord, ManifestRecord, ProgressRecord, end_key, progress_key

log = logging.getLogger(__name__)

POLL_S = 1.0
# Published again and again while the coordinator lives, and kept for a day after it: newcomers need it.
MANIFEST_LIFETIME_S = 24 * 3600.0
PUBLISH_MANIFEST_S = 60.0
END_LIFETIME_S = 3600.0
# Tries to download each stage's state at the end of the run, a second apart.
EXPORT_TRIES = 30


def resolve_manifest(manifest: RunManifest, cache_dir: Path | None = None) -> RunManifest:
    """The manifest as it is published: with an inline model config, and everything checked that can be.

    Raises:
        UserError: the model, its cut or the tokenizer does not fit
    """
    manifest = manifest.model_copy(update={"model": resolve_model(manifest.model, cache_dir)})
    stages_of(manifest)
    assert isinstance(manifest.model.config, dict)
    load_tokenizer(manifest.data, parse_model_config(manifest.model.config).vocab_size, cache_dir)
    return manifest


def join_command(addresses: list[str]) -> str:
    return f"swarm-peer --stage auto --initial-peers {' '.join(addresses)}"


def check_output(output: Path) -> None:
    """Raises UserError: a run has ended there."""
    if (output / "model").exists():
        raise UserError(f"{output / 'model'} is there already: name another --output, or move it away")


class RunService:
    """Belongs to the event loop's thread.

    Args:
        output: folder of metrics.jsonl and of the model
        on_update: told about the watch after each look at the DHT
        resume: carry on with the metrics.jsonl that is there
        on_line: told each line that is new in metrics.jsonl
    """

    def __init__(
        self,
        manifest: RunManifest,
        dht: SwarmDHT,
        output: Path,
        on_update: Callable[[RunWatch], None] = lambda _: None,
        resume: bool = False,
        on_line: Callable[[dict[str, Any]], None] = lambda _: None,
    ):
        self.manifest = manifest
        self.watch = RunWatch(manifest, SwarmView(manifest.stages.count))
        self.metrics = CoordinatorMetrics()
        self._dht = dht
        self._run_id = dht.identity.peer_id
        self._output = output
        self._on_update = on_update
        self._resume = resume
        self._on_line = on_line
        self._peer_metrics = PeerMetrics()
        self._directory = Directory(manifest, dht, "", None, self._peer_metrics, Signal())

    @property
    def model_folder(self) -> Path:
        return self._output / "model"

    async def run(self) -> None:
        """Until the run has reached its steps and its model is saved.

        Raises:
            SwarmError: the model could not be saved
        """
        check_output(self._output)
        metrics_file = MetricsFile(self._output, self._resume)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._dht.watch)
                tasks.start_soon(self._publish_manifest)
                while self.watch.step < self.manifest.training.steps:
                    for line in await observe(self._dht, self._directory, self.watch):
                        if metrics_file.write(line):
                            self._on_line(line)
                    self.metrics.update(self.watch)
                    self._on_update(self.watch)
                    await anyio.sleep(POLL_S)
                await self._export()
                tasks.cancel_scope.cancel()
        finally:
            metrics_file.close()

    async def look(self, stages: Sequence[int]) -> SwarmView:
        """Look up who announces these stages now."""
        return await self._directory.refresh(stages)

    async def end(self, reason: str) -> None:
        """Tell the peers that they may go."""
        await self._dht.store(end_key(self._run_id), EndRecord(reason=reason), self._run_id, END_LIFETIME_S)

    async def _publish_manifest(self) -> None:
        record = ManifestRecord(manifest=self.manifest.canonical_json().decode())
        while True:
            await self._dht.store(MANIFESTS_KEY, record, self._run_id, MANIFEST_LIFETIME_S)
            await anyio.sleep(PUBLISH_MANIFEST_S)

    async def _export(self) -> None:
        assert isinstance(self.manifest.model.config, dict)
        tensors = {}
        async with open_transport(self._dht, self._peer_metrics) as transport:
            for stage in range(self.manifest.stages.count):
                tensors |= await self._fetch_stage(transport, stage)
        specs, shared = stages_of(self.manifest), self.manifest.model.share_layers
        config, folder = self.manifest.model.config, self.model_folder
        await anyio.to_thread.run_sync(lambda: export_model(config, tensors, folder, specs=specs, share_layers=shared))
        log.info("model_saved folder=%s", folder)

    async def _fetch_stage(self, transport: P2PTransport, stage: int) -> dict:  # type: ignore[type-arg]
        call = StateIndexCall(manifest=self.manifest.hash, of_stage=stage, min_step=self.watch.global_step + 1)
        for _ in range(EXPORT_TRIES):
            view = await self._directory.refresh([stage])
            donors = [peer.peer_id for peer in view.serving(stage)]
            try:
                max_bytes = max_state_bytes(self.manifest, stage)
                state = await fetch_state(transport, donors, call, max_bytes=max_bytes)
                return dict(state.tensors)
            except CallError as error:
                log.warning("export_waits stage=%d reason=%s", stage, error)
                await anyio.sleep(1.0)
        raise SwarmError(f"the run is done, but no peer of stage {stage} gave its weights: see the log for each try")


async def observe(dht: SwarmDHT, directory: Directory, watch: RunWatch) -> list[dict]:  # type: ignore[type-arg]
    """Look once at the DHT; returns the lines of newly finished steps."""
    manifest = watch.manifest
    view = await directory.refresh(range(manifest.stages.count))
    progress = await dht.fetch(progress_key(manifest.hash), ProgressRecord, manifest.hash)
    return watch.observe(view, progress, anyio.current_time())


@asynccontextmanager
async def open_transport(dht: SwarmDHT, metrics: PeerMetrics) -> AsyncIterator[P2PTransport]:
    """A transport for downloading states."""
    async with P2PTransport.open(await dht.p2p(), 4 * STATE_CHUNK_BYTES, metrics) as transport:
        yield transport
