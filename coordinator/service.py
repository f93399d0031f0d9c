"""The coordinator of a run: publishes the manifest, watches the run, saves the model at its end.

It is not on the data path: kill it and training goes on; started again with its key, it carries on from what the DHT
says.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskGroup

from coordinator.addresses import KnownPeers
from coordinator.checkpointing import NO_CHECKPOINTS, CheckpointPlan, CheckpointWriter, Resumption
from coordinator.coordination import Coordination
from coordinator.export import export_states
from coordinator.fetching import fetch_states, open_transport
from coordinator.metrics import CoordinatorMetrics
from coordinator.onlooker import end_run_for, observe
from coordinator.rebalancer import EVEN_OUT, Rebalancer, RebalancingOptions
from coordinator.run_watch import MetricsFile, RunWatch
from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, CallTimeout, PeerUnreachable, SwarmError, UserError
from swarm_peer.model.architecture import parse_model_config, resolve_model
from swarm_peer.model.partition import stages_of
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.recovery import FIRST_ORIGIN, Origin
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.dht import SwarmDHT
from swarm_peer.runtime.directory import Directory
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.orders import wait_for_end
from swarm_peer.runtime.p2p_transport import P2PTransport
from swarm_peer.runtime.recovery import STEPS_BETWEEN_LINES
from swarm_peer.runtime.signal import Signal
from swarm_peer.runtime.tokenizers import load_tokenizer
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import KeptCall
from swarm_peer.wire.records import (
    MANIFESTS_KEY,
    ManifestRecord,
    OriginRecord,
    Record,
    origin_key,
)

log = logging.getLogger(__name__)

POLL_S = 2.0
PROBE_TIMEOUT_S = 3.0
# Published again and again while the coordinator lives, and kept for a day after it: newcomers need it.
RUN_LIFETIME_S = 24 * 3600.0
PUBLISH_RUN_S = 60.0


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
        plan: which checkpoints to write, and which to go on from
        on_ready: called when peers may join
        rebalancing: how peers are moved between stages; None for not at all
        run_key: which the run is named after; this node's identity if not given
        standby: leave the run to another coordinator for as long as there is one

    Attributes:
        ended: why, if the run has been ended by another coordinator or its operator
    """

    def __init__(
        self,
        manifest: RunManifest,
        dht: SwarmDHT,
        output: Path,
        on_update: Callable[[RunWatch], None] = lambda _: None,
        resume: bool = False,
        on_line: Callable[[dict[str, Any]], None] = lambda _: None,
        plan: CheckpointPlan = NO_CHECKPOINTS,
        on_ready: Callable[[], None] = lambda: None,
        cache_dir: Path | None = None,
        rebalancing: RebalancingOptions | None = EVEN_OUT,
        run_key: Identity | None = None,
        standby: bool = False,
    ):
        self.manifest = manifest
        self.watch = RunWatch(manifest, SwarmView(manifest.stages.count))
        self.metrics = CoordinatorMetrics()
        self.ended: str | None = None
        self._dht = dht
        self._run_key = run_key or dht.identity
        self._run_id = self._run_key.peer_id
        self._standby = standby
        self._output = output
        self._on_update = on_update
        self._resume = resume
        self._on_line = on_line
        self._plan = plan
        self._on_ready = on_ready
        self._cache_dir = cache_dir
        self._rebalancing = rebalancing
        self._rebalancer: Rebalancer | None = None
        self._origin, self._begun = FIRST_ORIGIN, int(time.time())
        self._rebalancer_term: Term | None = None
        self._peer_metrics = PeerMetrics()
        self._directory = Directory(manifest, dht, "", None, self._peer_metrics, Signal())
        self._known_peers = KnownPeers(output)

    @property
    def model_folder(self) -> Path:
        return self._output / "model"

    async def run(self) -> bool:
        """Until the run has reached its steps and its model is saved.

        Returns:
            whether it is saved here; False if the run has been ended elsewhere

        Raises:
            UserError: the model could not be saved in that folder
            SwarmError: the DHT process has died, or the run was ended before its model was saved
        """
        check_output(self._output)
        metrics_file = MetricsFile(self._output, self._resume)
        try:
            async with open_transport(self._dht, self._peer_metrics) as transport, anyio.create_task_group() as tasks:
                tasks.start_soon(self._dht.watch)
                if self._plan.resume is not None:
                    self._origin = await self._resume_run(transport, metrics_file, tasks)
                else:
                    await self._find_origin()
                await self._publish_run()
                tasks.start_soon(self._keep_published)
                self._on_ready()
                tasks.start_soon(self._directory.run_polling, range(self.manifest.stages.count))
                lease_s = self.manifest.limits.announcement_s
                coordination = Coordination(self._dht, self._run_key, lease_s, self._standby)
                tasks.start_soon(coordination.run)
                if self._plan.store is not None:
                    view = lambda: self._directory.view  # noqa: E731
                    acts = lambda: coordination.acts  # noqa: E731
                    writer = CheckpointWriter(
                        self.manifest, self._plan, lambda: self.watch.step, self.watch.born, view, acts
                    )
                    tasks.start_soon(writer.run, transport)
                tasks.start_soon(self._drop_who_is_gone, transport)
                saved = False
                tasks.start_soon(self._look_for_end)
                while not saved and self.ended is None:
                    for line in await self._observe():
                        if 0 < metrics_file.step < line["step"] - 1:
                            missing = f"{metrics_file.step + 1} to {line['step'] - 1}"
                            log.warning("lines_missing steps=%s reason=nobody tells of them any more", missing)
                        if metrics_file.write(line):
                            self._on_line(line)
                    self._known_peers.keep(self._directory.addresses())
                    self.watch.coordination = coordination.newest
                    await self._rebalance(coordination)
                    self.metrics.update(self.watch)
                    self._on_update(self.watch)
                    if coordination.acts and self._steps_are_done():
                        saved = await self._export(transport)
                    await anyio.sleep(0 if saved else POLL_S)
                tasks.cancel_scope.cancel()
        finally:
            metrics_file.close()
        if not saved and coordination.acts and self._steps_are_done():
            raise SwarmError("the run was ended before its model was saved: export one of its checkpoints")
        return saved

    async def _observe(self) -> list[dict[str, Any]]:
        try:
            return await observe(self._dht, self._directory.view, self.watch)
        except CallError as error:
            log.warning("run_not_seen reason=%s", error)
            return []

    async def _rebalance(self, coordination: Coordination) -> None:
        if self._rebalancing is None or not coordination.acts:
            return  # its orders stand for as long as its term is the newest
        if self._rebalancer is None or self._rebalancer_term != coordination.term:
            self._rebalancer_term = coordination.term
            now_s = anyio.current_time()
            self._rebalancer = Rebalancer(self.manifest, self._rebalancing, now_s, coordination.inherited)
        self._rebalancer.look(self.watch.view, *self.watch.delivered(), anyio.current_time())
        await coordination.order(self._rebalancer.assignments(), self._rebalancer.reason)
        self.metrics.migrations.set(self._rebalancer.migrations)

    def _steps_are_done(self) -> bool:
        return self.watch.step >= self.manifest.training.steps

    async def _look_for_end(self) -> None:
        self.ended = await wait_for_end(self._dht, self._run_id, self._steps_are_done)

    async def look(self, stages: Sequence[int]) -> SwarmView:
        """Look up who announces these stages now."""
        return await self._directory.refresh(stages)

    async def end(self, reason: str) -> None:
        """Tell the peers, and other coordinators, that they may go."""
        await end_run_for(self._dht, self._run_key, self._begun, reason)

    async def _find_origin(self) -> None:
        """Where and when the run began, if this is another coordinator of it."""
        while True:
            try:
                records = await self._dht.fetch(origin_key(self._run_id), OriginRecord, self._run_id)
            except CallError:
                await anyio.sleep(POLL_S)
                continue
            if (record := records.get(self._run_id)) is not None:
                self._origin, self._begun = record.origin(), record.begun
            return

    async def _resume_run(self, transport: P2PTransport, metrics_file: MetricsFile, tasks: TaskGroup) -> Origin:
        checkpoint = self._plan.resume
        assert checkpoint is not None
        step = max(checkpoint.step, metrics_file.global_step) + STEPS_BETWEEN_LINES
        folder = Path(tempfile.mkdtemp(prefix="swarm-"))
        tasks.start_soon(_removed_at_end, folder)
        resumption = Resumption(self.manifest, checkpoint, step, folder)
        await resumption.prepare(transport)
        return resumption.origin

    async def _drop_who_is_gone(self, transport: P2PTransport) -> None:
        """Call peers that have missed an announcement: waiting for the end of the last one would take longer."""
        call = KeptCall(manifest=self.manifest.hash)

        async def ask(peer_id: str) -> None:
            try:
                await transport.call(peer_id, call, timeout_s=PROBE_TIMEOUT_S)
            except (PeerUnreachable, CallTimeout):
                self._directory.drop(peer_id)
            except CallError:
                return  # it answers

        while True:
            await anyio.sleep(POLL_S)
            async with anyio.create_task_group() as tasks:
                for peer_id in self._directory.overdue():
                    tasks.start_soon(ask, peer_id)

    async def _publish_run(self) -> None:
        """The origin first: peers join when they have the manifest, and wait for the origin."""
        origin = OriginRecord(step=self._origin.step, updates=self._origin.updates, begun=self._begun)
        await self._store_for_run(origin_key(self._run_id), origin, RUN_LIFETIME_S)
        manifest = ManifestRecord(manifest=self.manifest.canonical_json().decode())
        await self._store_for_run(MANIFESTS_KEY, manifest, RUN_LIFETIME_S)

    async def _store_for_run(self, key: str, record: Record, lifetime_s: float) -> None:
        await self._dht.store(key, record, self._run_id, lifetime_s, signer=self._run_key)

    async def _keep_published(self) -> None:
        while True:
            await anyio.sleep(PUBLISH_RUN_S)
            await self._publish_run()

    async def _export(self, transport: P2PTransport) -> bool:
        """Returns whether the model is saved; if peers do not give it, now or yet, the next look leads here again."""
        try:
            states = await fetch_states(transport, self._directory, self.manifest, self.watch.global_step + 1)
        except SwarmError as error:
            log.warning("model_not_saved reason=%s", error)
            return False
        if states[0].updates < self.manifest.training.steps:
            # Stage 0 has told of steps that have not been, or the run has just gone back.
            log.warning("model_not_saved reason=its stages have made %d updates", states[0].updates)
            return False
        await anyio.to_thread.run_sync(export_states, self.manifest, states, self.model_folder, self._cache_dir)
        log.info("model_saved folder=%s", self.model_folder)
        return True


async def _removed_at_end(folder: Path) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
