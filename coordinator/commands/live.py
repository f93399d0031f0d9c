"""Commands that ask a live run, or end it: `status`, `dashboard`, `evaluate`, `sample` and `end`."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from coordinator.commands.console import open_console
from coordinator.commands.shared_options import (
    DASHBOARD,
    CacheDir,
    Count,
    Json,
    NotNegative,
    Positive,
    RunFolder,
    RunId,
    RunKey,
    RunPeers,
)
from coordinator.dashboard.place import parse_place
from swarm_peer.errors import UserError
from swarm_peer.initial_peers import check_initial_peers
from swarm_peer.logs import configure_logging
from swarm_peer.peer_options import LOGS, NETWORK, RUN, Addresses

# A heading of --help.
TEXT = Parameter(group=Group.create_ordered("The text"))


def status(
    run: RunFolder = None, /, *, initial_peers: RunPeers = (), run_id: RunId = None, json_: Json = False
) -> None:
    """Show stages, optimizer step, loss, throughput and all peers of a live run."""
    configure_logging("warning")
    check_initial_peers(initial_peers)
    from coordinator.run.found_runs import addresses_of_run
    from coordinator.watch.live_view import peers_table, run_table
    from coordinator.watch.observer import look_once, observe_run
    from coordinator.watch.summary import summarise

    watch = observe_run(addresses_of_run(run, initial_peers), run_id, look_once)
    if json_:
        print(json.dumps(summarise(watch)))
    else:
        console = open_console()
        console.print(run_table(watch))
        console.print(peers_table(watch))


def dashboard(
    run: RunFolder = None,
    /,
    *,
    port: Annotated[str, LOGS, Parameter(name="--dashboard")] = DASHBOARD,
    initial_peers: RunPeers = (),
    run_id: RunId = None,
) -> None:
    """Show a live run in a browser, from any machine, for as long as any of its peers lives.

    Args:
        port: Where to show it, as [HOST:]PORT; the next port that is free, if that one is taken.
    """
    configure_logging("warning")
    check_initial_peers(initial_peers)
    place = parse_place(port)

    from coordinator.dashboard.observing import observe_and_show
    from coordinator.run.found_runs import addresses_of_run, folder_of_run

    folder = run if run is not None or initial_peers else folder_of_run(None)
    observe_and_show(addresses_of_run(folder, initial_peers), run_id, place, folder)


def end(
    run: Annotated[
        Path | None,
        RUN,
        Parameter(name="RUN", help="Folder of the run, such as runs/demo, with its key. It has to be named."),
    ] = None,
    /,
    *,
    identity_path: RunKey = None,
    initial_peers: Annotated[Addresses, NETWORK] = (),
) -> None:
    """End a live run before its steps. Its peers and coordinators leave; export its model first if you want to keep it.

    Args:
        initial_peers: Addresses of any peers of the run; those in its folder, or beside its key, if not given.
    """
    configure_logging("warning")
    check_initial_peers(initial_peers)
    folder = run or (identity_path and identity_path.parent)
    if folder is None:
        raise UserError("name the folder of the run to end, such as runs/demo, or its key with --identity-path")
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: name that of a run")

    from coordinator.run.found_runs import addresses_of_run
    from coordinator.run.run_files import note_end
    from coordinator.run.run_key import run_key_of
    from coordinator.watch.observer import end_run

    run_key = run_key_of(folder, identity_path)
    addresses = addresses_of_run(None if initial_peers else folder, initial_peers)
    end_run(addresses, run_key, lambda left: print(f"Peers that have yet to leave: {left}", flush=True))
    note_end(folder)
    print("The run has ended.")


def evaluate(
    run: RunFolder = None,
    /,
    *,
    samples: Annotated[Count | None, RUN, Positive] = None,
    files: Annotated[tuple[Path, ...], RUN, Parameter(consume_multiple=1, negative="")] = (),
    data_dir: Annotated[Path | None, RUN] = None,
    initial_peers: RunPeers = (),
    run_id: RunId = None,
    cache_dir: CacheDir = None,
    json_: Json = False,
) -> None:
    """Evaluate a live run's model through its pipeline, which trains on: loss and perplexity of held-out text.

    Args:
        samples: How many, of the run's sequence length; as many as the run's own validation takes if not given.
        files: Text files to evaluate on, instead of what the run has held out.
        data_dir: Folder of this machine that the run may have its held-out text and its tokenizer read from.
    """
    configure_logging("warning")
    check_initial_peers(initial_peers)
    from rich.console import Console

    with Console(stderr=True).status("Looking for the run, and evaluating its model"):
        from coordinator.query.queries import draw_samples, evaluate_run
        from coordinator.run.found_runs import addresses_of_run

        draw = partial(draw_samples, num_samples=samples, files=files, data_dir=data_dir, cache_dir=cache_dir)
        result = evaluate_run(addresses_of_run(run, initial_peers), run_id, draw)
    if json_:
        print(json.dumps(asdict(result)))
        return
    oldest = f"{result.oldest_optimizer_step} to " if result.oldest_optimizer_step < result.optimizer_step else ""
    print(
        f"loss {result.loss:.4f} nats per token, perplexity {result.perplexity:.2f}: {result.samples} samples of "
        f"{result.tokens_per_sample} tokens, weights after {oldest}{result.optimizer_step} optimizer steps, "
        f"{result.seconds:.1f} s"
    )


def sample(
    run: RunFolder = None,
    /,
    *,
    prompt: Annotated[str | None, TEXT] = None,
    chat: Annotated[bool, TEXT, Parameter(negative="")] = False,
    tokens: Annotated[Count, TEXT, Positive] = 200,
    temperature: Annotated[float, TEXT, Parameter(validator=Number(gte=0, lt=inf))] = 0.8,
    top_k: Annotated[int, TEXT, NotNegative] = 40,
    seed: Annotated[int | None, TEXT, Parameter(validator=Number(gte=0, lt=2**64))] = None,
    data_dir: Annotated[Path | None, RUN] = None,
    initial_peers: RunPeers = (),
    run_id: RunId = None,
    cache_dir: CacheDir = None,
) -> None:
    """Have a live run's model continue a prompt, or answer in a chat, through its pipeline, which trains on.

    Nothing is kept between two tokens (there is no key-value cache): for each, the text so far, cropped to the run's
    sequence length, goes through the pipeline again.

    Args:
        prompt: Text to continue, or the message to answer.
        chat: Answer messages, by the run's chat template. Without --prompt, each line that you type is one; an empty
            one ends the chat.
        tokens: How many to generate, at most in each answer of a chat.
        temperature: 0 takes the likeliest token each time; higher values more of the others.
        top_k: Draw among this many likeliest tokens; 0 for all.
        seed: For the same text again, of the same weights; another one each time if not given.
        data_dir: Folder of this machine that the run may have its tokenizer read from.
    """
    configure_logging("warning")
    check_initial_peers(initial_peers)
    if prompt is None and not chat:
        raise UserError("--prompt is missing: give the text to continue, or --chat to talk with the model")
    from rich.console import Console

    with Console(stderr=True).status("Looking for the run and its tokenizer") as waiting:
        from coordinator.commands.terminal import Terminal
        from coordinator.query.queries import chat_with_run, sample_run
        from coordinator.query.sampling import Sampling
        from coordinator.run.found_runs import addresses_of_run

        terminal = Terminal(waiting.stop)
        sampling = Sampling(num_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
        addresses = addresses_of_run(run, initial_peers)
        if chat:
            chat_with_run(addresses, run_id, prompt, sampling, terminal, cache_dir, data_dir)
            return
        assert prompt is not None
        sample_run(addresses, run_id, prompt, sampling, terminal.write, cache_dir, data_dir)
    print()
