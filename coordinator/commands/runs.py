"""Commands that run a training run: `serve`, `local` and `baseline`."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from coordinator.commands.options import Flat, LogLevel, LogTo, Overrides, load_and_resolve
from coordinator.run.options import CheckpointOptions, LocalCheckpointOptions, NodeOptions
from coordinator.watch.loggers import check_installed, open_loggers
from swarm_peer.cli import configure_logging
from swarm_peer.errors import UserError

if TYPE_CHECKING:
    from coordinator.run.service import RunService


def serve(
    config: Path,
    *,
    output: Path | None = None,
    node: Annotated[NodeOptions, Flat] = NodeOptions(),  # noqa: B008 (frozen)
    cache_dir: Path | None = None,
    checkpoints: Annotated[CheckpointOptions, Flat] = CheckpointOptions(),  # noqa: B008 (frozen)
    standby: bool = False,
    rebalance: bool = True,
    min_replicas: int = 1,
    log_to: LogTo = (),
    set_: Overrides = (),
    log_level: LogLevel = "info",
) -> None:
    """Begin a run, or carry on with it: publish its manifest, watch it, save its model at the end.

    Args:
        config: The run's YAML file.
        output: Folder of metrics.jsonl, the run's key and the model; runs/NAME if not given.
        cache_dir: Where tokenizers are cached.
        standby: Watch the coordinator of a run that is under way, and take over when it falls silent.
        rebalance: Move peers that joined with --stage auto to where the run needs them.
        min_replicas: Peers that each stage keeps while one of its own moves elsewhere.
    """
    configure_logging(log_level)
    check_installed(log_to)
    resolved = load_and_resolve(config, set_, cache_dir)

    from coordinator.checkpoints.writer import plan_checkpoints
    from coordinator.run.serve import run_serve
    from coordinator.run.service import RunOptions

    output = output or Path("runs") / resolved.manifest.name
    options = RunOptions(
        output=output,
        resume=True,
        plan=plan_checkpoints(resolved.manifest, output, checkpoints),
        cache_dir=cache_dir,
        min_replicas=min_replicas if rebalance else None,
        standby=standby,
    )
    run_serve(resolved, node, options, log_to)


def local(
    config: Path,
    *,
    peers: str,
    output: Path,
    steps: int | None = None,
    device: str = "cpu",
    cache_dir: Path | None = None,
    sample: int = 0,
    checkpoints: Annotated[LocalCheckpointOptions, Flat] = LocalCheckpointOptions(),  # noqa: B008 (frozen)
    log_to: LogTo = (),
    set_: Overrides = (),
    log_level: LogLevel = "warning",
) -> None:
    """Run coordinator and peers on this machine, until the run has its steps and its model is saved.

    Args:
        config: The run's YAML file.
        peers: Peers of each stage, such as 2,2.
        output: Folder of metrics.jsonl, the peers' logs and the model.
        steps: Optimizer steps, if other than in the file.
        device: Device of the peers.
        cache_dir: Where datasets and tokenizers are cached.
        sample: Tokens to generate with the model at the end.
    """
    configure_logging(log_level)
    try:
        peers_by_stage = [int(number) for number in peers.split(",")]
    except ValueError as error:
        raise UserError(f"--peers {peers}: expected a number for each stage, such as 2,2") from error
    check_installed(log_to)
    manifest = load_and_resolve(config, set_, cache_dir, steps).manifest

    from coordinator.checkpoints.writer import plan_checkpoints
    from coordinator.run.local import run_local
    from coordinator.run.service import RunOptions
    from swarm_peer.runtime.data.slices import validation_samples

    validation_samples(manifest, 1, cache_dir)  # complains here rather than in a peer's log
    plan = plan_checkpoints(manifest, output, checkpoints)
    options = RunOptions(output=output, plan=plan, cache_dir=cache_dir)
    _print_result(run_local(manifest, peers_by_stage, device, options, log_to), sample, cache_dir)


def _print_result(service: RunService, num_tokens: int, cache_dir: Path | None) -> None:
    line, validation = service.watch.lines[-1], service.watch.validation_loss
    text = f", validation loss {validation:.4f} nats per token" if validation is not None else ""
    print(f"{line['optimizer_step']} optimizer steps done: loss {line['loss']:.4f}{text}")
    if num_tokens:
        from coordinator.query.sampling import generate

        written = generate(service.resolved, service.model_folder, num_tokens, cache_dir)
        print(f"\nThe model writes:\n{written}\n")
    print(f"Hugging Face checkpoint: {service.model_folder}")


def baseline(
    config: Path,
    *,
    output: Path,
    steps: int | None = None,
    device: str = "auto",
    cache_dir: Path | None = None,
    threads: int | None = None,
    log_to: LogTo = (),
    set_: Overrides = (),
) -> None:
    """Train the same manifest in this one process without any network: the reference for every claim.

    Args:
        config: The run's YAML file.
        output: Folder of metrics.jsonl and the model.
        steps: Optimizer steps, if other than in the file.
        device: cpu, cuda, cuda:N, or auto.
        cache_dir: Where datasets and tokenizers are cached.
        threads: CPU threads; torch's choice if not given.
    """
    configure_logging("warning")
    check_installed(log_to)
    resolved = load_and_resolve(config, set_, cache_dir, steps)

    import torch

    from coordinator.run.baseline import Baseline, train
    from coordinator.run.service import check_output
    from coordinator.watch.metrics_file import MetricsFile
    from swarm_peer.model.export import export_model
    from swarm_peer.runtime.host.preparation import choose_device

    if threads is not None:
        torch.set_num_threads(threads)
    check_output(output)
    trained = Baseline(resolved, choose_device(device), cache_dir=cache_dir)
    with open_loggers(log_to, resolved.manifest, output) as on_line, closing(MetricsFile(output)) as metrics:
        for line in train(trained, cache_dir):
            metrics.write(line)
            on_line(line)
            print(json.dumps(line), flush=True)
    export_model(resolved, trained.state(), output / "model")
