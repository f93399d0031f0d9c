"""How a newcomer finds its run: from the addresses of initial peers to the run's signed manifest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
from pydantic import ValidationError

from swarm_peer.addresses import peer_address
from swarm_peer.config import RunManifest
from swarm_peer.config_errors import describe
from swarm_peer.errors import CallError, UserError
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.guarded_p2p import check_peer_address
from swarm_peer.wire.passes import INVITE_PREFIX, Invite
from swarm_peer.wire.records import MANIFESTS_KEY, ManifestRecord

log = logging.getLogger(__name__)

# How long to look for a manifest. A coordinator publishes it as soon as it listens; a peer may come a moment earlier.
MANIFEST_WAIT_S = 10.0
# How long to wait for an address file. The coordinator writes it as soon as it listens.
ADDRESS_FILE_WAIT_S = 60.0


@dataclass(frozen=True)
class Entrance:
    """Where a run is entered, and what with.

    Attributes:
        addresses: multiaddresses of its peers; none to begin a run
        invite: to a run by invitation; None if the run is open to everybody
    """

    addresses: tuple[str, ...] = ()
    invite: Invite | None = None


async def find_manifest(dht: SwarmDHT, entrance: Entrance, run_id: str | None) -> tuple[str, RunManifest]:
    """Find the run to join. Returns its id and its manifest, which the run key has signed.

    If the DHT knows several runs, the run is the one that `run_id` names, or the invite. If neither does, it is the one
    whose coordinator is an initial peer.

    Raises:
        UserError: not exactly one run fits, or this version does not understand its manifest
    """
    if entrance.invite is not None:
        if run_id not in (None, entrance.invite.run_id):
            raise UserError(f"--run-id {run_id}: the invite is to run {entrance.invite.run_id}; leave one of them out")
        run_id = entrance.invite.run_id
    records: dict[str, ManifestRecord] = {}
    with anyio.move_on_after(MANIFEST_WAIT_S):
        while not records or (run_id is not None and run_id not in records):
            with suppress(CallError):
                records = await dht.fetch(MANIFESTS_KEY, ManifestRecord, None)
            await anyio.sleep(0.2)
    named = [run_id] if run_id is not None else [check_peer_address(address) for address in entrance.addresses]
    chosen = [known for known in named if known in records] or ([] if run_id is not None else list(records))
    if len(set(chosen)) != 1:
        known_runs = ", ".join(sorted(records)) or "none"
        wanted = f"run {run_id}" if run_id is not None else "one run to join"
        hint = "name one with --run-id" if run_id is None else "check its id or its key"
        raise UserError(
            f"expected {wanted} at {', '.join(entrance.addresses)}, found: {known_runs}; "
            + ("check that the coordinator is running" if not records else hint)
        )
    manifest = parse_manifest(records[chosen[0]])
    dht.keep_run(chosen[0], manifest)
    return chosen[0], manifest


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


def read_entrance(values: Sequence[str]) -> Entrance:
    """Resolve initial peers: addresses and invites. A value that begins with @ names a file of them, to be waited for.

    Raises:
        UserError: the file does not appear in time, or is empty; an address or an invite is malformed; or the invites
            are to several runs
    """
    texts: list[str] = []
    for value in values:
        texts += anyio.run(_read_address_file, Path(value[1:])) if value.startswith("@") else [value]
    invites = [Invite.parse(text) for text in texts if text.startswith(INVITE_PREFIX)]
    if len({invite.run_id for invite in invites}) > 1:
        raise UserError("--initial-peers: these invites are to several runs; leave all but one of them out")
    addresses = [text for text in texts if not text.startswith(INVITE_PREFIX)]
    addresses += [address for invite in invites for address in invite.addresses]
    return Entrance(tuple(map(peer_address, dict.fromkeys(addresses))), invites[0] if invites else None)


async def _read_address_file(path: Path) -> list[str]:
    file = anyio.Path(path)
    if not await file.exists():
        log.info("addresses_awaited path=%s seconds=%.0f", path, ADDRESS_FILE_WAIT_S)
    with anyio.move_on_after(ADDRESS_FILE_WAIT_S):
        while not await file.exists():  # noqa: ASYNC110  # a file has no event to wait for
            await anyio.sleep(0.2)
    try:
        addresses = (await file.read_text(encoding="utf-8", errors="replace")).split()  # what is no text is no address
    except OSError as error:
        raise UserError(
            f"initial peers: cannot read {path} ({error.strerror}) within {ADDRESS_FILE_WAIT_S:.0f} s: check the path "
            f"and that the coordinator writes it (--address-file)"
        ) from error
    if "--initial-peers" in addresses:  # the whole line that the coordinator prints
        addresses = addresses[addresses.index("--initial-peers") + 1 :]
    if not addresses:
        raise UserError(f"initial peers: {path} is empty: it should hold the coordinator's addresses")
    return addresses
