"""Commands that ask a live run, or end it: `status`, `evaluate`, `sample` and `end`."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from coordinator.commands.options import Json, NotNegative, Positive
from swarm_peer.cli import configure_logging
from swarm_peer.config import Addresses
from swarm_peer.errors import UserError


def status(*, initial_peers: Addresses, run_id: str | None = None, json_: Json = False) -> None:
    """Show stages, peers, step, loss and throughput of a live run.

    Args:
        initial_peers: Addresses of any peers of the run.
        run_id: Which run, where the addresses lead to several.
    """
    configure_logging("warning")
    from rich.console import Console

    from coordinator.watch.live import run_table
    from coordinator.watch.observer import look_once, observe_run
    from coordinator.watch.summary import summarise

    watch = observe_run(initial_peers, run_id, look_once)
    if json_:
        print(json.dumps(summarise(watch)))
    else:
        Console().print(run_table(watch))


def end(*, initial_peers: Addresses, identity_path: Path) -> None:
    """End a live run before its steps. Its peers and coordinators leave; export its model first if you want to keep it.

    Args:
        initial_peers: Addresses of any peers of the run.
        identity_path: The run's key: OUTPUT/identity where its coordinator ran.
    """
    configure_logging("warning")
    if not identity_path.is_file():
        raise UserError(f"{identity_path} is not there: only the run's key ends it, OUTPUT/identity of serve")

    from coordinator.watch.observer import end_run

    end_run(initial_peers, identity_path, lambda left: print(f"{left} peers left", flush=True))
    print("The run has ended.")


def evaluate(
    *,
    initial_peers: Addresses,
    run_id: str | None = None,
    samples: Annotated[int | None, Positive] = None,
    files: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative="")] = (),
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    json_: Json = False,
) -> None:
    """Evaluate a live run's model through its pipeline, which trains on: loss and perplexity of held-out text.

    Args:
        initial_peers: Addresses of any peers of the run.
        run_id: Which run, where the addresses lead to several.
        samples: How many, of the run's sequence length; as many as the run's own validation takes if not given.
        files: Text files to evaluate on, instead of what the run has held out.
        data_dir: Folder that a run over local files may have its held-out text read from, on this machine.
        cache_dir: Where datasets and tokenizers are cached.
    """
    configure_logging("warning")

    from coordinator.query.queries import draw_samples, evaluate_run

    draw = partial(draw_samples, num_samples=samples, files=files, data_dir=data_dir, cache_dir=cache_dir)
    result = evaluate_run(initial_peers, run_id, draw)
    if json_:
        print(json.dumps(asdict(result)))
        return
    oldest = f"{result.oldest_optimizer_step} to " if result.oldest_optimizer_step < result.optimizer_step else ""
    print(
        f"loss {result.loss:.4f} nats per token, perplexity {result.perplexity:.2f}: {result.samples} samples of "
        f"{result.tokens} tokens, weights after {oldest}{result.optimizer_step} optimizer steps, {result.seconds:.1f} s"
    )


def sample(
    *,
    initial_peers: Addresses,
    prompt: str,
    run_id: str | None = None,
    tokens: Annotated[int, Positive] = 200,
    temperature: Annotated[float, Parameter(validator=Number(gte=0, lt=inf))] = 0.8,
    top_k: Annotated[int, NotNegative] = 40,
    seed: int | None = None,
    cache_dir: Path | None = None,
) -> None:
    """Have a live run's model continue a prompt, through its pipeline, which trains on.

    Nothing is kept between two tokens (there is no key-value cache): for each, the text so far, cropped to the run's
    sequence length, goes through the pipeline again.

    Args:
        initial_peers: Addresses of any peers of the run.
        prompt: Text to continue.
        run_id: Which run, where the addresses lead to several.
        tokens: How many to generate.
        temperature: 0 takes the likeliest token each time; higher values more of the others.
        top_k: Draw among this many likeliest tokens; 0 for all.
        seed: For the same text again, of the same weights; another one each time if not given.
        cache_dir: Where tokenizers are cached.
    """
    configure_logging("warning")

    from coordinator.query.queries import sample_run
    from coordinator.query.sampling import Sampling

    sampling = Sampling(num_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    sample_run(initial_peers, run_id, prompt, sampling, partial(print, end="", flush=True), cache_dir)
    print()
