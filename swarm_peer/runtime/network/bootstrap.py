"""How a newcomer finds its run: from the addresses of initial peers to the run's signed manifest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import anyio
from pydantic import ValidationError

from swarm_peer.config import RunManifest, describe
from swarm_peer.errors import CallError, UserError
from swarm_peer.runtime.network.dht import SwarmDHT, check_peer_address
from swarm_peer.wire.records import MANIFESTS_KEY, ManifestRecord

log = logging.getLogger(__name__)

# How long to look for a manifest. A coordinator publishes it as soon as it listens; a peer may come a moment earlier.
MANIFEST_WAIT_S = 10.0
# How long to wait for an address file. The coordinator writes it as soon as it listens.
ADDRESS_FILE_WAIT_S = 60.0


async def find_manifest(dht: SwarmDHT, initial_peers: Sequence[str], run_id: str | None) -> tuple[str, RunManifest]:
    """Find the run to join. Returns its id and its manifest, which the run key has signed.

    If the DHT knows several runs, the run is the one that `run_id` names. If `run_id` is None, it is the one whose
    coordinator is an initial peer.

    Raises:
        UserError: not exactly one run fits, or this version does not understand its manifest
    """
    records: dict[str, ManifestRecord] = {}
    with anyio.move_on_after(MANIFEST_WAIT_S):
        while not records or (run_id is not None and run_id not in records):
            with suppress(CallError):
                records = await dht.fetch(MANIFESTS_KEY, ManifestRecord, None)
            await anyio.sleep(0.2)
    named = [run_id] if run_id is not None else [check_peer_address(address) for address in initial_peers]
    chosen = [known for known in named if known in records] or ([] if run_id is not None else list(records))
    if len(set(chosen)) != 1:
        known_runs = ", ".join(sorted(records)) or "none"
        wanted = f"run {run_id}" if run_id is not None else "one run to join"
        hint = "name one with --run-id" if run_id is None else "check its id or its key"
        raise UserError(
            f"expected {wanted} at {', '.join(initial_peers)}, found: {known_runs}; "
            + ("check that the coordinator is running" if not records else hint)
        )
    return chosen[0], parse_manifest(records[chosen[0]])


def parse_manifest(record: ManifestRecord) -> RunManifest:
    """Parse the manifest that a record holds.

    Raises:
        UserError: another version of this program published it, and this version does not understand it
    """
    try:
        return RunManifest.model_validate_json(record.manifest)
    except ValidationError as error:
        raise UserError(
            f"the run's manifest does not fit this version of swarm ({describe(error):.200}): install the version "
            f"that the coordinator runs"
        ) from error


def read_addresses(values: Sequence[str]) -> list[str]:
    """Resolve initial peers to addresses. A value that begins with @ names a file of addresses; wait for that file.

    Raises:
        UserError: the file does not appear in time, or is empty
    """
    addresses: list[str] = []
    for value in values:
        addresses += anyio.run(_read_address_file, Path(value[1:])) if value.startswith("@") else [value]
    return addresses


async def _read_address_file(path: Path) -> list[str]:
    file = anyio.Path(path)
    with anyio.move_on_after(ADDRESS_FILE_WAIT_S):
        while not await file.exists():  # noqa: ASYNC110  # a file has no event to wait for
            await anyio.sleep(0.2)
    try:
        addresses = (await file.read_text()).split()
    except OSError as error:
        raise UserError(
            f"initial peers: cannot read {path} ({error.strerror}) within {ADDRESS_FILE_WAIT_S:.0f} s: check the path "
            f"and that the coordinator writes it (--address-file)"
        ) from error
    if not addresses:
        raise UserError(f"initial peers: {path} is empty: it should hold the coordinator's addresses")
    return addresses
