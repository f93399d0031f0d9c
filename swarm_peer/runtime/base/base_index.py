"""The list of a run's frozen weights and of the small files beside them, each with the hashes of its chunks.

Owns how one is made, read and named, and what a peer believes of one. Knows nothing of where the weights are.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import safe_open
from torch import Tensor

from swarm_peer.errors import InvalidMessage, UserError, last_line
from swarm_peer.model.pretrained import CONFIG_FILE, DTYPES, OLD_BUFFERS, ModelSource
from swarm_peer.runtime.data.tokenizers import VOCABULARY_FILES
from swarm_peer.runtime.network.transport import pack_fields, unpack_fields
from swarm_peer.runtime.state.chunks import Chunk, chunks_of
from swarm_peer.runtime.state.index import as_bytes, hash_chunks
from swarm_peer.wire.messages import STATE_CHUNK_BYTES, BaseIndex, StateEntry

# Beside the weights: what a peer reads of a model and its tokenizer. No other name is believed.
FILES = (
    *(CONFIG_FILE, *VOCABULARY_FILES, "merges.txt", "vocab.bpe", "added_tokens.json", "special_tokens_map.json"),
    *("tokenizer_config.json", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
FILE = "file"  # the type of their entries
MAX_FILE_BYTES = 2**27
# Of an index as bytes: that of a model of 2 TB. It is unpacked once its hash is known to be right.
MAX_INDEX_BYTES = 2**24
# Tensors of these types are buffers that families make for themselves.
BUFFERS = ("BOOL", "I64")
# Bytes of a value, by safetensors' name of its type.
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
assert SIZES.keys() == DTYPES


@dataclass(frozen=True)
class Base:
    """The index of a run's frozen weights.

    Attributes:
        packed: the same as bytes, whose SHA-256 names it
    """

    index: BaseIndex
    packed: bytes

    @classmethod
    def read(cls, packed: bytes | memoryview, sha256: str) -> Base:
        """The index of that name.

        Raises:
            InvalidMessage: the bytes are another one, or list what no base has
        """
        packed = bytes(packed)
        if hashlib.sha256(packed).hexdigest() != sha256:
            raise InvalidMessage("this is not the index that the run's manifest names")
        index = unpack_fields(BaseIndex, memoryview(packed), max_bytes=MAX_INDEX_BYTES)
        for entry in index.tensors:
            if entry.dtype not in SIZES or len(entry.chunks) != -(-num_bytes(entry) // STATE_CHUNK_BYTES):
                raise InvalidMessage(f"tensor {entry.name:.100} of type {entry.dtype} and shape {entry.shape}")
        for entry in index.files:
            fits = entry.dtype == FILE and len(entry.shape) == 1 and entry.shape[0] <= MAX_FILE_BYTES
            if entry.name not in FILES or not fits or len(entry.chunks) != -(-entry.shape[0] // STATE_CHUNK_BYTES):
                raise InvalidMessage(f"file {entry.name:.100}")
        return cls(index, packed)

    @property
    def sha256(self) -> str:
        """Its name: in hex digits."""
        return hashlib.sha256(self.packed).hexdigest()

    @cached_property
    def entries(self) -> tuple[StateEntry, ...]:
        """Tensors, then files."""
        return self.index.tensors + self.index.files

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each tensor and each file among the entries; no tensor is named as a file is."""
        return {entry.name: number for number, entry in enumerate(self.entries)}

    def chunks(self, numbers: Iterable[int]) -> list[Chunk]:
        """The chunks of some entries."""
        found = ((number, self.entries[number]) for number in numbers)
        return [chunk for n, entry in found for chunk in chunks_of(n, entry.name, num_bytes(entry), entry.chunks)]

    def is_right(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor, as it is published, is the one of that name. Takes a second per gigabyte."""
        number = self.numbers.get(name)
        return number is not None and hash_chunks(as_bytes(tensor)) == self.entries[number].chunks


def num_bytes(entry: StateEntry) -> int:
    """Size of a tensor or a file."""
    return math.prod(entry.shape) * SIZES.get(entry.dtype, 1)


def make_base(source: ModelSource) -> Base:
    """List and hash a model's weights and files, downloading what is not here. Takes a second per gigabyte.

    Raises:
        UserError: a file cannot be read, or is none of a published model
    """
    by_file = defaultdict[str, list[str]](list)
    for name, file in sorted(source.files_by_tensor().items()):
        by_file[file].append(name)
    tensors: dict[str, StateEntry] = {}
    for file, names in by_file.items():
        if (path := source.fetch(file)) is None:
            raise source.missing(file)
        with source.opened(file, path) as content:
            found = ((name, _tensor_entry(source, content, name)) for name in names)
            tensors |= {name: entry for name, entry in found if entry is not None}
    beside = ((name, source.fetch(name)) for name in FILES)
    files = [_file_entry(name, path) for name, path in beside if path is not None]
    try:
        index = BaseIndex(tensors=tuple(tensors[name] for name in sorted(tensors)), files=tuple(files))
        packed = pack_fields(index)
        return Base.read(packed, hashlib.sha256(packed).hexdigest())
    except (ValidationError, InvalidMessage) as error:
        raise source.error(
            f"cannot be given by members to each other ({last_line(error)}): set model.share_base to false"
        ) from error


def _tensor_entry(source: ModelSource, content: Any, name: str) -> StateEntry | None:
    view = content.get_slice(name)
    if view.get_dtype() in BUFFERS or name.endswith(OLD_BUFFERS):
        return None
    if view.get_dtype() not in SIZES:
        raise source.error(
            f"tensor {name} is of type {view.get_dtype()}: give a model that is not quantised: model.base does that"
        )
    chunks = hash_chunks(as_bytes(content.get_tensor(name)))
    return StateEntry(name=name, dtype=view.get_dtype(), shape=tuple(view.get_shape()), chunks=chunks)


def _file_entry(name: str, path: Path) -> StateEntry:
    content = path.read_bytes()
    if len(content) > MAX_FILE_BYTES:
        raise UserError(f"{path} has {len(content)} bytes, and {MAX_FILE_BYTES} at most are given to other peers")
    return StateEntry(name=name, dtype=FILE, shape=(len(content),), chunks=hash_chunks(memoryview(content)))


def read_part(path: Path, entry: StateEntry, begin: int, size: int) -> memoryview:
    """Some bytes of an entry that a file of this machine holds; a tensor's stay in the file, mapped into memory.

    Raises:
        OSError, SafetensorError: the file is gone or damaged
    """
    if entry.dtype == FILE:
        with path.open("rb") as file:
            file.seek(begin)
            return memoryview(file.read(size))
    with safe_open(path, framework="pt") as content:  # reads the pages alone that are asked for
        return as_bytes(content.get_tensor(entry.name))[begin : begin + size]
