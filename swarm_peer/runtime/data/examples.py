"""Documents of data for fine-tuning as tokens, each with whether it is learnt. Knows nothing of samples or slices."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from swarm_peer.config import DataFormat, DataSection, LossOn
from swarm_peer.errors import UserError
from swarm_peer.runtime.data.chats import Example, check_template, template_of
from swarm_peer.runtime.data.formats import Message, as_messages, messages_of
from swarm_peer.runtime.data.records import BadRecord
from swarm_peer.runtime.data.tokenizers import Tokenizer, UnknownToken

log = logging.getLogger(__name__)

LOSS_ON: Mapping[DataFormat, LossOn] = {
    "messages": "assistant",
    "sharegpt": "assistant",
    "prompt_completion": "completion",
    "alpaca": "completion",
    "tokens": "all",
}
# The prompt of Stanford's Alpaca, for models without a chat template.
_TASK = "Below is an instruction that describes a task"
_INPUT = ", paired with an input that provides further context"
_RESPONSE = "Write a response that appropriately completes the request."


class ExampleMaker:
    """Makes the examples of a run.

    Args:
        tokenizer: of the run

    Attributes:
        counts: documents that have come to nothing or have been cut, by what has happened
        packs: whether several of them make one sample

    Raises:
        UserError: there are chats, and no template for them
    """

    def __init__(self, section: DataSection, tokenizer: Tokenizer):
        self.counts = Counter[str]()
        self.packs = section.packing
        self._section = section
        self._tokenizer = tokenizer
        self._loss_on = section.loss_on or LOSS_ON[section.format]
        self._template = template_of(section, tokenizer)
        if self._template is not None and section.chat_template is not None:
            check_template(self._template)
        if self._template is None and section.format in ("messages", "sharegpt"):
            raise no_template(section)

    def example(self, document: str, most_tokens: int | None = None) -> Example | None:
        """The tokens of a document; None if there are none to learn, which is counted and told.

        The first token is not learnt: there is nothing that it could follow from.

        Args:
            most_tokens: further ones are cut off, at the end
        """
        try:
            ids, is_target = self._example(json.loads(document))
        except (BadRecord, UnknownToken) as error:
            self._count("unusable", str(error))
            return None
        if is_target:
            is_target[0] = False
        if not any(is_target):
            self._count("without_target", "no token of it is learnt: look at data.loss_on")
            return None
        if most_tokens is not None and len(ids) > most_tokens:
            ids, is_target = ids[:most_tokens], is_target[:most_tokens]
            if not any(is_target):
                self._count("cut_off", f"none of its first {most_tokens} tokens is learnt: raise data.sequence_length")
                return None
            self._count("cut", f"tokens after the first {most_tokens} are left out: raise data.sequence_length")
        self.counts["used"] += 1
        return Example(ids, is_target)

    def _count(self, what: str, reason: str) -> None:
        """Count a document, and tell of the first, the tenth, the hundredth and so on."""
        self.counts[what] += 1
        if str(self.counts[what]).strip("0") == "1":
            log.warning("examples_%s count=%d reason=%s", what, self.counts[what], reason)

    def _example(self, record: dict[str, Any]) -> Example:
        kind = self._section.format
        if kind == "tokens":
            return self._tokens(record["input_ids"], record.get("labels"))
        if kind == "alpaca":
            return self._alpaca(record)
        if kind == "prompt_completion":
            if isinstance(record["prompt"], str):
                return self._pair(record["prompt"], record["completion"])
            return self._continuation(record)
        assert self._template is not None
        return self._template.example(messages_of(record), self._loss_on, record.get("tools"))

    def _tokens(self, ids: list[int], labels: list[int] | None) -> Example:
        if (highest := max(ids)) >= self._tokenizer.vocab_size:
            raise BadRecord(f"it has the token {highest}, and data.tokenizer knows {self._tokenizer.vocab_size}")
        return Example(ids, [label != -100 for label in labels or ids])

    def _pair(self, prompt: str, completion: str) -> Example:
        """Tokenized apart, as they will be when somebody gives the prompt."""
        before = [*self._tokenizer.beginning, *self._tokenizer.encode(prompt)]
        after = [*self._tokenizer.encode(completion), self._tokenizer.separator_id]
        return Example(before + after, [self._loss_on == "all"] * len(before) + [True] * len(after))

    def _continuation(self, record: Mapping[str, Any]) -> Example:
        if self._template is None:
            raise no_template(self._section)
        prompt, completion = (as_messages(name, record[name]) for name in ("prompt", "completion"))
        if self._loss_on == "all":
            return self._template.example([*prompt, *completion], "all")
        return self._template.continuation(prompt, completion)

    def _alpaca(self, record: Mapping[str, str]) -> Example:
        parts = [part for part in (record["instruction"], record.get("input", "")) if part]
        if self._template is not None:
            system: list[Message] = [{"role": "system", "content": record["system"]}] if record.get("system") else []
            messages = [
                {"role": "user", "content": "\n\n".join(parts)},
                {"role": "assistant", "content": record["output"]},
            ]
            return self._template.example([*system, *messages], self._loss_on)
        heads = ("### Instruction:", "### Input:")
        prompt = record.get("system") or f"{_TASK}{_INPUT if len(parts) > 1 else ''}. {_RESPONSE}"
        for head, part in zip(heads, parts, strict=False):
            prompt += f"\n\n{head}\n{part}"
        return self._pair(f"{prompt}\n\n### Response:\n", record["output"])


def no_template(section: DataSection) -> UserError:
    """The error to raise where there are messages, and nothing says how they become text."""
    return UserError(
        f"data.format={section.format!r} needs a chat template, and data.tokenizer={section.tokenizer!r} has none: "
        f"take the tokenizer of a model for chats, or give data.chat_template"
    )
