"""`serve`: a coordinator for peers on other machines."""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path

import anyio
from anyio import to_thread

from coordinator.checkpoints.store import CheckpointStore
from coordinator.checkpoints.writer import CheckpointPlan
from coordinator.config_files import changed_settings
from coordinator.run.address_files import PEERS, KnownPeers
from coordinator.run.agreeing import EpochsFile
from coordinator.run.coordinator_options import NodeOptions
from coordinator.run.divergence import Diverged
from coordinator.run.events import RunEvents
from coordinator.run.invites import coordinator_invite
from coordinator.run.log_file import logged_to
from coordinator.run.run_key import KEY
from coordinator.run.run_options import RunOptions, check_output, has_begun, lock_folder
from coordinator.run.service import LINGER_S, RunService
from coordinator.run.show import shown
from coordinator.run.way_in import WayIn
from coordinator.watch.ending import FINISHED
from coordinator.watch.live_view import LiveView
from coordinator.watch.loggers import LoggerName, open_loggers
from coordinator.watch.observer import observer_directory, open_node
from coordinator.watch.run_file import CHECKPOINTS, run_file_written
from coordinator.watch.run_watch import RunWatch
from coordinator.watch.what_is_trained import training_line, what_is_saved
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.host.metrics import count_logged_errors, serve_metrics
from swarm_peer.runtime.host.ports import PortTaken
from swarm_peer.runtime.host.processes import run_loop, spare_imports
from swarm_peer.runtime.network.assignments import find_end
from swarm_peer.runtime.network.bootstrap import Entrance, parse_manifest, read_entrance
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.guarded_p2p import NobodyAnswers
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.records import MANIFESTS_KEY, ManifestRecord

log = logging.getLogger(__name__)

# Settings that a message names.
MOST_CHANGED = 4
# Of a standby, below its output.
STANDBY_IDENTITY = "standby-identity"
# Between tries to listen on a port that an earlier node of this process gives up.
PORT_PAUSES_S = (0.2, 0.5, 1.0, 2.0)
TELLING = f"Telling all peers and standbys that the run is over, for at least {LINGER_S:.0f} s."
# A coordinator that is stopped waits so long for a store of checkpoints that does not answer.
STORE_PATIENCE_S = 5.0
NOT_TOLD = "the files with the addresses of the run are not those of now"


def run_serve(
    resolved: ResolvedManifest, node: NodeOptions, options: RunOptions, log_to: Sequence[LoggerName] = ()
) -> None:
    """Coordinate a run until its end or a signal. Training goes on without a coordinator.

    Raises:
        UserError: a folder, key, address or run that does not fit the others
    """
    options.check_output(resolved.manifest)
    with closing(lock_folder(options.output)), logged_to(options.output, options.promises):
        key_path = node.identity_path or options.output / KEY
        if options.standby:
            _check_standby(key_path, node.initial_peers, options.plan)
        addresses = read_entrance(node.initial_peers).addresses
        spare_imports()
        run_loop(_join_and_serve, resolved, node, options, addresses, key_path, log_to)


async def _join_and_serve(
    resolved: ResolvedManifest,
    node: NodeOptions,
    options: RunOptions,
    addresses: Sequence[str],
    key_path: Path,
    log_to: Sequence[LoggerName],
) -> None:
    # libp2p would take two nodes of one identity for one.
    own_path = options.output / STANDBY_IDENTITY if options.standby else key_path
    is_resumed = options.plan.resume is not None
    run_key = Identity.load_or_create(key_path)
    can_begin = is_resumed or EpochsFile(options.output, run_key.peer_id).is_of_begun_run
    must_be_known = options.standby or (not can_begin and has_begun(options.output))
    is_private = resolved.manifest.admission == "invite"
    invite = coordinator_invite(run_key) if is_private else None

    def open_own(addresses: Sequence[str]) -> AbstractAsyncContextManager[SwarmDHT]:
        return open_node(
            own_path,
            Entrance(tuple(addresses), invite),
            node.host_maddrs,
            node.announce_maddrs,
            map_port=node.map_port,
            relay_mbps=node.relay_mbps,
        )

    async with open_own(addresses) if addresses else _open_where_it_was(options.output, open_own, can_begin) as dht:
        is_known = await _check_known_run(dht, run_key.peer_id, resolved.manifest, is_resumed, must_be_known)
        if not is_known and not can_begin and options.plan.store is not None:
            await to_thread.run_sync(options.plan.store.check_empty)
        await _serve_on(dht, run_key, resolved, node, options, log_to)


async def _serve_on(
    dht: SwarmDHT,
    run_key: Identity,
    resolved: ResolvedManifest,
    node: NodeOptions,
    options: RunOptions,
    log_to: Sequence[LoggerName],
) -> None:
    """Show and serve the run on a node that has joined its DHT."""
    manifest, promises = resolved.manifest, options.promises
    with (
        run_file_written(options.output, run_key.peer_id, manifest, promises),
        open_loggers(log_to, manifest, options.output, resume=True, promises=promises) as on_line,
        LiveView(manifest.training.steps) as live,
    ):
        way_in = WayIn(
            dht=dht,
            manifest=manifest,
            run_key=run_key,
            output=options.output,
            address_file=node.address_file,
            is_announced=bool(node.announce_maddrs),
            say=live.print,
        )

        def on_ready() -> None:
            live.print(f"Run {manifest.name} ({run_key.peer_id}), manifest {manifest.hash}")
            live.print(f"It trains {training_line(manifest)}.")
            way_in.tell(service.lasting_peers.addresses)

        def on_update(watch: RunWatch) -> None:
            # The view comes first, since a full disk stops the other.
            live.update(watch)
            # This machine may have moved to another network, or heard how others see it; and peers come and go.
            try:
                way_in.tell(service.lasting_peers.addresses)
                promises.kept(NOT_TOLD)
            except OSError as error:
                promises.broken(NOT_TOLD, error)
                raise

        events = RunEvents(on_ready=on_ready, on_update=on_update, on_line=on_line, on_event=live.tell)
        service = RunService(resolved, dht, options, events=events, run_key=run_key)
        if node.metrics_port is not None:
            count_logged_errors(service.metrics.registry)
            port = serve_metrics(
                service.metrics.registry, node.metrics_host, node.metrics_port, lambda: service.metrics.targets
            )
            log.info("metrics_served host=%s port=%d", node.metrics_host, port)
        async with shown(service, options, live.print, join=lambda: way_in.line):
            await _serve(service, options)


@asynccontextmanager
async def _open_where_it_was(
    output: Path, open_own: Callable[[Sequence[str]], AbstractAsyncContextManager[SwarmDHT]], can_begin: bool
) -> AsyncIterator[SwarmDHT]:
    """Join the peers of the run that this folder is of, if there are any, or else begin a new swarm.

    Args:
        can_begin: if no peer is left, it goes on from a checkpoint, or with the epochs that are known here

    Raises:
        UserError: it has peers or has begun, none of its peers answers, and it cannot go on without
    """
    known = KnownPeers(output).read()
    async with AsyncExitStack() as opened:
        dht = None
        if known:
            log.info("carrying_on peers=%d", len(known))
            try:
                dht = await opened.enter_async_context(open_own(known))
            except NobodyAnswers as error:
                log.info("peers_not_found addresses=%d", len(known))
                log.debug("peers_not_found reason=%s", error)
                check_output(output)
        if dht is None and not can_begin and (known or has_begun(output)):
            raise UserError(
                f"the run of {output} {'has begun (metrics.jsonl)' if has_begun(output) else 'has had peers'}, nobody "
                f"answers at the addresses in {output / PEERS}, and without its peers it would begin anew: carry on "
                f"with --initial-peers and the address of any of them (the last peer_started or addresses_changed line "
                f"of its log), {_without_peers(output)}, or name another --output"
            )
        if dht is None:
            # The node that has found nobody may hold the port for a moment longer.
            dht = await _enter_alone(opened, open_own, PORT_PAUSES_S if known else ())
        yield dht


async def _enter_alone(
    opened: AsyncExitStack,
    open_own: Callable[[Sequence[str]], AbstractAsyncContextManager[SwarmDHT]],
    pauses_s: Sequence[float],
) -> SwarmDHT:
    """Begin a new swarm; where the port is taken, try again after each of these pauses."""
    for pause_s in pauses_s:
        try:
            return await opened.enter_async_context(open_own(()))
        except PortTaken:
            await anyio.sleep(pause_s)
    return await opened.enter_async_context(open_own(()))


def _without_peers(output: Path) -> str:
    """Tell how to go on with the run of a folder whose peers are gone."""
    if not has_begun(output):
        return f"begin anew once {output / PEERS} is removed, since it has made no optimizer step"
    elsewhere = "" if (output / CHECKPOINTS).exists() else f", if there is one elsewhere: {output} has none"
    return f"go on from a checkpoint with --resume{elsewhere}"


def _check_standby(identity_path: Path, initial_peers: Sequence[str], plan: CheckpointPlan) -> None:
    if not initial_peers:
        raise UserError("--standby watches a run that is under way: name an address of it with --initial-peers")
    if not identity_path.exists():
        raise UserError(
            f"--standby acts with the run's key, and {identity_path} is not there: copy the identity file of the "
            f"coordinator that began the run, and name it with --identity-path"
        )
    if plan.resume is not None:
        raise UserError("--standby watches a run that is under way, --resume begins one: leave one of them out")


async def _check_known_run(
    dht: SwarmDHT, run_id: str, manifest: RunManifest, resume: bool, must_be_known: bool
) -> bool:
    """Compare this run with the one under way: peers of two manifests would refuse each other's calls.

    Returns:
        whether the DHT knows of one; if not, this run begins anew

    Raises:
        UserError: its manifest would change, it is not there to carry on with, is alive and not to be resumed, or has
            ended
        CallError: the DHT gives no answer, so it is not known which runs are under way
    """
    known = (await dht.fetch(MANIFESTS_KEY, ManifestRecord, None)).get(run_id)
    directory = observer_directory(manifest, dht)
    peers = (await directory.refresh(range(manifest.stages.count))).peers
    # Newcomers wait where all others are gone, and hold no states.
    is_alive = any(peer.has_work for peer in peers)
    # The DHT forgets a manifest a day after the last coordinator; peers that announce themselves prove the run as well.
    if known is None and must_be_known and not peers:
        raise UserError(
            f"no run {run_id} is under way there: check --identity-path and --initial-peers, go on from a checkpoint "
            f"with --resume, or name another --output"
        )
    if known is not None and (other := parse_manifest(known)).hash != manifest.hash:
        changed = [f"{key} is {was} there and {now} here" for key, was, now in changed_settings(other, manifest)]
        more = f", and {len(changed) - MOST_CHANGED} others" if len(changed) > MOST_CHANGED else ""
        raise UserError(
            f"run {run_id} is under way with other settings ({', '.join(changed[:MOST_CHANGED])}{more}): serve the "
            f"configuration that the run began with, or begin another run with another --identity-path"
        )
    if not resume and (end := await find_end(dht, run_id)) is not None:
        way_on = "" if end.reason == FINISHED else "; go on from its checkpoint with --resume"
        raise UserError(f"run {run_id} has ended: {end.reason}{way_on}")
    if resume and is_alive:
        raise UserError(f"run {run_id} is alive: its peers hold newer states than a checkpoint; leave --resume out")
    return known is not None or bool(peers)


def _what_now(service: RunService, options: RunOptions, way_back: str, *, is_saved: bool) -> str:
    """Tell what becomes of a run whose coordinator stops, and which command goes on with it.

    Args:
        way_back: how to go on without any peer, see _way_back
    """
    view, output = service.watch.view, options.output
    if is_saved:
        return "The run is over; peers that have not heard of it wait. The same command tells them."
    if not has_begun(output):
        once = f", once {output / PEERS} is removed" if (output / PEERS).exists() else ""
        way_back = f"the same command begins it{once}."
    if not view.peers:
        return f"The run has no peers; {way_back}"
    without = "" if options.plan.resume is None else " without --resume"
    again = f"the same command{without} coordinates them again. If they are all gone by then, {way_back}"
    empty = view.empty_stages()
    return f"The run's peers {f'wait for a peer of stage {empty[0]}' if empty else 'train on'}; {again}"


async def _way_back(manifest: RunManifest, options: RunOptions) -> str:
    """Tell which command goes on with a run that has lost all its peers, as a part of a sentence, with its stop."""
    resumed, and_with = options.plan.resume, " with"
    if options.standby:
        and_with = ", without --standby and --initial-peers, and with"
    store = options.plan.store or CheckpointStore(str(options.output / CHECKPOINTS))
    place, newest = store.url, None
    is_known = False
    with suppress(UserError), anyio.move_on_after(STORE_PATIENCE_S):
        newest = await to_thread.run_sync(store.newest, manifest, abandon_on_cancel=True)
        is_known = True
    if not is_known:
        return f"the same command{and_with} --resume {place} goes on from its last checkpoint, if there is one."
    if newest is None and resumed is not None:
        place, newest = resumed.address, resumed
    if newest is not None:
        return f"the same command{and_with} --resume {place} goes on from optimizer step {newest.optimizer_step}."
    if options.standby:
        return "another coordinator may have a checkpoint in its own OUTPUT: this one has written none."
    anew = "the same command with another --output begins anew."
    return f"what was trained is lost, since there is no checkpoint yet: {anew}"


async def _serve(service: RunService, options: RunOptions) -> None:
    is_saved = False

    async def stop_on_signal() -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("leaving reason=%s", signal.Signals(number).name)
                options.promises.stops_early()
                way_back = await _way_back(service.manifest, options)
                print(f"This coordinator stops. {_what_now(service, options, way_back, is_saved=is_saved)}", flush=True)
                tasks.cancel_scope.cancel()
                return

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop_on_signal)
        try:
            is_saved = await service.run()
        except Diverged as error:
            if not error.is_told:
                print(f"The run ends: {error.reason}.", flush=True)
                print(TELLING, flush=True)
                await service.end(error.reason)
            raise
        if is_saved:
            print(f"{what_is_saved(service.manifest.model)}: {service.model_folder}", flush=True)
            print(TELLING, flush=True)
            await service.end()
        else:
            print(f"The run has ended: {service.ended}.", flush=True)
            store = None if service.ended == FINISHED else options.plan.store
            if store is not None and (newest := await to_thread.run_sync(store.newest, service.manifest)):
                step, path, made = newest.optimizer_step, newest.address, service.watch.optimizer_step
                and_with = ", without --standby and --initial-peers, and with" if options.standby else " and"
                print(
                    f"Go on from optimizer step {step} of {made} with the same command{and_with} --resume {path}",
                    flush=True,
                )
                if 0 < options.plan.every < made - step:
                    print("A coordinator that has acted meanwhile may have a newer one in its own OUTPUT.", flush=True)
        tasks.cancel_scope.cancel()
