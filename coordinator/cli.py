"""swarm-coordinator: parse, load, run. Heavy imports come last, so that --help is quick."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from coordinator.loggers import LoggerName, check_installed, open_loggers
from swarm_peer import __version__
from swarm_peer.cli import configure_logging, run_app
from swarm_peer.config import RunManifest, load_manifest
from swarm_peer.errors import UserError

app = App(name="swarm-coordinator", version=__version__, help_format="plaintext")

LogLevel = Literal["debug", "info", "warning", "error"]
Overrides = Annotated[
    tuple[str, ...], Parameter(name="--set", negative="", help="Override the file, such as --set training.steps=500.")
]
Addresses = Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")]
CheckpointEvery = Annotated[
    int | None,
    Parameter(
        help="Global steps between checkpoints, a multiple of recovery.snapshot_every (the default); 0 for none."
    ),
]
LogTo = Annotated[
    tuple[LoggerName, ...],
    Parameter(name="--log-to", negative="", help="Plot the run's metrics there too; may be given for each."),
]


def _load(config: Path, overrides: tuple[str, ...], steps: int | None, cache_dir: Path | None) -> RunManifest:
    if steps is not None:
        overrides = (*overrides, f"training.steps={steps}")
    manifest = load_manifest(config, overrides)

    from coordinator.service import resolve_manifest

    return resolve_manifest(manifest, cache_dir)


@app.command
def serve(
    config: Path,
    *,
    output: Path | None = None,
    host_maddrs: Addresses = ("/ip4/0.0.0.0/tcp/31337",),
    announce_maddrs: Addresses = (),
    initial_peers: Addresses = (),
    identity_path: Path | None = None,
    address_file: Path | None = None,
    metrics_port: int | None = None,
    cache_dir: Path | None = None,
    checkpoints: str | None = None,
    checkpoint_every: CheckpointEvery = None,
    keep_checkpoints: int = 3,
    resume: str | None = None,
    standby: bool = False,
    rebalance: bool = True,
    min_replicas: int = 1,
    log_to: LogTo = (),
    set_: Overrides = (),
    log_level: LogLevel = "info",
) -> None:
    """Begin a run, or carry on with it: publish its manifest, watch it, save its model at the end.

    Parameters
    ----------
    config
        The run's YAML file.
    output
        Folder of metrics.jsonl, the run's key and the model; runs/NAME if not given.
    host_maddrs
        Multiaddresses to listen on.
    announce_maddrs
        Multiaddresses that peers shall dial, where they differ.
    initial_peers
        Peers of this run, to carry on with it from another machine.
    identity_path
        The run's key, made if missing; OUTPUT/identity if not given. Who holds it directs the run.
    address_file
        File to write this coordinator's addresses to.
    metrics_port
        Port for Prometheus; 0 takes a free one; none if not given.
    cache_dir
        Where tokenizers are cached.
    checkpoints
        Folder or URL (such as s3://bucket/run) of checkpoints; OUTPUT/checkpoints if not given.
    keep_checkpoints
        How many of them are kept.
    resume
        Checkpoint folder or URL to go on from: its newest good one, or one of them.
    standby
        Watch the coordinator of a run that is under way, and take over when it falls silent.
    rebalance
        Move peers that joined with --stage auto to where the run needs them.
    min_replicas
        Peers that each stage keeps while one of its own moves elsewhere.
    """
    configure_logging(log_level)
    check_installed(log_to)
    manifest = _load(config, set_, None, cache_dir)

    from coordinator.checkpointing import plan_checkpoints
    from coordinator.rebalancer import RebalancingOptions
    from coordinator.serve import run_serve

    output = output or Path("runs") / manifest.name
    plan = plan_checkpoints(
        manifest, checkpoints or str(output / "checkpoints"), checkpoint_every, keep_checkpoints, resume
    )
    run_serve(
        manifest,
        output=output,
        host_maddrs=host_maddrs,
        announce_maddrs=announce_maddrs,
        initial_peers=initial_peers,
        identity_path=identity_path or output / "identity",
        address_file=address_file,
        metrics_port=metrics_port,
        log_to=log_to,
        plan=plan,
        cache_dir=cache_dir,
        rebalancing=RebalancingOptions(min_replicas) if rebalance else None,
        standby=standby,
    )


@app.command
def local(
    config: Path,
    *,
    peers: str,
    output: Path,
    steps: int | None = None,
    device: str = "cpu",
    cache_dir: Path | None = None,
    sample: int = 0,
    checkpoints: str | None = None,
    checkpoint_every: CheckpointEvery = 0,
    keep_checkpoints: int = 3,
    resume: str | None = None,
    log_to: LogTo = (),
    set_: Overrides = (),
    log_level: LogLevel = "warning",
) -> None:
    """Run coordinator and peers on this machine, until the run has its steps and its model is saved.

    Parameters
    ----------
    config
        The run's YAML file.
    peers
        Peers of each stage, such as 2,2.
    output
        Folder of metrics.jsonl, the peers' logs and the model.
    steps
        Global steps, if other than in the file.
    device
        Device of the peers.
    cache_dir
        Where datasets and tokenizers are cached.
    sample
        Tokens to generate with the model at the end.
    checkpoints
        Folder or URL (such as s3://bucket/run) of checkpoints; OUTPUT/checkpoints if not given.
    keep_checkpoints
        How many of them are kept.
    resume
        Checkpoint folder or URL to go on from: its newest good one, or one of them.
    """
    configure_logging(log_level)
    try:
        peers_by_stage = [int(number) for number in peers.split(",")]
    except ValueError as error:
        raise UserError(f"--peers {peers}: expected a number for each stage, such as 2,2") from error
    check_installed(log_to)
    manifest = _load(config, set_, steps, cache_dir)

    from coordinator.checkpointing import plan_checkpoints
    from coordinator.local import run_local
    from swarm_peer.runtime.data import validation_samples

    validation_samples(manifest, 1, cache_dir)  # complains here rather than in a peer's log
    plan = plan_checkpoints(
        manifest, checkpoints or str(output / "checkpoints"), checkpoint_every, keep_checkpoints, resume
    )
    service = run_local(manifest, peers_by_stage, output, device, cache_dir, log_to, plan)
    _print_result(service.manifest, service.watch.summary(), service.model_folder, sample, cache_dir)


def _print_result(
    manifest: RunManifest, summary: dict[str, Any], model_folder: Path, sample: int, cache_dir: Path | None
) -> None:
    validation = summary["validation_loss"]
    text = f", validation loss {validation:.4f} nats per token" if validation is not None else ""
    print(f"{summary['step']} global steps done: loss {summary['loss']:.4f}{text}")
    if sample:
        from coordinator.sampling import generate

        print(f"\nThe model writes:\n{generate(manifest, model_folder, sample, cache_dir)}\n")
    print(f"Hugging Face checkpoint: {model_folder}")


@app.command
def status(
    *, initial_peers: Addresses, run_id: str | None = None, json_: Annotated[bool, Parameter(name="--json")] = False
) -> None:
    """Show stages, peers, step, loss and throughput of a live run.

    Parameters
    ----------
    initial_peers
        Addresses of any peers of the run.
    run_id
        Which run, where the addresses lead to several.
    json_
        Print JSON.
    """
    configure_logging("warning")
    from coordinator.onlooker import look_at_run

    summary = look_at_run(initial_peers, run_id)
    if json_:
        print(json.dumps(summary))
        return
    from rich.console import Console

    from coordinator.live import summary_table

    Console().print(summary_table(f"run {summary['name']}", summary))


@app.command
def end(*, initial_peers: Addresses, identity_path: Path) -> None:
    """End a live run before its steps. Its peers and coordinators leave; export its model first if you want to keep it.

    Parameters
    ----------
    initial_peers
        Addresses of any peers of the run.
    identity_path
        The run's key: OUTPUT/identity where its coordinator ran.
    """
    configure_logging("warning")
    if not identity_path.is_file():
        raise UserError(f"{identity_path} is not there: only the run's key ends it, OUTPUT/identity of serve")

    from coordinator.onlooker import end_run

    end_run(initial_peers, identity_path, lambda left: print(f"{left} peers left", flush=True))
    print("The run has ended.")


@app.command
def plan(
    config: Path | None = None,
    *,
    peers: Path | None = None,
    initial_peers: Addresses = (),
    run_id: str | None = None,
    stages: int | None = None,
    tokens: int | None = None,
    dollars_per_hour: float | None = None,
    dollars_per_gb: float | None = None,
    upload_mbps: float | None = None,
    download_mbps: float | None = None,
    latency_ms: float = 0.0,
    memory_gb: float | None = None,
    set_: Overrides = (),
    json_: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Predict what a run would do with certain peers: how many stages, who serves which, tokens/s, days, price.

    Parameters
    ----------
    config
        The run's YAML file; with --initial-peers, the live run's manifest if not given.
    peers
        YAML file that describes peers, such as configs/peers/volunteers.yaml.
    initial_peers
        Addresses of any peers of a live run, whose peers are then planned with, at the speed that they measured.
    run_id
        Which live run, where the addresses lead to several.
    stages
        Number of stages to plan for; if not given the fastest, or that of the live run.
    tokens
        To train on; those of the configuration if not given.
    dollars_per_hour
        Price of each peer, whatever the file says.
    dollars_per_gb
        Price of each gigabyte that a peer sends, whatever the file says.
    upload_mbps
        What each peer of the live run sends, megabits per second.
    download_mbps
        What each peer of the live run receives.
    latency_ms
        Round trip between peers of the live run.
    memory_gb
        Memory of each peer of the live run that training may use.
    json_
        Print JSON.
    """
    configure_logging("warning")
    if config is None and not initial_peers:
        raise UserError("plan needs a run's YAML file, or --initial-peers ADDRESS of a live run")
    if config is None and set_:
        raise UserError(f"--set {set_[0]}: it overrides a run's YAML file; name that, too")
    if peers is None and not initial_peers:
        raise UserError("plan needs peers: describe them with --peers FILE, or name a live run with --initial-peers")
    numbers = {
        "--stages": stages, "--tokens": tokens, "--upload-mbps": upload_mbps, "--download-mbps": download_mbps,
        "--memory-gb": memory_gb,
    }  # fmt: skip
    for option, number in numbers.items():
        if number is not None and not number > 0:
            raise UserError(f"{option} {number}: expected more than 0")
    prices = {"--dollars-per-hour": dollars_per_hour, "--dollars-per-gb": dollars_per_gb, "--latency-ms": latency_ms}
    for option, price in prices.items():
        if price is not None and not price >= 0:
            raise UserError(f"{option} {price}: expected 0 or more")
    manifest = load_manifest(config, set_) if config is not None else None

    from coordinator.peers_file import load_peers
    from coordinator.plan import LivePeers, live_groups, make_report, read_live_run, resolve_config, with_prices

    groups = []
    if initial_peers:
        live_manifest, view = read_live_run(initial_peers, run_id)
        if manifest is None:
            manifest, stages = live_manifest, stages or live_manifest.stages.count
        assumed = LivePeers(
            memory_bytes=memory_gb * 1e9 if memory_gb else float("inf"),
            upload_bytes_per_s=upload_mbps * 1e6 / 8 if upload_mbps else float("inf"),
            download_bytes_per_s=download_mbps * 1e6 / 8 if download_mbps else float("inf"),
            latency_s=latency_ms / 1e3,
        )
        groups += live_groups(live_manifest, view, assumed)
    assert manifest is not None
    if peers is not None:
        groups += load_peers(peers, manifest.model.precision)
    groups = with_prices(groups, dollars_per_hour, dollars_per_gb)
    report = make_report(resolve_config(manifest), groups, stages, tokens)
    if json_:
        print(json.dumps(report))
        return
    from rich.console import Console

    from coordinator.plan_report import print_report

    print_report(report, Console())


@app.command
def evaluate(
    *,
    initial_peers: Addresses,
    run_id: str | None = None,
    samples: int | None = None,
    files: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative="")] = (),
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    json_: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Evaluate a live run's model through its pipeline, which trains on: loss and perplexity of held-out text.

    Parameters
    ----------
    initial_peers
        Addresses of any peers of the run.
    run_id
        Which run, where the addresses lead to several.
    samples
        How many, of the run's sequence length; as many as the run's own validation takes if not given.
    files
        Text files to evaluate on, instead of what the run has held out.
    data_dir
        Folder that a run over local files may have its held-out text read from, on this machine.
    cache_dir
        Where datasets and tokenizers are cached.
    json_
        Print JSON.
    """
    configure_logging("warning")
    if samples is not None and samples < 1:
        raise UserError(f"--samples {samples}: at least 1 is needed")

    from coordinator.queries import evaluate_run

    result = evaluate_run(initial_peers, run_id, samples, files, data_dir, cache_dir)
    if json_:
        print(json.dumps(result))
        return
    oldest = f"{result['oldest_updates']} to " if result["oldest_updates"] < result["updates"] else ""
    print(
        f"loss {result['loss']:.4f} nats per token, perplexity {result['perplexity']:.2f}: {result['samples']} samples "
        f"of {result['tokens']} tokens, weights after {oldest}{result['updates']} global steps, "
        f"{result['seconds']:.1f} s"
    )


@app.command
def sample(
    *,
    initial_peers: Addresses,
    prompt: str,
    run_id: str | None = None,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int | None = None,
    cache_dir: Path | None = None,
) -> None:
    """Have a live run's model continue a prompt, through its pipeline, which trains on.

    Nothing is kept between two tokens (there is no key-value cache): for each, the text so far, cropped to the run's
    sequence length, goes through the pipeline again.

    Parameters
    ----------
    initial_peers
        Addresses of any peers of the run.
    prompt
        Text to continue.
    run_id
        Which run, where the addresses lead to several.
    tokens
        How many to generate.
    temperature
        0 takes the likeliest token each time; higher values more of the others.
    top_k
        Draw among this many likeliest tokens; 0 for all.
    seed
        For the same text again, of the same weights; another one each time if not given.
    cache_dir
        Where tokenizers are cached.
    """
    configure_logging("warning")
    if tokens < 1 or not 0 <= temperature < float("inf") or top_k < 0:
        raise UserError(
            f"--tokens {tokens} --temperature {temperature} --top-k {top_k}: at least 1 token, nothing negative"
        )

    from coordinator.queries import sample_run

    def write(text: str) -> None:
        print(text, end="", flush=True)

    sample_run(initial_peers, run_id, prompt, tokens, temperature, top_k, seed, cache_dir, write)
    print()


@app.command
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

    Parameters
    ----------
    config
        The run's YAML file.
    output
        Folder of metrics.jsonl and the model.
    steps
        Global steps, if other than in the file.
    device
        cpu, cuda, cuda:N, or auto.
    cache_dir
        Where datasets and tokenizers are cached.
    threads
        CPU threads; torch's choice if not given.
    """
    configure_logging("warning")
    check_installed(log_to)
    manifest = _load(config, set_, steps, cache_dir)

    import torch

    from coordinator.baseline import Baseline, train
    from coordinator.run_watch import MetricsFile, step_line
    from coordinator.service import check_output
    from swarm_peer.model.export import export_model
    from swarm_peer.model.partition import stages_of
    from swarm_peer.runtime.preparation import choose_device

    if threads is not None:
        torch.set_num_threads(threads)
    check_output(output)
    trained = Baseline(manifest, choose_device(device), cache_dir)
    with open_loggers(log_to, manifest, output) as on_line, closing(MetricsFile(output)) as metrics:
        for step in train(trained, manifest.training.steps, cache_dir):
            length = manifest.data.sequence_length
            line = step_line(
                step.step, step.step, step.loss, step.samples, step.seconds, length, [1] * manifest.stages.count,
                step.validation_loss, step.validation_samples,
            )  # fmt: skip
            metrics.write(line)
            on_line(line)
            print(json.dumps(line), flush=True)
    assert isinstance(manifest.model.config, dict)
    specs, shared = stages_of(manifest), manifest.model.share_layers
    export_model(manifest.model.config, trained.state(), output / "model", specs=specs, share_layers=shared)


@app.command
def export(
    *,
    output: Path,
    checkpoint: str | None = None,
    initial_peers: Addresses = (),
    step: int | None = None,
    run_id: str | None = None,
    cache_dir: Path | None = None,
) -> None:
    """Write the model of a checkpoint, or of a live run as it is now, as a folder that Hugging Face transformers loads.

    Parameters
    ----------
    output
        Folder of the model, and of its tokenizer.
    checkpoint
        Folder or URL (such as s3://bucket/run) of a run's checkpoints, or of one of them.
    initial_peers
        Instead of a checkpoint, addresses of any peers of a live run.
    step
        Which checkpoint, by its global step; the newest good one if not given.
    run_id
        Which live run, where the addresses lead to several.
    cache_dir
        Where tokenizers are cached.
    """
    configure_logging("warning")
    if (checkpoint is None) == (not initial_peers):
        raise UserError("export needs --checkpoint DIR_OR_URL or --initial-peers ADDRESS, and one of them only")
    if step is not None and checkpoint is None:
        raise UserError(f"--step {step}: a live run has its newest weights only; leave it out, or give --checkpoint")

    from coordinator.export import export_checkpoint, export_run

    if checkpoint is not None:
        updates = export_checkpoint(checkpoint, step, output, cache_dir)
    else:
        updates = export_run(initial_peers, run_id, output, cache_dir)
    print(f"Hugging Face checkpoint after {updates} global steps: {output}")


@app.command
def simulate(
    *,
    stages: int,
    trace: Path | None = None,
    peers: int | None = None,
    hours: float = 24.0,
    mean_lifetime_s: float = 14400.0,
    rebalance: str = "events",
    seed: int = 0,
    level: Literal["flow", "microbatch"] = "flow",
    routing: Literal["iwrr", "uniform", "jsed", "po2"] = "iwrr",
    window: int | None = None,
    global_batch: int | None = None,
    averaging_s: float = 0.0,
    network: Path | None = None,
    speed: str = "lognormal:1,0.35",
    bandwidth_mbps: str = "constant:200",
    memory_gb: str = "constant:0",
    latency_s: str = "constant:0.05",
    state_gb: float = 1.0,
    overhead_s: float = 5.0,
    stage_costs: Annotated[tuple[float, ...], Parameter(consume_multiple=True, negative="")] = (),
    stage_memory_gb: Annotated[tuple[float, ...], Parameter(consume_multiple=True, negative="")] = (),
    min_replicas: int = 1,
    figure: Path | None = None,
    json_: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Simulate a swarm whose peers come and go, with the policies that run live.

    Distributions are written constant:X, uniform:LOW,HIGH, lognormal:MEDIAN,SIGMA or choice:X,Y,...

    Parameters
    ----------
    stages
        Pipeline stages.
    trace
        File of comings and goings: time_ms,add|remove,machine or date, time, live count. Without it, one is drawn.
    peers
        How many peers a drawn trace has, on the average.
    hours
        How long a drawn trace lasts.
    mean_lifetime_s
        Of the peers of a drawn trace.
    rebalance
        none, events (what runs live), or the seconds between two moves of the paper's protocol, such as 300 or 60.
    seed
        Draws the trace and the machines; the same seed gives the same result.
    level
        flow for up to thousands of peers, microbatch for tens.
    routing
        Of microbatches: iwrr (what runs live), uniform, jsed (shortest expected delay), po2 (two random choices).
    window
        Microbatches in flight per stage-0 peer; if not given, by the live rule.
    global_batch
        Microbatches of a global step, at whose end all is drained; without it, all goes on for ever.
    averaging_s
        From the last gradient of a global step until the next one begins.
    network
        Latencies (and bandwidths) of places: a table of regions, or a matrix of round trips in seconds.
    speed
        Work per second of a machine; a stage of cost 1 takes 1 for a sample.
    bandwidth_mbps
        Of a machine, in Mb/s.
    memory_gb
        Of a machine; 0 for enough.
    latency_s
        Of a machine, half at either end of a link.
    state_gb
        Weights and optimizer state of a stage, which a newcomer or mover downloads.
    overhead_s
        What joining or moving takes besides.
    stage_costs
        One for each stage; all 1 if not given.
    stage_memory_gb
        What a peer needs to serve each stage.
    min_replicas
        Peers that go on serving a stage when one of them moves away.
    figure
        PNG to draw throughput and optimum into.
    json_
        Print JSON.
    """
    from coordinator.simulator.command import Options, run_command

    options = Options(
        level=level, rebalance=rebalance, routing=routing, window=window, global_batch=global_batch,
        averaging_s=averaging_s, network=network, figure=figure, json=json_,
    )  # fmt: skip
    run_command(
        options, trace=trace, num_peers=peers or 0, num_stages=stages, hours=hours, mean_lifetime_s=mean_lifetime_s,
        seed=seed, state_gb=state_gb, overhead_s=overhead_s, stage_costs=stage_costs, stage_memory_gb=stage_memory_gb,
        min_replicas=min_replicas, machines=(speed, bandwidth_mbps, memory_gb, latency_s),
    )  # fmt: skip


run = run_app(app)

if __name__ == "__main__":
    run()
