"""Finding a live run in the folders that `serve` and `local` write to, for commands that are given no address."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from coordinator.run.addresses import COORDINATOR, PEERS, read_known
from coordinator.run.invites import INVITE
from swarm_peer.addresses import INVITE_PREFIX
from swarm_peer.errors import UserError
from swarm_peer.runtime.network.addresses import listening

RUNS = Path("runs")


def addresses_of_run(run: Path | None, initial_peers: Sequence[str], runs: Path = RUNS) -> list[str]:
    """The addresses through which a command finds its run: those given, those in its folder, or those of a live run.

    Says on stderr which run it has found.

    Args:
        run: folder of the run
        initial_peers: addresses that were given
        runs: where to look for the folder of a live run

    Raises:
        UserError: both are given, or no run is found there
    """
    if run is not None and initial_peers:
        raise UserError(f"{run} and --initial-peers: both name a run; leave one of them out")
    if initial_peers:
        return list(initial_peers)
    if run is not None:
        addresses = _known_in(run)
        if not addresses:
            raise UserError(f"{run}: no addresses of a run are kept there; name the folder that it writes to")
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
        return run
    folder, _ = find_live_run(runs)
    print(f"The run in {folder}:", file=sys.stderr)
    return folder


def find_live_run(
    runs: Path, answering: Callable[[Sequence[str]], Awaitable[list[str]]] = listening
) -> tuple[Path, list[str]]:
    """The newest run below a folder at whose addresses somebody listens, and these addresses.

    Args:
        answering: tells at which of some addresses somebody listens

    Raises:
        UserError: there is none
    """
    folders = sorted({file.parent for file in runs.glob(f"*/{COORDINATOR}")}, key=_last_written_s, reverse=True)
    for folder in folders:
        known = _known_in(folder)
        invites = [text for text in known if text.startswith(INVITE_PREFIX)]
        if addresses := anyio.run(answering, [text for text in known if text not in invites]):
            return folder, [*addresses, *invites]
    where = (
        f"no run in {runs} answers (the newest, {folders[0]}, may be over)" if folders else f"there is no run in {runs}"
    )
    raise UserError(f"{where}: name the folder that a live run writes to, or an address of it with --initial-peers")


def _known_in(folder: Path) -> list[str]:
    """The addresses and the invite that the folder holds."""
    invites = []
    with suppress(OSError):  # there is none, or it is for its owner alone
        invites = [(folder / INVITE).read_text().strip()]
    return [*read_known(folder / COORDINATOR), *read_known(folder / PEERS), *invites]


def _last_written_s(folder: Path) -> float:
    files = (folder / COORDINATOR, folder / PEERS, folder / "metrics.jsonl")
    return max(file.stat().st_mtime for file in files if file.exists())
