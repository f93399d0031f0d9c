"""The composition root of a peer: makes the parts, wires them, starts them and stops them in reverse order."""

from __future__ import annotations

import logging
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import anyio
import torch

from swarm_peer.config import PeerOptions, RunManifest
from swarm_peer.errors import CallError, UserError
from swarm_peer.model.partition import StageSpec, stages_of
from swarm_peer.model.pretrained import check_pretrained
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.rebalancing import choose_stage
from swarm_peer.policy.recovery import Origin
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView
from swarm_peer.runtime.averaging import GradientAverager
from swarm_peer.runtime.bootstrap import find_manifest, read_addresses
from swarm_peer.runtime.compute import ComputeThread
from swarm_peer.runtime.data import SliceReader, load_tokenizer, validation_samples
from swarm_peer.runtime.dht import SwarmDHT
from swarm_peer.runtime.directory import ANNOUNCEMENTS_PER_LIFETIME, Directory
from swarm_peer.runtime.gate import StepGate
from swarm_peer.runtime.gossip import Gossip
from swarm_peer.runtime.handlers import CallDispatcher, MicrobatchHandler
from swarm_peer.runtime.handover import GradientHandover
from swarm_peer.runtime.leases import SliceLeases
from swarm_peer.runtime.metrics import PeerMetrics, serve_metrics
from swarm_peer.runtime.next_stage import NextStage
from swarm_peer.runtime.orders import wait_for_end, wait_for_order
from swarm_peer.runtime.p2p_transport import P2PTransport
from swarm_peer.runtime.preemption import wait_for_notice
from swarm_peer.runtime.preparation import (
    check_data_files,
    choose_device,
    make_averager,
    microbatch_capacity,
    stage_costs,
    stage_memory,
)
from swarm_peer.runtime.processes import Restart, restarted_with, run_loop, signals_set, start_anew
from swarm_peer.runtime.progress import ProgressBook
from swarm_peer.runtime.recovery import Recovery, Start
from swarm_peer.runtime.samples import SamplePool
from swarm_peer.runtime.scratch import scratch_folder
from swarm_peer.runtime.signal import Signal
from swarm_peer.runtime.snapshots import StateDonor
from swarm_peer.runtime.source import CountedHook, MicrobatchSource
from swarm_peer.runtime.stage_group import StageGroup
from swarm_peer.runtime.stage_runner import StageRunner
from swarm_peer.runtime.steps import StepLoop
from swarm_peer.wire.codecs import encoded_bytes
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import STATE_CHUNK_BYTES
from swarm_peer.wire.records import OriginRecord, ProgressRecord, origin_key, progress_key

log = logging.getLogger(__name__)

# How long undecided newcomers wait for each other's announcements before they choose a stage.
CHOOSING_S = 1.5
PUBLISH_PROGRESS_S = 1.0
# Between tries to join a stage that nobody serves.
JOIN_PAUSE_S = 1.0
# To write the last replies. Calls of stage-mates are kept until there is something to say, and not waited for.
LAST_REPLIES_S = 3.0
# For a peer that starts anew: one of them will be there.
ADDRESSES_KEPT = 16
# The state's index and the headroom of a frame.
FRAME_SLACK_BYTES = 16 * 2**20


def run_peer(options: PeerOptions, counted: CountedHook | None = None) -> None:
    """Run a peer until it is told to stop or the run ends. To be called in the main thread.

    Args:
        counted: told of each microbatch that a stage-0 peer counts

    Raises:
        UserError: something that the user can mend
    """
    metrics = PeerMetrics()
    if options.metrics_port is not None:
        log.info("metrics_served port=%d", serve_metrics(metrics.registry, options.metrics_port))
    device = choose_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    before = restarted_with()
    addresses = read_addresses(options.initial_peers)
    if before is not None:
        addresses += before.initial_peers
    with scratch_folder() as folder:
        snapshots = folder / "snapshots"
        if before is not None and before.snapshots is not None:
            Path(before.snapshots).rename(snapshots)
        identity_path = options.identity_path or folder / "identity"
        identity = Identity.load_or_create(identity_path)
        dht = SwarmDHT.start(
            initial_peers=addresses,
            host_maddrs=options.host_maddrs,
            announce_maddrs=options.announce_maddrs,
            identity=identity,
            identity_path=identity_path,
            metrics=metrics,
        )
        log.info("peer_started peer=%s addresses=%s", identity.peer_id, " ".join(dht.addresses()))
        try:
            restart = _run_in_swarm(options, addresses, device, dht, metrics, snapshots, counted, before)
        finally:
            dht.shutdown()
        if restart is not None and snapshots.exists():
            kept = Path(tempfile.mkdtemp(prefix="swarm-"))
            restart = replace(restart, snapshots=str(snapshots.rename(kept)))
    if restart is not None:
        start_anew(restart)


def _run_in_swarm(
    options: PeerOptions,
    addresses: list[str],
    device: torch.device,
    dht: SwarmDHT,
    metrics: PeerMetrics,
    snapshots: Path,
    counted: CountedHook | None,
    before: Restart | None,
) -> Restart | None:
    """Returns how to start anew, if at all."""
    run_id, manifest, stage = run_loop(_choose_run_and_stage, dht, options, addresses, metrics, before)
    spec = stages_of(manifest)[stage]
    check_pretrained(manifest, options.data_dir)
    if spec.is_first:
        check_data_files(manifest, options.data_dir)
    log.info("stage_chosen run=%s manifest=%s stage=%d layers=%s", run_id, manifest.hash, stage, list(spec.layers))
    # Forked before anything computes here, and before CUDA.
    averager = make_averager(manifest, spec, dht)
    try:
        peer = Peer(run_id, manifest, spec, options, device, dht, averager, metrics, snapshots, counted, before)
        run_loop(peer.run)
    finally:
        averager.shutdown()
    return peer.restart


async def _choose_run_and_stage(
    dht: SwarmDHT, options: PeerOptions, addresses: list[str], metrics: PeerMetrics, before: Restart | None
) -> tuple[str, RunManifest, int]:
    run_id, manifest = await find_manifest(dht, addresses, options.run_id if before is None else before.run_id)
    count = manifest.stages.count
    if before is not None:
        return run_id, manifest, before.stage
    if options.stage != "auto":
        if int(options.stage) >= count:
            raise UserError(f"--stage {options.stage}: the run has stages 0 to {count - 1}; name one of them, or auto")
        return run_id, manifest, int(options.stage)
    me = dht.identity.peer_id
    myself = PeerView(me, UNDECIDED, PeerState.JOINING, memory_bytes=options.max_memory or 0)
    directory = Directory(manifest, dht, options.device, lambda: myself, metrics, Signal())
    await directory.announce()
    await anyio.sleep(CHOOSING_S)
    view = await directory.refresh_surely([*range(count), UNDECIDED])
    choice = choose_stage(view, stage_costs(manifest), me, stage_memory_bytes=stage_memory(manifest))
    log.info("stage_decided stage=%d reason=%s", choice.stage, choice.reason)
    return run_id, manifest, choice.stage


class Peer:
    """One peer of one stage. The constructor builds the model; `run` does the rest."""

    def __init__(
        self,
        run_id: str,
        manifest: RunManifest,
        spec: StageSpec,
        options: PeerOptions,
        device: torch.device,
        dht: SwarmDHT,
        averager: GradientAverager,
        metrics: PeerMetrics,
        snapshots: Path,
        counted: CountedHook | None,
        before: Restart | None,
    ):
        """Args:
        snapshots: folder for them; those of its life before may be there
        before: its life before this one
        """
        self._before = before
        self._snapshots = snapshots
        self._run_id = run_id
        self._manifest = manifest
        self._spec = spec
        self._options = options
        self._device = device
        self._dht = dht
        self._averager = averager
        self._metrics = metrics
        self._counted = counted
        self._me = dht.identity.peer_id
        self._state = PeerState.JOINING
        self._state_since_s = time.monotonic()
        self._note = ""
        self.restart: Restart | None = None  # to go on with after `run`
        self._changed = Signal()
        self._stop = anyio.Event()
        self._told_to_end = anyio.Event()
        self._rng = random.Random(f"{manifest.seed} {self._me}")
        self._trainer = StageTrainer(manifest, spec, device, options.cache_dir, blank=True)
        num_parameters = sum(parameter.numel() for parameter in self._trainer.module.parameters())
        capacity = microbatch_capacity(manifest, spec, num_parameters, options.max_memory)
        # Stage 0 bounds itself by its window; the gate only counts its microbatches.
        self._gate = StepGate(10**6 if spec.is_first else capacity, self._changed)
        self._compute = ComputeThread(metrics)
        self._directory = Directory(manifest, dht, str(device), self._describe, metrics, self._changed)
        self._progress = ProgressBook(
            manifest.hash,
            manifest.training.global_batch_size,
            dht.identity,
            self._directory.is_author,
            metrics,
            self._changed,
        )
        metrics.stage.set(spec.index)

    def _enter_state(self, state: PeerState) -> None:
        self._state, self._state_since_s, self._note = state, time.monotonic(), ""

    def _describe(self) -> PeerView:
        moved_from, formerly = UNDECIDED, ""
        if self._before is not None and self._before.from_stage != self._spec.index:
            formerly = self._before.peer_id
            if self._state is PeerState.JOINING:
                moved_from = self._before.from_stage
        return PeerView(
            self._me,
            self._spec.index,
            self._state,
            self._steps.step,
            self._compute.samples_per_s,
            self._gate.admitted + self._gate.held,
            self._steps.updates,
            self._options.stage == "auto",
            self._note,
            memory_bytes=self._options.max_memory or 0,
            bandwidth_bytes_per_s=self._steps.download_bytes_per_s,
            since_s=self._state_since_s,
            moved_from=moved_from,
            formerly=formerly,
        )

    async def run(self) -> None:
        """Take part in the run until a signal or the run's end."""
        p2p = await self._dht.p2p()
        async with (
            P2PTransport.open(p2p, self._max_payload_bytes(), self._metrics) as transport,
            signals_set(self._told_to_end, self._stop),
            anyio.create_task_group() as tasks,
        ):
            self._transport = transport
            transport.unreachable = self._directory.drop
            await transport.serve(self._wire(transport))
            tasks.start_soon(self._dht.watch)
            tasks.start_soon(self._averager.watch)
            tasks.start_soon(self._watch_event_loop)
            tasks.start_soon(self._leave_on_notice)
            tasks.start_soon(self._look_for_end)
            tasks.start_soon(self._work)
            await self._stop.wait()
            await self._leave()
            if self._told_to_end.is_set():
                self.restart = None
            if self.restart is not None:
                connections = await self._dht.connections()
                self.restart = replace(self.restart, initial_peers=tuple(connections[:ADDRESSES_KEPT]))
            tasks.cancel_scope.cancel()
        self._compute.stop()

    def _wire(self, transport: P2PTransport) -> CallDispatcher:
        """Make the parts that need the transport; returns what answers its calls."""
        manifest, spec, metrics, changed = self._manifest, self._spec, self._metrics, self._changed
        hidden_size = self._trainer.module.config.hidden_size

        def view():  # type: ignore[no-untyped-def]
            return self._directory.view

        next_stage = None
        if not spec.is_last:
            next_stage = NextStage(
                spec.index + 1, manifest, hidden_size, transport, self._progress, view, metrics, self._rng
            )
        self._next_stage = next_stage
        keep = 2 * manifest.limits.max_in_flight
        self._runner = StageRunner(manifest, self._trainer, self._compute, next_stage, metrics, keep)
        group = StageGroup(manifest, spec.index, transport, self._averager, self._progress, view, metrics, changed)
        donor = StateDonor(self._trainer, self._compute, changed, spec.index, self._snapshots)
        self._recovery = Recovery(
            manifest, spec.index, self._run_id, transport, donor, view, self._directory.refresh_surely,
            self._first_origin, self._directory.unreached, changed,
        )  # fmt: skip
        leases = None
        if spec.is_first:
            reader = SliceReader(manifest, self._options.cache_dir)
            pool = SamplePool(reader, random.Random(f"{manifest.seed} {self._me} samples"), changed)
            leases = SliceLeases(
                manifest.hash, reader, pool, transport, self._progress, view, manifest.limits.announcement_s, metrics,
                changed,
            )  # fmt: skip

        def welcome(peer_id: str) -> None:
            group.welcome(peer_id)
            if leases is not None:
                leases.welcome(peer_id)

        def dismiss(peer_id: str, serial: int) -> None:
            self._directory.drop(peer_id, serial)
            if leases is not None:
                leases.forget(peer_id)

        gossip = self._gossip = Gossip(manifest.hash, transport, self._progress, welcome, dismiss)
        handover = GradientHandover(
            manifest.hash, spec.index, self._trainer, self._compute, self._runner, self._gate, transport, view, metrics,
            self._rng,
        )  # fmt: skip
        self._steps = StepLoop(
            manifest, self._trainer, self._compute, self._runner, self._gate, group, donor, self._progress, handover,
            leases, transport, gossip, view, self._directory.refresh_surely, metrics, changed, self._rng,
        )  # fmt: skip
        microbatches = MicrobatchHandler(manifest, hidden_size, self._gate, self._runner, self._progress, metrics)
        self._source = None
        if leases is not None:
            cache = self._options.cache_dir
            load_tokenizer(manifest.data, self._trainer.module.config.vocab_size, cache)  # complain early
            self._source = MicrobatchSource(
                manifest,
                self._me,
                leases,
                validation_samples(manifest, manifest.training.validation_samples, cache),
                self._runner, self._gate, self._progress, gossip, view, metrics, changed,
                origin=lambda: self._steps.origin,
                hop_timeout_s=manifest.limits.hop_timeout_s * max(manifest.stages.count - 1, 1),
                counted=self._counted,
            )  # fmt: skip
        calls = microbatches.calls | group.calls | donor.calls | gossip.calls | handover.calls | self._steps.calls
        if leases is not None:
            calls |= leases.calls
        return CallDispatcher(manifest.hash, spec.index, calls)

    async def _work(self) -> None:
        """Join, then serve."""
        await self._directory.announce()
        start = await self._begin()
        # Stored first, looked up second: of two peers that begin at the same time, at least one sees the other.
        self._enter_state(PeerState.SERVING)
        await self._directory.announce()
        view = await self._directory.refresh_surely(self._stages_of_interest())
        mates = [peer.peer_id for peer in view.serving(self._spec.index) if peer.peer_id != self._me]
        try:
            await self._steps.catch_up(mates)
        except CallError as error:
            self._join_anew(error)
            return
        log.info("serving stage=%d step=%d updates=%d", self._spec.index, self._steps.step, self._steps.updates)
        async with anyio.create_task_group() as tasks:
            if start is not None and start.rewound:
                tasks.start_soon(self._recovery.have_all_go_back, start.origin)
            tasks.start_soon(self._directory.run_announcing)
            tasks.start_soon(self._directory.run_polling, self._stages_of_interest())
            tasks.start_soon(self._recovery.run_snapshots)
            tasks.start_soon(self._move_when_needed)
            if self._options.stage == "auto":
                tasks.start_soon(self._obey)
            if self._source is not None:
                tasks.start_soon(self._source.run)
                tasks.start_soon(self._publish_progress)
            try:
                await self._steps.run()
            except CallError as error:
                self._join_anew(error)

    async def _begin(self) -> Start | None:
        """Take the state over from stage-mates; without any, find out where to begin, and wait for what that takes."""
        while True:
            view = await self._directory.refresh_surely(range(self._manifest.stages.count))
            donors = [peer.peer_id for peer in view.serving(self._spec.index) if peer.peer_id != self._me]
            try:
                if donors:
                    await self._steps.join(donors)
                    return None
                start = await self._recovery.find_start()
                await self._steps.begin(start.origin, start.state)
                log.info(
                    "beginning stage=%d step=%d updates=%d rewound=%s reason=%s",
                    self._spec.index, start.origin.step, start.origin.updates, start.rewound, start.reason,
                )  # fmt: skip
                return start
            except CallError as error:
                note = f"waits to join stage {self._spec.index}: {error}"
                if note != self._note:
                    level = logging.WARNING if donors else logging.ERROR
                    log.log(level, "waiting stage=%d reason=%s", self._spec.index, error)
                self._note = note
            await self._directory.announce()
            await anyio.sleep(JOIN_PAUSE_S)

    async def _move_when_needed(self) -> None:
        while not await self._leave_for(await self._recovery.watch_stages()):
            pass

    def _join_anew(self, error: CallError) -> None:
        """As after a crash: its stage-mates went on without it, and are gone."""
        log.error("joining_anew stage=%d reason=%s", self._spec.index, error)
        self._move_to(self._spec.index)

    async def _leave_for(self, stage: int) -> bool:
        """Move elsewhere if somebody else serves this one: of peers that leave it at once, one at least stays."""
        self._enter_state(PeerState.DRAINING)
        # Stored first, looked up second: of two that leave, at least one sees that the other does.
        await self._directory.announce()
        view = await self._directory.refresh_surely([self._spec.index])
        others = [peer for peer in view.serving(self._spec.index) if peer.peer_id != self._me]
        if others:
            self._move_to(stage)
        elif not self._stop.is_set():  # told to end meanwhile, it must not announce that it serves
            log.warning("stays stage=%d reason=nobody else serves it any more", self._spec.index)
            self._enter_state(PeerState.SERVING)
            await self._directory.announce()
        return bool(others)

    def _move_to(self, stage: int) -> None:
        """Leave, and have this process start anew in another stage."""
        if self._stop.is_set():
            return  # it leaves already, and not to come back
        log.warning("moving from=%d to=%d", self._spec.index, stage)
        self.restart = Restart(stage, self._spec.index, self._me, self._run_id)
        self._stop.set()

    async def _obey(self) -> None:
        """Move when the run's coordinator says so."""
        while True:
            order = await wait_for_order(
                self._me,
                self._spec.index,
                lambda: self._dht.fetch_coordination(self._run_id),
                lambda: self._directory.view,
                lambda: self._directory.serial,
            )
            log.warning("assigned stage=%d reason=%s", order.to_stage, order.reason)
            if await self._leave_for(order.to_stage):
                return

    async def _first_origin(self) -> Origin:
        records = await self._dht.fetch(origin_key(self._run_id), OriginRecord, self._run_id)
        if self._run_id not in records:
            raise CallError("the run's coordinator has not said where it begins")
        return records[self._run_id].origin()

    def _stages_of_interest(self) -> list[int]:
        """Stage-mates, the next stage, and stage 0 whose members are the authors of progress; for stage 0, all."""
        index, count = self._spec.index, self._manifest.stages.count
        return list(range(count)) if index == 0 else sorted({0, index, min(index + 1, count - 1)})

    async def _publish_progress(self) -> None:
        """Each second, if there is anything new, and else often enough for it to last."""
        assert self._source is not None
        lifetime_s = self._manifest.limits.announcement_s
        stored: ProgressRecord | None = None
        stored_s = 0.0
        while True:
            record = ProgressRecord(
                current=self._source.current.model_copy(update={"ranges": ()}),  # they go with calls, and are long
                finished=tuple(self._steps.reports),
                validations=tuple(self._source.validations),
            )
            now_s = time.monotonic()
            if record != stored or now_s - stored_s > lifetime_s / ANNOUNCEMENTS_PER_LIFETIME:
                key, run = progress_key(self._manifest.hash), self._manifest.hash
                stored = record if await self._dht.store(key, record, run, lifetime_s) else None
                stored_s = now_s
            await anyio.sleep(PUBLISH_PROGRESS_S)

    async def _look_for_end(self) -> None:
        """Stop when the run's key says that the run is over."""
        log.info("run_ended reason=%s", await wait_for_end(self._dht, self._run_id, lambda: self._steps.finished))
        self._told_to_end.set()
        self._stop.set()

    async def _leave(self) -> None:
        """Finish what is in flight, hand over what it has accumulated, and tell the others."""
        with anyio.move_on_after(self._options.grace_s / 2):
            await self._changed.wait_for(lambda: not self._is_awaited())
        self._enter_state(PeerState.DRAINING)
        if self._source is not None:
            self._source.stop()
        if self._next_stage is not None:
            self._next_stage.leaving = True
        self._gate.leave()
        with anyio.move_on_after(self._options.grace_s) as grace:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._directory.announce)
                await self._gate.drained()
                # A reply that is cut off makes its caller try elsewhere what is in the gradient here already.
                with anyio.move_on_after(LAST_REPLIES_S):
                    await self._transport.answered()
                await self._steps.leave()
            callers = {0, max(self._spec.index - 1, 0), self._spec.index}
            peers = [peer.peer_id for peer in self._directory.view.peers if peer.stage in callers]
            await self._gossip.say_goodbye(peers, self._directory.serial)
        if grace.cancelled_caught and (samples := self._trainer.num_samples):
            self._metrics.lost_samples.inc(samples)
            log.error("samples_lost samples=%d reason=not handed over within %.0f s", samples, self._options.grace_s)
        log.info("left stage=%d step=%d", self._spec.index, self._steps.step)

    def _is_awaited(self) -> bool:
        """Whether nobody else serves this stage yet, and somebody is about to, who needs its state."""
        stage, view = self._spec.index, self._directory.view
        others = [peer for peer in view.in_stage(stage) if peer.peer_id != self._me]
        alone = all(peer.state is not PeerState.SERVING for peer in others)
        joining = any(peer.state is PeerState.JOINING for peer in others)
        return self._state is PeerState.SERVING and alone and joining

    async def _leave_on_notice(self) -> None:
        """Stop when the cloud says that it takes this instance away."""
        if self._options.preemption_notice != "none":
            notice = await wait_for_notice(self._options.preemption_notice, failed=self._metrics.notice_failures.inc)
            log.warning("leaving reason=spot notice: %s", notice)
            self._stop.set()

    async def _watch_event_loop(self) -> None:
        """Measure how late timers fire: whatever blocks the event loop holds up all traffic."""
        while True:
            begin = time.monotonic()
            await anyio.sleep(0.5)
            self._metrics.event_loop_lag_seconds.set(time.monotonic() - begin - 0.5)

    def _max_payload_bytes(self) -> int:
        training, hidden_size = self._manifest.training, self._trainer.module.config.hidden_size
        shape = (training.microbatch_size, self._manifest.data.sequence_length, hidden_size)
        return max(encoded_bytes(shape, "none"), STATE_CHUNK_BYTES) + FRAME_SLACK_BYTES
