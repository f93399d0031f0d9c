"""Weights to begin a run with: a Hugging Face model saved as safetensors, of which each stage reads its own part.

Owns finding and reading the files, in a local folder or on the hub. Knows nothing of how a model is cut or trained.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from swarm_peer.config import AdapterSection, RunManifest, looks_like_a_path
from swarm_peer.errors import UserError, check_letters, first_line, machine_fault
from swarm_peer.files import LFS_POINTER, NO_LFS_POINTER
from swarm_peer.hub_waits import told_if_slow
from swarm_peer.model.families import Family
from swarm_peer.model.parameters import replace_parameter

log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
# As transformers looks for them: one file, else the index of several.
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Weights of other types are quantised, and scales that we do not know belong to them.
DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
# Values that are read at a time, where rows are not longer: 1 MB as fp32. Larger blocks leave gaps in the memory.
BLOCK_VALUES = 1 << 18
# A block's rows are a multiple of this number: then quantised types cut them into whole blocks of their own.
ROW_STEP = 64
# Of layers, by the ends of their names: nobody needs them any more.
OLD_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


class WrongTensor(UserError):
    """A file of weights whose hashes are known is gone or damaged, or holds other weights than the run's."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files are: `model.pretrained` of a manifest, or `model.config` where that is a name.

    Whether it names a folder or the hub is told by its looks alone, so that it means the same on all machines.

    Attributes:
        name: a path, which begins with `.`, `/` or `~` or has several slashes; or a hub name, perhaps with @REVISION
        cache_dir: where files from the hub are kept; the hub's own default if None
        key: the setting that names it
        is_right: whether a tensor of that name is the one that the run means; None if any will do
    """

    name: str
    cache_dir: Path | None = None
    key: str = "model.pretrained"
    is_right: Callable[[str, Tensor], bool] | None = field(default=None, compare=False)

    @property
    def folder(self) -> Path | None:
        """The local folder; None for a hub name."""
        is_path = looks_like_a_path(self.name.partition("@")[0])
        # Unlike Path.expanduser, this raises nothing for a user whom this machine does not know.
        return Path(os.path.expanduser(self.name)) if is_path else None

    def fetch(self, file: str, *, is_needed: bool = False) -> Path | None:
        """The file on this machine, downloaded if need be; None if there is no such file.

        Args:
            is_needed: it is an error, too, if the hub does not answer and this machine has kept no such file

        Raises:
            UserError: there is no such folder, or the hub does not give its files
        """
        if self.folder is not None:
            check_letters(str(self.folder))
            if not self.folder.is_dir():
                raise self.error("is no folder on this machine: correct the path, or give a hub name")
            path = self.folder / file
            if not path.parent.resolve().is_relative_to(self.folder.resolve()):
                raise self.error(f"has {file} outside of that folder: put it there")
            return path if path.is_file() else None
        repository, _, revision = self.name.partition("@")
        try:
            with told_if_slow(f"{self.key}={self.name!r}"):
                return Path(hf_hub_download(repository, file, revision=revision or None, cache_dir=self.cache_dir))
        except EntryNotFoundError as error:  # also what is not in the cache of a machine without network
            log.debug("file_not_found model=%s file=%s reason=%s", self.name, file, error)
            if is_needed and isinstance(error, LocalEntryNotFoundError):
                raise self.error(
                    f"cannot be had: the Hugging Face hub does not answer (check the network and HF_HUB_OFFLINE), and "
                    f"this machine has kept no {file} of it; a folder that has it may be named with --set "
                    f"{self.key}=./FOLDER"
                ) from error
            return None
        except (OSError, ValueError) as error:  # every other error of the hub's client is one of the two
            if (fault := machine_fault(error)) is not None:
                raise self.error(f"cannot be downloaded: {fault}") from error
            raise self.error(
                f"cannot be had from the Hugging Face hub ({first_line(error)}): correct the name"
            ) from error

    def find(self, file: str) -> Path | None:
        """The file, if it is on this machine already; None if not."""
        if self.folder is not None:
            path = self.folder / file
            return path if path.is_file() else None
        repository, _, revision = self.name.partition("@")
        try:
            found = try_to_load_from_cache(repository, file, self.cache_dir, revision or None)
        except HFValidationError:  # no name that a repository can have
            return None
        return Path(found) if isinstance(found, str) else None

    def read_json(self, file: str, *, is_needed: bool = False) -> dict[str, Any] | None:
        """A file that holds a mapping; None if there is no such file.

        Args:
            is_needed: see fetch

        Raises:
            UserError: it cannot be read, or holds something else
        """
        if (path := self.fetch(file, is_needed=is_needed)) is None:
            return None
        try:
            if (raw := path.read_bytes()).startswith(LFS_POINTER):
                raise self.error(f"has a {file} that {NO_LFS_POINTER}")
            content = json.loads(raw.decode("utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            if (fault := machine_fault(error)) is not None:
                raise self.error(f"cannot read {file}: {fault}") from error
            raise self.error(f"cannot read {file} ({first_line(error)}): mend or replace that file") from error
        if not isinstance(content, dict):
            raise self.error(f"{file} holds no mapping: mend or replace that file")
        return content

    def read_config(self) -> dict[str, Any]:
        """The model's config.json. Raises UserError."""
        if (config := self.read_json(CONFIG_FILE, is_needed=True)) is None:
            raise self._lacks(CONFIG_FILE)
        return config

    def pinned(self, file: str = CONFIG_FILE) -> str:
        """The name to publish, which means the same tomorrow and on every machine: of the hub, one certain commit.

        Args:
            file: that the hub's repository has

        Raises:
            UserError: the hub has no such repository, or no such file in it, or cannot be reached
        """
        if self.folder is None and Path(self.name).is_dir():
            return f"./{self.name}"
        if self.folder is not None:
            return self.name
        if (path := self.fetch(file, is_needed=True)) is None:
            raise self._lacks(file)
        commit = path.parent.name  # of .../snapshots/COMMIT/FILE
        is_commit = re.fullmatch("[0-9a-f]{40}", commit) is not None
        return f"{self.name.partition('@')[0]}@{commit}" if is_commit else self.name

    def _lacks(self, file: str) -> UserError:
        is_gguf = self.folder is not None and any(self.folder.glob("*.gguf"))
        hint = ", which transformers makes of a GGUF file" if is_gguf else ""
        return self.error(f"has no {file}: give the folder or hub name of a transformers model{hint}")

    def files_by_tensor(self) -> dict[str, str]:
        """In which file each tensor is.

        Raises:
            UserError: no safetensors, or an index that cannot be right
        """
        if (path := self.fetch(WEIGHTS_FILE)) is not None:
            with self.opened(WEIGHTS_FILE, path) as file:
                return dict.fromkeys(file.keys(), WEIGHTS_FILE)
        index = self.read_json(INDEX_FILE, is_needed=True)
        if index is None:
            raise self.error(
                f"has neither {WEIGHTS_FILE} nor {INDEX_FILE}: give a model that was saved as safetensors, not as "
                f"pytorch_model.bin or GGUF"
            )
        files = index.get("weight_map")
        if not isinstance(files, dict) or not all(map(_is_below, files.values())):
            raise self.error(f"{INDEX_FILE} has no weight_map of files in that folder: mend or replace that file")
        return files

    def tensors_here(self) -> dict[str, Path]:
        """The tensors in files that are on this machine already, with their files."""
        try:
            if (path := self.find(WEIGHTS_FILE)) is not None:
                with self.opened(WEIGHTS_FILE, path) as content:
                    return dict.fromkeys(content.keys(), path)
            path = self.find(INDEX_FILE)
            files = {} if path is None else json.loads(path.read_bytes())["weight_map"]
            paths = {file: self.find(file) for file in filter(_is_below, files.values())}
            return {name: path for name, file in files.items() if (path := paths.get(file)) is not None}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, UserError) as error:
            log.warning("weights_not_seen model=%s reason=%s", self.name, first_line(error))
            return {}

    @contextmanager
    def opened(self, file: str, path: Path) -> Iterator[Any]:
        """The tensors of a file, which are read one by one.

        Raises:
            UserError: no safetensors, or a damaged one
        """
        if not os.access(path, os.R_OK):
            raise self._unread(f"has {file}, which this user may not read: allow it")
        with path.open("rb") as start:
            if start.read(len(LFS_POINTER)) == LFS_POINTER:
                raise self._unread(f"has a {file} that {NO_LFS_POINTER}")
        try:
            with safe_open(path, framework="pt") as content:
                yield content
        except (OSError, SafetensorError) as error:
            raise self._unread(f"cannot read {file} ({first_line(error)}): download or save it again") from error

    def _unread(self, text: str) -> UserError:
        """The error that a file of weights is not what it should be: members may have others, if the run has hashes."""
        return self.error(text) if self.is_right is None else WrongTensor(self.error(text).args[0])

    def missing(self, file: str) -> UserError:
        """The error that a file of weights is not there."""
        return self._unread(f"lacks {file}, where {INDEX_FILE} says that tensors are: download it")

    def error(self, text: str) -> UserError:
        """An error that says which model it is about."""
        return UserError(f"{self.key}={self.name!r} {text}")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in one of a model's files, which is read some rows at a time.

    So a stage that keeps its weights in fewer bits takes little more memory while it reads them than afterwards.

    Attributes:
        path: of the file on this machine
        name: that the file has for it
        shape: that the stage needs
    """

    source: ModelSource
    file_name: str
    path: Path
    name: str
    shape: torch.Size

    def blocks(self) -> Iterator[Tensor]:
        """All rows in turn, some at a time, in fp32; or all values of a vector.

        All blocks but the last have a multiple of ROW_STEP rows.

        Raises:
            UserError: the tensor has another shape, is quantised, or not finite, or the file cannot be read
            WrongTensor: it is not the one that the run means
        """
        with self.source.opened(self.file_name, self.path) as content:
            self._check(content)
        num_rows, row_values = self.shape[0], max(self.shape[1:].numel(), 1)
        step = max(BLOCK_VALUES // row_values // ROW_STEP, 1) * ROW_STEP
        for start in range(0, num_rows, step):
            # Opened anew each time: what is read of the file's memory map is this process's memory until it is closed.
            with self.source.opened(self.file_name, self.path) as content:
                rows = content.get_slice(self.name)[start : start + step]
                values = rows.to(torch.float32, copy=True).contiguous()
            if not bool(values.isfinite().all()):
                raise self.source.error(
                    f"tensor {self.name} in {self.file_name} holds values that are not finite: save the model again"
                )
            yield values

    def whole(self) -> Tensor:
        """The tensor in fp32. Raises UserError; see blocks."""
        values = torch.empty(self.shape)
        fill(values, self.blocks())
        return values

    def _check(self, content: Any) -> None:
        view = content.get_slice(self.name)
        if tuple(view.get_shape()) != tuple(self.shape):
            raise self.source.error(
                f"tensor {self.name} has shape {tuple(view.get_shape())}, and the stage needs {tuple(self.shape)}: "
                f"leave model.config out, or give the one of this model"
            )
        if view.get_dtype() not in DTYPES:
            raise self.source.error(
                f"tensor {self.name} is of type {view.get_dtype()}: give a model that is not quantised: model.base "
                f"does that"
            )
        is_right = self.source.is_right
        if is_right is not None and not is_right(self.name, content.get_tensor(self.name)):
            text = f"has another tensor {self.name} in {self.file_name} than the run's base"
            raise WrongTensor(self.source.error(text).args[0])


def fill(values: Tensor, blocks: Iterable[Tensor]) -> None:
    """Give a tensor its rows, some at a time."""
    start = 0
    for block in blocks:
        values[start : start + len(block)] = block
        start += len(block)


def _is_below(file: Any) -> bool:
    """Whether a name is that of a file in a folder, or in one below it. Others lead to files that nobody allowed."""
    parts = PurePath(file).parts if isinstance(file, str) else ()
    return bool(parts) and ".." not in parts and not PurePath(*parts).is_absolute()


def check_pretrained(manifest: RunManifest, data_dir: Path | None) -> None:
    """A run's manifest is somebody else's: it reads those of our folders alone that we let it.

    Raises:
        UserError: it names a folder outside of `data_dir`
    """
    _check_folders(data_dir, manifest.model.pretrained, manifest.model.adapter)


def check_begins(manifest: RunManifest, data_dir: Path | None) -> None:
    """As check_pretrained, for a peer: members give it the frozen weights, where the manifest says so.

    Raises:
        UserError: it names a folder outside of `data_dir`
    """
    model = manifest.model
    _check_folders(data_dir, model.pretrained if model.base_sha256 is None else None, model.adapter)


def _check_folders(data_dir: Path | None, pretrained: str | None, adapter: AdapterSection | None) -> None:
    for name in (pretrained, None if adapter is None else adapter.begin_with):
        folder = None if name is None else ModelSource(name).folder
        if folder is not None and (data_dir is None or not folder.resolve().is_relative_to(data_dir.resolve())):
            raise UserError(
                f"the run wants to begin with the weights in {folder.resolve()} on this machine: put the model there, "
                f"and allow it with --data-dir FOLDER, which is that folder or one above it"
            )


def load_pretrained(
    module: nn.Module,
    family: Family,
    source: ModelSource,
    keep: Callable[[nn.Module, str, StoredTensor], None] | None = None,
) -> None:
    """Make a stage's parameters real, on the CPU, with the weights of a pretrained model.

    Reads the tensors of this module alone, and opens no file that has none of them.

    Args:
        keep: gives a parameter of the module its values; if not given, these are the parameter, in fp32

    Raises:
        UserError: files or tensors are missing, damaged, of other shapes than the stage's, or not finite
    """
    files = source.files_by_tensor()
    stored_names = published_names(module, family, files, source)
    wanted: dict[str, list[str]] = defaultdict(list)
    for name, stored in stored_names.items():
        wanted[files[stored]].append(name)
    for file_name, names in wanted.items():
        if (path := source.fetch(file_name)) is None:
            raise source.missing(file_name)
        for name in names:
            tensor = StoredTensor(source, file_name, path, stored_names[name], module.get_parameter(name).shape)
            if keep is None:
                replace_parameter(module, name, tensor.whole())
            else:
                keep(module, name, tensor)
    if unused := _unused(files, set(stored_names.values()), family):
        text = "weights_left_out model=%s tensors=%d first=%s reason=its config.json says nothing of them"
        log.warning(text, source.name, len(unused), unused[0])
    log.info("weights_imported model=%s tensors=%d files=%d", source.name, len(stored_names), len(wanted))


def _unused(files: Iterable[str], used: AbstractSet[str], family: Family) -> list[str]:
    """Tensors of this stage's layers that none of its parameters takes, but for buffers that old files have."""
    layer = re.compile(rf"(.*\.)?{family.layers}\.\d+\.")
    layers = {found.group() for name in used if (found := layer.match(name))}
    names = (name for name in files if name not in used and not name.endswith(OLD_BUFFERS))
    return sorted(name for name in names if (found := layer.match(name)) and found.group() in layers)


def published_names(module: nn.Module, family: Family, files: Mapping[str, str], source: ModelSource) -> dict[str, str]:
    """The name that a model's files have for each parameter of a stage.

    Models without a head are saved without the body's name before the others'. The language model of one that also
    takes images has its own name before or after the body's.
    Where embedding and head are tied, the files have one tensor for both (if they have two, these are the two: as
    transformers' tie_weights does it).

    Args:
        files: by name of the tensors

    Raises:
        UserError: one is missing
    """
    twins: dict[str, str] = {}
    found = {}
    for name, _ in module.named_parameters():
        candidates = _candidates(name, family)
        if not any(candidate in files for candidate in candidates):
            twins = twins or _tied_names(family, source)
            candidates = _candidates(twins[name], family) if name in twins else []
        stored = next((candidate for candidate in candidates if candidate in files), None)
        if stored is None:
            raise source.error(
                f"lacks the tensor {name}: give a complete model, whose layers are those of model.config"
            )
        found[name] = stored
    return found


def _candidates(name: str, family: Family) -> list[str]:
    plain = name.removeprefix(f"{family.body}.")
    within = [f"language_model.{name}", f"{family.body}.language_model.{plain}"] if family.wrappers else []
    return [name, plain, *within]


def is_tied(family: Family, source: ModelSource) -> bool:
    """Whether embedding and head of a published model are one matrix. Raises UserError."""
    default = type(family.config)().tie_word_embeddings
    return bool(source.read_config().get("tie_word_embeddings", default))


def _tied_names(family: Family, source: ModelSource) -> dict[str, str]:
    if not is_tied(family, source):
        return {}
    tied = dict(family.model_class._tied_weights_keys)  # {head: embedding}
    return tied | {embedding: head for head, embedding in tied.items()}
