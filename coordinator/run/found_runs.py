"""Finding a live run in the folders that `serve` and `local` write to, for commands that are given no address."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from coordinator.run.address_files import COORDINATOR, PEERS, read_known
from coordinator.run.invites import INVITE
from coordinator.watch.journal import read_events
from coordinator.watch.metrics_file import METRICS
from coordinator.watch.run_file import CHECKPOINTS, MODEL
from swarm_peer.errors import UserError
from swarm_peer.runtime.network.peer_addresses import listening
from swarm_peer.wire.passes import INVITE_PREFIX

RUNS = Path("runs")
Answering = Callable[[Sequence[str]], Awaitable[list[str]]]


def addresses_of_run(
    run: Path | None, initial_peers: Sequence[str], runs: Path = RUNS, answering: Answering = listening
) -> list[str]:
    """The addresses through which a command finds its run: those given, those in its folder, or those of a live run.

    Says on stderr which run it has found.

    Args:
        run: folder of the run
        initial_peers: addresses that were given
        runs: where to look for the folder of a live run
        answering: tells at which of some addresses somebody listens

    Raises:
        UserError: both are given, or no run is found there, or it is over
    """
    if run is not None and initial_peers:
        raise UserError(f"{run} and --initial-peers: both name a run; leave one of them out")
    if initial_peers:
        return list(initial_peers)
    if run is not None:
        addresses = _known_in(run)
        if not addresses:
            raise UserError(f"{run}: no addresses of a run are kept there; name the folder that it writes to")
        if (ending := ending_of(run)) and not _answering_in(run, answering):
            raise UserError(ending)
        return addresses
    folder, addresses = find_live_run(runs)
    print(f"The run in {folder}:", file=sys.stderr)
    return addresses


def folder_of_run(run: Path | None, runs: Path = RUNS) -> Path:
    """The folder of a run: the one that is given, or that of the newest live run.

    Raises:
        UserError: there is none
    """
    if run is not None:
        if not run.is_dir():
            raise UserError(f"there is no folder {run}: name the one that the run writes to, such as {runs / 'NAME'}")
        return run
    folder, _ = find_live_run(runs)
    print(f"The run in {folder}:", file=sys.stderr)
    return folder


def newest_folder(run: Path | None, runs: Path = RUNS) -> Path:
    """The folder of a run: the one that is given, or that of the run that made the last optimizer step, live or over.

    Raises:
        UserError: there is none
    """
    if run is not None:
        return run
    files = [file for file in runs.glob(f"*/{METRICS}") if file.stat().st_size]
    if not files:
        raise UserError(f"no run in {runs} has made an optimizer step: name the folder of a run")
    newest = max(files, key=lambda file: file.stat().st_mtime).parent
    print(f"The run in {newest}:", file=sys.stderr)
    return newest


def find_live_run(runs: Path, answering: Answering = listening) -> tuple[Path, list[str]]:
    """The newest run below a folder at whose addresses somebody listens, and these addresses.

    Args:
        answering: tells at which of some addresses somebody listens

    Raises:
        UserError: there is none
    """
    folders = sorted({file.parent for file in runs.glob(f"*/{COORDINATOR}")}, key=_last_written_s, reverse=True)
    for folder in folders:
        if addresses := _answering_in(folder, answering):
            return folder, [*addresses, *_invites_in(folder)]
    where, otherwise = f"there is no run in {runs}", ""
    if folders:
        ending = ending_of(folders[0])
        where = f"no run in {runs} answers ({ending or f'the newest, {folders[0]}, may be over'})"
        otherwise = "" if ending else _what_to_do_with(folders[0])
    remedy = "name the folder that a live run writes to, or an address of it with --initial-peers"
    raise UserError(f"{where}: {remedy}{otherwise}")


def _what_to_do_with(folder: Path) -> str:
    """The commands for a run that nobody takes part in any more, though it has not come to its end."""
    ways = []
    if (folder / METRICS).exists():
        ways.append(f"`swarm-coordinator report {folder}` shows how far it came")
    if any((folder / CHECKPOINTS).glob("step-*")):
        ways.append(f"`swarm-coordinator serve CONFIG --resume {folder}` goes on from its last checkpoint")
    return f"; {', and '.join(ways)}" if ways else ""


def _answering_in(folder: Path, answering: Answering) -> list[str]:
    """The addresses that the folder holds and at which somebody listens."""
    return anyio.run(answering, [text for text in _known_in(folder) if not text.startswith(INVITE_PREFIX)])


def ending_of(folder: Path) -> str | None:
    """That the run of a folder is over, as far as its journal knows, and what is left of it; None if it is not."""
    try:
        events = read_events(folder)
    except OSError:
        return None
    if not events or events[-1]["kind"] != "ended":
        return None
    left = ", and neither a model nor a checkpoint is left in that folder"
    if (folder / MODEL).exists():
        left = f": its model is in {folder / MODEL}"
    elif (folder / CHECKPOINTS).exists():
        left = f": `export --checkpoint {folder / CHECKPOINTS}` makes a model of its last checkpoint"
    return f"the run in {folder} is over{left}"


def _known_in(folder: Path) -> list[str]:
    """The addresses and the invite that the folder holds."""
    return [*read_known(folder / COORDINATOR), *read_known(folder / PEERS), *_invites_in(folder)]


def _invites_in(folder: Path) -> list[str]:
    with suppress(OSError):  # there is none, or it is for its owner alone
        return [(folder / INVITE).read_text(encoding="utf-8").strip()]
    return []


def _last_written_s(folder: Path) -> float:
    files = (folder / COORDINATOR, folder / PEERS, folder / METRICS)
    return max(file.stat().st_mtime for file in files if file.exists())
