"""From the manifest that a person has written to the one that is published: with an inline model and a tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path

from swarm_peer.config import DataSection, RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.architecture import resolve_model
from swarm_peer.model.pretrained import ModelSource
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.data.examples import ExampleMaker
from swarm_peer.runtime.data.tokenizers import VOCABULARY_FILES, load_tokenizer, read_tokenizer
from swarm_peer.wire.records import MAX_MANIFEST_BYTES

log = logging.getLogger(__name__)


def resolve_manifest(manifest: RunManifest, cache_dir: Path | None = None) -> ResolvedManifest:
    """The manifest as it is published: with an inline model config, and all checks done that are possible now.

    Raises:
        UserError: the model, its cut or the tokenizer does not fit
    """
    # Another run's, perhaps, where the file is a published manifest: `serve` makes its own.
    model = resolve_model(manifest.model.model_copy(update={"base_sha256": None}), cache_dir)
    data = _with_template(manifest.data)
    if model.pretrained is not None:
        data = choose_tokenizer(data, ModelSource(model.pretrained, cache_dir))
    resolved = ResolvedManifest.of(manifest.model_copy(update={"model": model, "data": data}))
    tokenizer = load_tokenizer(data, resolved.vocab_size, cache_dir)
    if data.has_targets:
        ExampleMaker(data, tokenizer)  # raises where there is no chat template that works
    num_bytes = len(resolved.manifest.canonical_json())
    if num_bytes > MAX_MANIFEST_BYTES:
        raise UserError(
            f"the manifest has {num_bytes} bytes; at most {MAX_MANIFEST_BYTES} fit: shorten "
            f"{'data.chat_template' if data.chat_template else 'model.config'}"
        )
    return resolved


def _with_template(data: DataSection) -> DataSection:
    """The data with the text of a chat template whose file is named: other machines do not have it."""
    if data.chat_template is None or "{" in data.chat_template:
        return data
    path = Path(data.chat_template).expanduser()
    try:
        return data.model_copy(update={"chat_template": path.read_text(encoding="utf-8")})
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise UserError(
            f"data.chat_template={data.chat_template!r} cannot be read: {reason}; give a template, or its file"
        ) from error


def choose_tokenizer(data: DataSection, model: ModelSource) -> DataSection:
    """The data with the tokenizer of a pretrained model, if none is named: its weights know no other token ids.

    Raises:
        UserError: another tokenizer is named and not said to be meant, or none is named and the model has none
    """
    is_named = "tokenizer" in data.model_fields_set
    if is_named and data.foreign_tokenizer:
        return data
    has_own = any(model.fetch(file) is not None for file in VOCABULARY_FILES)
    if not is_named:
        if not has_own:
            raise model.error(
                "comes without a tokenizer: name in data.tokenizer the one that it was trained with, such as bytes"
            )
        log.info("tokenizer_chosen tokenizer=%s reason=it is the pretrained model's own", model.name)
        return data.model_copy(update={"tokenizer": model.name})
    if has_own and (difference := _difference(data.tokenizer, model)):
        raise model.error(
            f"has a tokenizer of its own, and data.tokenizer={data.tokenizer!r} {difference}: leave data.tokenizer "
            f"out, or name {model.name}; if the weights are to learn other tokens, set data.foreign_tokenizer to true"
        )
    return data


def _difference(name: str, model: ModelSource) -> str:
    """In what a tokenizer differs from a model's own; empty if the same ids mean the same."""
    its = ModelSource(name, model.cache_dir)
    if name == "bytes":
        return "has other tokens"
    if its.folder is None and model.folder is None and name in (model.name, model.name.partition("@")[0]):
        return ""
    if its.folder is not None and model.folder is not None and its.folder.resolve() == model.folder.resolve():
        return ""
    try:
        own = read_tokenizer(model.name, model.cache_dir)
    except UserError as error:
        return f"cannot be compared with it ({error})"
    return "" if read_tokenizer(name, model.cache_dir).means_the_same(own) else "has other tokens"
