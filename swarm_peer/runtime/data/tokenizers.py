"""Tokenizers: text to token ids and back, and all that can go wrong when one is loaded. Knows nothing of samples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from swarm_peer.config import DataSection, looks_like_a_path
from swarm_peer.errors import HubFailed, UserError, first_line

# A tokenizer that works turns this into several tokens; one without a vocabulary turns it into none.
_PROBE = "A stage is served by several peers."


class Tokenizer(Protocol):
    """A tokenizer, as the readers of a corpus need it.

    Attributes:
        vocab_size: all token ids are below this number
        separator_id: the token that is put after each document
    """

    vocab_size: int
    separator_id: int

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of some tokens."""
        ...


class BytesTokenizer:
    """UTF-8 bytes as ids 0..255; byte 0, which text does not use, separates documents."""

    vocab_size = 256
    separator_id = 0

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode(errors="replace"))  # scraped text may hold lone surrogates

    def decode(self, ids: list[int]) -> str:
        """The text of some bytes, also if they are not valid UTF-8. A model may have other ids: those are left out."""
        return bytes(id_ for id_ in ids if id_ < self.vocab_size).decode(errors="replace")


class PretrainedTokenizer:
    """A tokenizer of transformers."""

    def __init__(self, tokenizer: Any, separator_id: int):
        self.vocab_size = len(tokenizer)
        self.separator_id = separator_id
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""
        # verbose=False: no warning about texts beyond the tokenizer's own length limit; they are cut later.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of some tokens, with its spaces as they were."""
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


def local_tokenizer(section: DataSection) -> Path | None:
    """The folder on this machine that `data.tokenizer` names, if any.

    transformers prefers a folder to a repository of the same name.
    """
    source = os.path.expanduser(section.tokenizer)
    is_local = section.tokenizer != "bytes" and (looks_like_a_path(section.tokenizer) or os.path.exists(source))
    return Path(source) if is_local else None


def load_tokenizer(section: DataSection, vocab_size: int, cache_dir: Path | None = None) -> Tokenizer:
    """Load the run's tokenizer, and check that it works and fits the model. No code comes with it.

    Whether it may be read here is another question (allowed_files.py).

    Args:
        section: its `tokenizer` is `bytes`, a local folder or a name on the hub
        vocab_size: number of tokens that the model knows
        cache_dir: folder for files from the hub

    Raises:
        UserError: the tokenizer cannot be loaded, is empty, has no separator, or has more tokens than the model
    """
    name = section.tokenizer
    tokenizer: Tokenizer = BytesTokenizer() if name == "bytes" else _load_pretrained(name, cache_dir)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"data.tokenizer={name!r} has {tokenizer.vocab_size} tokens, the model's vocab_size is {vocab_size}: "
            f"set vocab_size in model.config to {tokenizer.vocab_size} or more, or choose a smaller tokenizer"
        )
    return tokenizer


def _load_pretrained(name: str, cache_dir: Path | None) -> PretrainedTokenizer:
    from transformers import AutoTokenizer

    source = os.path.expanduser(name)
    if looks_like_a_path(name) and not os.path.isdir(source):
        raise UserError(f"data.tokenizer={name!r}: there is no such folder; correct the path, or give a hub name")
    # Broken files make transformers raise nearly anything: OSError, ValueError, KeyError, TypeError, even Exception.
    try:
        # Without the last argument, transformers asks on the terminal whether to run a repository's code.
        tokenizer = AutoTokenizer.from_pretrained(source, cache_dir=cache_dir, trust_remote_code=False)
        is_empty = not tokenizer.encode(_PROBE, add_special_tokens=False)
    except Exception as error:
        # transformers prefers a folder to a repository of the same name.
        kind = UserError if os.path.isdir(source) else HubFailed
        raise kind(
            f"cannot load data.tokenizer={name!r}: {first_line(error)}; give bytes, a folder with tokenizer.json (or "
            f"vocab.json and merges.txt), or the name of a hub repository that this machine can reach"
        ) from error
    # If a folder has no vocabulary files, transformers 5 makes an empty tokenizer and raises nothing.
    if is_empty:
        raise UserError(
            f"data.tokenizer={name!r} gives no tokens for {_PROBE!r}: its vocabulary is missing; "
            f"put tokenizer.json, or vocab.json and merges.txt, into that folder"
        )
    for separator_id in (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id):
        if separator_id is not None:
            return PretrainedTokenizer(tokenizer, separator_id)
    raise UserError(
        f"data.tokenizer={name!r} has no end-of-text token to separate documents: add eos_token to its configuration"
    )
