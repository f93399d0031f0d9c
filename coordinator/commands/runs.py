"""Commands that run a training run: `serve`, `local` and `baseline`."""

from __future__ import annotations

import json
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from coordinator.commands.shared_options import (
    DASHBOARD,
    CacheDir,
    Config,
    Count,
    Dashboard,
    Flat,
    LogLevel,
    LogTo,
    NotNegative,
    Overrides,
    Positive,
    load_and_resolve,
)
from coordinator.dashboard.place import parse_place
from coordinator.run.coordinator_options import CheckpointOptions, NodeOptions, OnDivergence
from coordinator.watch.loggers import check_installed, open_loggers
from coordinator.watch.promises import Promises
from coordinator.watch.what_is_trained import what_is_learnt, what_is_saved
from swarm_peer.addresses import check_metrics_place, check_own_addresses
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.initial_peers import check_initial_peers
from swarm_peer.logs import configure_logging
from swarm_peer.peer_options import CHECKPOINTS, MACHINE, MAX_COMPUTE_THREADS, RUN
from swarm_peer.policy.plain_text import without_controls

if TYPE_CHECKING:
    from coordinator.checkpoints.writer import CheckpointPlan
    from coordinator.commands.asking import Asking
    from coordinator.run.service import RunService
    from swarm_peer.model.resolved import ResolvedManifest


def serve(
    config: Config,
    /,
    *,
    output: Annotated[Path | None, RUN] = None,
    set_: Overrides = (),
    standby: Annotated[bool, RUN, Parameter(negative="")] = False,
    rebalance: Annotated[bool, RUN] = True,
    min_replicas: Annotated[int, RUN, Positive] = 1,
    on_divergence: Annotated[OnDivergence, CHECKPOINTS] = "end",
    node: Annotated[NodeOptions, Flat] = NodeOptions(),  # noqa: B008 (frozen)
    checkpoints: Annotated[CheckpointOptions, Flat] = CheckpointOptions(),  # noqa: B008 (frozen)
    cache_dir: CacheDir = None,
    log_to: LogTo = (),
    dashboard: Dashboard = DASHBOARD,
    log_level: LogLevel = "info",
) -> None:
    """Begin a run, or carry on with it: publish its manifest, watch it, save its model at the end.

    Args:
        output: Folder of metrics.jsonl, the run's key and the model; runs/NAME if not given.
        standby: Watch the coordinator of a run that is under way, and take over when it falls silent.
        rebalance: Move peers that joined with --stage auto to where the run needs them.
        min_replicas: Peers that each stage keeps while one of its own moves elsewhere.
        on_divergence: When its weights have diverged, the run ends, or goes back to its last good checkpoint once.
    """
    configure_logging(log_level)
    check_installed(log_to)
    check_initial_peers(node.initial_peers)
    check_own_addresses(node.host_maddrs, node.announce_maddrs)
    check_metrics_place(node.metrics_host, node.metrics_port)
    if min_replicas > 1 and not rebalance:
        raise UserError(f"--min-replicas {min_replicas} is for moves, and --no-rebalance allows none: leave one out")
    place = None if dashboard is None else parse_place(dashboard)
    resolved = load_and_resolve(config, set_, cache_dir)

    from coordinator.checkpoints.writer import plan_checkpoints
    from coordinator.run.run_options import RunOptions
    from coordinator.run.serve import run_serve
    from coordinator.run.shared_base import with_base
    from swarm_peer.runtime.data.corpus import tell_left_out

    resolved, base = with_base(resolved, cache_dir)
    with suppress(UserError):  # only peers' machines may have the data, and they complain themselves
        tell_left_out(resolved.manifest.data)
    output = output or Path("runs") / resolved.manifest.name
    options = RunOptions(
        output=output,
        resume=True,
        plan=plan_checkpoints(resolved.manifest, output, checkpoints),
        cache_dir=cache_dir,
        min_replicas=min_replicas if rebalance else None,
        standby=standby,
        dashboard=place,
        on_divergence=on_divergence,
        base=base,
    )
    options.check_divergence()
    with options.promises.told_at_end():
        run_serve(resolved, node, options, log_to)


def local(
    config: Config,
    /,
    *,
    peers: Annotated[str | None, RUN] = None,
    output: Annotated[Path | None, RUN] = None,
    steps: Annotated[Count | None, RUN, Positive] = None,
    set_: Overrides = (),
    sample: Annotated[Count, RUN, NotNegative] = 0,
    ask: Annotated[Path | None, RUN] = None,
    restart: Annotated[bool, RUN] = True,
    on_divergence: Annotated[OnDivergence, CHECKPOINTS] = "end",
    checkpoints: Annotated[CheckpointOptions, Flat] = CheckpointOptions(),  # noqa: B008 (frozen)
    device: Annotated[str, MACHINE] = "cpu",
    cache_dir: CacheDir = None,
    log_to: LogTo = (),
    dashboard: Dashboard = DASHBOARD,
    log_level: LogLevel = "warning",
) -> None:
    """Run coordinator and peers on this machine, until the run has its steps and its model is saved.

    It writes checkpoints only if one of their options is given.

    Args:
        peers: Peers of each stage, such as 2,1 for two stages; two of each if not given.
        output: Folder of metrics.jsonl, the peers' logs and the model; runs/NAME-DATE-TIME if not given.
        steps: Optimizer steps, if other than in the file.
        sample: Tokens to generate with the model at the end.
        ask: Text file of questions, one a line, that the pretrained model is asked before and the trained one after.
        restart: Start another peer in the place of one that dies.
        on_divergence: When its weights have diverged, the run ends, or goes back to its last good checkpoint once.
        device: Device of the peers: cpu, cuda for all GPUs in turns, cuda:N, or auto.
    """
    configure_logging(log_level)
    check_installed(log_to)
    peers_by_stage = _parse_peers(peers) if peers is not None else None
    place = None if dashboard is None else parse_place(dashboard)
    resolved = load_and_resolve(config, set_, cache_dir, steps)
    manifest = resolved.manifest
    output = output or Path("runs") / f"{manifest.name}-{time.strftime('%Y%m%d-%H%M%S')}"

    from coordinator.run.local import check_counts, run_local
    from coordinator.run.room import check_local_peers
    from coordinator.run.run_options import RunOptions
    from swarm_peer.runtime.data.slices import validation_samples
    from swarm_peer.runtime.host.preparation import devices_to_share

    # These complain here rather than in a peer's log.
    devices = devices_to_share(device)
    validation_samples(manifest, 1, cache_dir)
    plan = _plan_of(manifest, output, checkpoints)
    options = RunOptions(output=output, plan=plan, cache_dir=cache_dir, dashboard=place, on_divergence=on_divergence)
    options.check_divergence()
    counts = check_counts(manifest, peers_by_stage or [2] * manifest.stages.count)
    check_local_peers(resolved, counts, devices)
    asking = _asked_before(resolved, ask, sample, cache_dir)
    with options.promises.told_at_end():
        service = run_local(manifest, counts, devices, options, log_to, restart=restart)
        _print_result(service, sample, asking, cache_dir)
        _write_report(output, options.promises)


def _asked_before(
    resolved: ResolvedManifest, questions: Path | None, num_tokens: int, cache_dir: Path | None
) -> Asking | None:
    from coordinator.commands.asking import Asking

    if num_tokens and not resolved.manifest.model.is_plain:
        raise UserError(f"--sample {num_tokens}: a Hugging Face model writes it, and model.boundary.maxout makes none")
    return None if questions is None else Asking(resolved, questions, cache_dir)


def _plan_of(manifest: RunManifest, output: Path, checkpoints: CheckpointOptions) -> CheckpointPlan:
    from coordinator.checkpoints.writer import NO_CHECKPOINTS, plan_checkpoints

    is_asked = checkpoints != CheckpointOptions()
    return plan_checkpoints(manifest, output, checkpoints) if is_asked else NO_CHECKPOINTS


def _parse_peers(peers: str) -> list[int]:
    try:
        return [int(number) for number in peers.split(",")]
    except ValueError as error:
        raise UserError(f"--peers {peers}: expected a number for each stage, such as 2,2") from error


def _print_result(service: RunService, num_tokens: int, asking: Asking | None, cache_dir: Path | None) -> None:
    line, validation = service.watch.lines[-1], service.watch.validation_loss
    text = f", validation loss {validation:.4f} nats per token" if validation is not None else ""
    print(f"{line['optimizer_step']} optimizer steps done: loss {line['loss']:.4f}{text}")
    if num_tokens:
        from coordinator.query.sampling import generate

        written = generate(service.resolved, service.model_folder, num_tokens, cache_dir)
        print(f"\nThe model writes:\n{without_controls(written)}\n")
        if learnt := what_is_learnt(service.manifest, line["optimizer_step"]):
            print(f"{learnt}\n")
    if asking is not None:
        asking.compare(service.model_folder)
    print(f"{what_is_saved(service.manifest.model)}: {service.model_folder}")


def _write_report(output: Path, promises: Promises) -> None:
    """Write a page about the run, and say where it is, or what it needs: the run has its model either way."""
    from coordinator.report.figures import NotInstalled
    from coordinator.report.page import write_report

    try:
        print(f"Report: {write_report(output)}")
    except UserError as error:
        print(f"No report: {error}; then swarm-coordinator report {output}")
        if not isinstance(error, NotInstalled):
            promises.broken("the report was not written", error)


def baseline(
    config: Config,
    /,
    *,
    output: Annotated[Path, RUN],
    steps: Annotated[Count | None, RUN, Positive] = None,
    set_: Overrides = (),
    device: Annotated[str, MACHINE] = "auto",
    threads: Annotated[int | None, MACHINE, Parameter(validator=Number(gt=0, lte=MAX_COMPUTE_THREADS))] = None,
    cache_dir: CacheDir = None,
    log_to: LogTo = (),
) -> None:
    """Train the same manifest in this one process without any network: the reference for every claim.

    Args:
        output: Folder of metrics.jsonl and the model.
        steps: Optimizer steps, if other than in the file.
        device: cpu, cuda, cuda:N, or auto.
        threads: CPU threads; torch's choice if not given.
    """
    configure_logging("warning")
    check_installed(log_to)
    resolved = load_and_resolve(config, set_, cache_dir, steps)

    from coordinator.checkpoints.model_card import Training, model_card
    from coordinator.checkpoints.model_folder import NO_TOKENIZER, save_tokenizer
    from coordinator.run.baseline import Baseline, train
    from coordinator.run.room import check_one_process, running_out_told
    from coordinator.run.run_options import check_not_begun, check_output, lock_folder
    from coordinator.watch.metrics_file import MetricsFile
    from swarm_peer.model.export import export_model
    from swarm_peer.runtime.host.preparation import check_device, choose_device, set_threads

    if threads is not None:
        set_threads(threads)
    check_output(output)
    with closing(lock_folder(output)):
        check_not_begun(output)
        computes_on = choose_device(device)
        check_device(computes_on, resolved.manifest.model.precision)
        check_one_process(resolved, computes_on)
        with running_out_told(computes_on), (promises := Promises()).told_at_end():
            trained = Baseline(resolved, computes_on, cache_dir=cache_dir)
            metrics = MetricsFile(output)
            try:
                with open_loggers(log_to, resolved.manifest, output, promises=promises) as on_line:
                    for line in train(trained, cache_dir):
                        metrics.write(line)
                        on_line(line)
                        print(json.dumps(line), flush=True)
            finally:
                if why_not := metrics.close():
                    promises.broken("metrics.jsonl lacks lines", why_not)
            steps = resolved.manifest.training.steps
            readme = model_card(resolved, Training(optimizer_step=steps, lines=metrics.lines_since(0)))
            export_model(resolved, trained.state(), output / "model", readme=readme)
            if why_not := save_tokenizer(resolved, output / "model", cache_dir):
                promises.broken(NO_TOKENIZER, why_not)
