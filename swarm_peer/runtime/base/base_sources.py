"""Finds the frozen weights of a stage: on this machine, on the hub, or with members that have them.

Whatever they come from, each tensor is compared with the hashes of the index that the run's manifest names. Must not
know who the members are, or how a stage computes with its weights.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, InvalidMessage, NotServing, UserError, first_line
from swarm_peer.model.pretrained import ModelSource, WrongTensor, published_names
from swarm_peer.model.stage import StageModule
from swarm_peer.runtime.base.base_cache import BaseCache, EntryFile, bases_folder
from swarm_peer.runtime.base.base_giver import BaseGiver, entries_in, numbers_in
from swarm_peer.runtime.base.base_index import Base, num_bytes
from swarm_peer.runtime.base.base_progress import DownloadProgress
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.data.allowed_files import is_within
from swarm_peer.runtime.host.processes import first_error
from swarm_peer.runtime.network.transport import Transport
from swarm_peer.runtime.state.chunks import Chunk, Donor, download_chunks
from swarm_peer.wire.messages import BaseChunkCall, BaseIndexCall

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

# Members that are asked for what they have, and those of them that chunks are taken from at once.
MOST_ASKED = 24
MOST_DONORS = 8
ASK_S = 20.0
# Until members are asked again, where none has what is missing.
PAUSE_S = 5.0
# Chunks that are downloaded before members are asked again what they have by now: 256 MiB.
CHUNKS_A_LOOK = 64
# Chunks that a member owes at once, and how long it may send nothing: these two take 130 s on a link of 64 kB/s.
IN_FLIGHT = 2
PATIENCE_S = 150.0


class BaseSources:
    """Finds the frozen weights of stages for one peer. Belongs to the event loop's thread.

    Attributes:
        giver: gives others what is here
    """

    def __init__(
        self,
        *,
        context: PeerContext,
        transport: Transport,
        members: Callable[[], Awaitable[Collection[str]]],
        explain: Callable[[str], None],
    ):
        """Make a finder that knows nothing yet.

        Args:
            members: ids of those who may have weights, the run's coordinators among them
            explain: told for what this peer waits
        """
        self._context = context
        self._manifest = context.resolved.manifest
        self._transport = transport
        self._members = members
        self._explain = explain
        self._rng = context.random.stream("base")
        self._finding = anyio.Lock()
        self._own_is_wrong = False
        self._waits_for = ""
        self._sha256 = self._manifest.model.base_sha256
        options = context.options
        self._cache = BaseCache(bases_folder(options.cache_dir), self._sha256 or "", options.cache_size)
        self.giver = BaseGiver(threads=context.threads, found=self._found)

    # --- what a stage reads

    async def source(self, stage: int, *, waits: bool = True) -> ModelSource | None:
        """The model that a stage reads its frozen weights from, once it is here; None if the manifest alone tells.

        Args:
            waits: for as long as no member has them

        Raises:
            UserError: there is no room for them
            NotServing: no member has them now
        """
        if self._sha256 is None:
            return None
        async with self._finding:
            return await self._find(stage, waits)

    async def _find(self, stage: int, waits: bool) -> ModelSource:
        base = await self._know_base(waits)
        numbers = await self._context.threads.run(self._wanted, base, stage)
        if (own := await self._context.threads.run(self._own_source, base, numbers)) is not None:
            return own
        while missing := await self._context.threads.run(self._cache.missing_of, base, numbers):
            given = await self._context.threads.run(self._is_on_hub, base, missing, abandon_on_cancel=True)
            if given:
                return self._published(base)
            await self._download(base, missing, waits)
        return self._cache.source(base)

    async def manifest(self) -> RunManifest:
        """The run's manifest, whose tokenizer is the one beside the weights where that is the model's own."""
        data, model = self._manifest.data, self._manifest.model
        if self._sha256 is None or data.tokenizer != model.pretrained:
            return self._manifest
        if self.giver.base is None:
            async with self._finding:
                await self._know_base(waits=True)
        data = data.model_copy(update={"tokenizer": str(self._cache.folder)})
        return self._manifest.model_copy(update={"data": data})

    async def distrust(self, source: ModelSource, stage: int, error: WrongTensor) -> None:
        """Note that a source has given other weights than the run's."""
        log.warning("base_refused model=%s reason=%s", source.name, error)
        if (base := self.giver.base) is None:
            return
        if source.name == str(self._cache.folder):
            numbers = await self._context.threads.run(self._wanted, base, stage)
            await self._context.threads.run(self._cache.drop_damaged, base, numbers)
        else:
            self._own_is_wrong = True
        self.giver.look_again()

    async def _know_base(self, waits: bool) -> Base:
        """The index, with the small files beside the weights in this machine's cache, checked."""
        if (base := self.giver.base) is not None:
            return base
        base = await self._context.threads.run(self._cache.read_base) or await self._ask_for_base(waits)
        await self._context.threads.run(self._cache.keep_base, base)
        files = range(len(base.index.tensors), len(base.entries))
        await self._context.threads.run(self._cache.drop_damaged, base, files)
        missing = await self._context.threads.run(self._cache.missing_of, base, files)
        await self._download(base, missing, waits)
        self.giver.base = base
        return base

    def _wanted(self, base: Base, stage: int) -> list[int]:
        """The numbers of the tensors that a stage reads."""
        resolved = self._context.resolved
        module = StageModule(resolved.config, resolved.specs[stage], resolved.manifest.model)
        files = dict.fromkeys((entry.name for entry in base.index.tensors), "")
        names = published_names(module, module.family, files, self._cache.source(base))
        return sorted({base.numbers[stored] for stored in names.values()})

    # --- this machine, and the hub

    def _published(self, base: Base) -> ModelSource:
        name = self._manifest.model.pretrained
        assert name is not None, "adapters have a base"
        return ModelSource(name, self._context.options.cache_dir, is_right=base.is_right)

    def _is_allowed(self, source: ModelSource) -> bool:
        if self._own_is_wrong:
            return False
        return source.folder is None or is_within(source.folder, self._context.options.data_dir)

    def _own_source(self, base: Base, numbers: Sequence[int]) -> ModelSource | None:
        """The model as it is published, if this machine has these entries of it and may read them."""
        source = self._published(base)
        is_here = self._is_allowed(source) and set(numbers) <= entries_in(source, base).keys()
        return source if is_here else None

    def _is_on_hub(self, base: Base, numbers: Sequence[int]) -> bool:
        """Download the files with these tensors from the hub; returns whether it gave them."""
        source = self._published(base)
        if source.folder is not None or not self._is_allowed(source):
            return False
        try:
            files = source.files_by_tensor()
            names = {files[base.entries[number].name] for number in numbers}
            return all(source.fetch(file) is not None for file in names)
        except (KeyError, UserError) as error:
            log.info("hub_not_used model=%s reason=%s", source.name, first_line(error))
            return False

    def _found(self, base: Base) -> dict[int, Path]:
        """The entries that this peer can give."""
        source = self._published(base)
        own = entries_in(source, base) if self._is_allowed(source) else {}
        paths = ((number, self._cache.path(number, entry)) for number, entry in enumerate(base.entries))
        return own | {number: path for number, path in paths if path.is_file()}

    # --- members

    async def _asked(self) -> list[str]:
        """The coordinator, as far as its identity is the run's, and some members."""
        members = set(await self._members()) - {self._transport.peer_id}
        first, others = members & {self._context.run_id}, sorted(members - {self._context.run_id})
        return [*first, *self._rng.sample(others, min(MOST_ASKED, len(others)))]

    async def _ask_for_base(self, waits: bool) -> Base:
        """The index, from any member; asks again and again."""
        assert self._sha256 is not None
        call = BaseIndexCall(manifest=self._context.resolved.hash)
        while True:
            for member in await self._asked():
                try:
                    reply = await self._transport.call(member, call, timeout_s=ASK_S)
                    if len(reply.tensors) != 2:
                        raise InvalidMessage("the index is missing")
                    return await self._context.threads.run(Base.read, reply.tensors[0], self._sha256)
                except CallError as error:
                    level = logging.DEBUG if isinstance(error, NotServing) else logging.INFO
                    log.log(level, "base_not_told member=%s reason=%s", member, error)
            await self._wait("waits for a member to say what the model's weights are", waits)

    async def _wait(self, why: str, waits: bool) -> None:
        if not waits:
            raise NotServing(f"no member gives the model's weights: this peer {why}")
        if why != self._waits_for:
            log.warning("waiting reason=%s", why)
        self._waits_for = why
        self._explain(why)
        await anyio.sleep(PAUSE_S)

    async def _donors(self, base: Base, missing: Collection[int]) -> list[Donor]:
        """Members that have some of these entries."""
        donors: list[Donor] = []
        call = BaseIndexCall(manifest=self._context.resolved.hash, is_known=True)

        async def ask(member: str) -> None:
            try:
                reply = await self._transport.call(member, call, timeout_s=ASK_S)
                if len(reply.tensors) != 2:
                    raise InvalidMessage("what is here is missing")
                has = numbers_in(reply.tensors[1], len(base.entries))
            except CallError as error:
                log.debug("base_not_told member=%s reason=%s", member, error)
                return
            if not has.isdisjoint(missing):
                donors.append(Donor(member, lambda chunk: chunk.entry in has, patience_s=PATIENCE_S))

        async with anyio.create_task_group() as tasks:
            for member in await self._asked():
                tasks.start_soon(ask, member)
        self._rng.shuffle(donors)
        return donors[:MOST_DONORS]

    async def _download(self, base: Base, numbers: Sequence[int], waits: bool) -> None:
        """Download entries into the cache, from several members at once, until all are there.

        Raises:
            UserError: there is no room for them
            NotServing: no member has them now, and this peer is not to wait
        """
        if not numbers:
            return
        # Those who come at once each have other parts first, to give these to each other.
        numbers = self._rng.sample(numbers, len(numbers))
        wanted = sum(num_bytes(base.entries[number]) for number in numbers)
        await self._context.threads.run(self._cache.make_room, wanted)
        missing, failed = deque(base.chunks(numbers)), set[str]()
        with DownloadProgress(wanted, self._context.clock) as progress, self._files(base) as files:
            for number in numbers:
                if not base.entries[number].chunks:  # it has no bytes
                    await self._context.threads.run(files, number)
            while missing:
                part = deque(missing.popleft() for _ in range(min(CHUNKS_A_LOOK, len(missing))))
                donors = await self._donors(base, {chunk.entry for chunk in part})
                if donors and waits:
                    self._explain("downloads the model's weights")
                before = len(part)
                # A donor that has failed is asked again only if there is no other.
                trusted = [donor for donor in donors if donor.peer_id not in failed]
                with first_error():
                    await self._take(trusted or donors, part, files, progress)
                failed |= {donor.peer_id for donor in donors if not donor.is_alive}
                missing.extend(part)
                if len(part) == before:
                    await self._wait("waits for a member that has the model's weights", waits)
        self._waits_for = ""
        log.info("base_downloaded entries=%d bytes=%d seconds=%.1f", len(numbers), wanted, progress.seconds)

    async def _take(
        self,
        donors: Sequence[Donor],
        missing: deque[Chunk],
        files: Callable[[int], EntryFile],
        progress: DownloadProgress,
    ) -> None:
        def ask(chunk: Chunk) -> BaseChunkCall:
            return BaseChunkCall(manifest=self._context.resolved.hash, entry=chunk.entry, chunk=chunk.number)

        async def write(chunk: Chunk, data: memoryview) -> None:
            file = await self._context.threads.run(files, chunk.entry)
            try:
                is_whole = await self._context.threads.run(file.write, chunk.begin, data)
            except OSError as error:
                raise self._cache.error(error) from error
            progress.add(chunk.size)
            if is_whole:
                self.giver.look_again()

        def failed(donor: str, error: CallError) -> None:
            log.warning("base_download_failed donor=%s reason=%s: %s", donor, error.code, error)

        await download_chunks(
            self._transport, donors, missing, ask=ask, write=write, failed=failed, in_flight=IN_FLIGHT
        )

    @contextmanager
    def _files(self, base: Base) -> Iterator[Callable[[int], EntryFile]]:
        """The files of entries, each begun when it is first asked for; those that are not whole go in the end."""
        begun: dict[int, EntryFile] = {}
        beginning = threading.Lock()

        def file(number: int) -> EntryFile:
            with beginning:
                if number not in begun:
                    begun[number] = self._cache.write(number, base.entries[number])
                return begun[number]

        try:
            yield file
        finally:
            for each in begun.values():
                each.close()
