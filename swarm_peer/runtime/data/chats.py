"""Chats as tokens: a chat template makes text of messages, and what the assistant says in it is found again.

The same templates make the prompts of those who talk to the trained model.

Templates that mark it themselves (`{% generation %}`) say where it stands. For the others, the text of the messages
before each of the assistant's turns, with the beginning of an answer, and of those up to its end are made as well. Both
have to be beginnings of the whole text, and what lies between them is the turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from swarm_peer.config import DataSection, LossOn
from swarm_peer.errors import UserError, first_line
from swarm_peer.runtime.data.formats import Message
from swarm_peer.runtime.data.records import BadRecord
from swarm_peer.runtime.data.tokenizers import Tokenizer

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Some templates write the day into their text. It has to be the same at all peers, on all days: Llama 3's own default.
_FIXED_DAY = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}\n"

# A chat that any template takes.
_GREETING: Sequence[Message] = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"})

# From its first character up to the one after its last.
Span = tuple[int, int]


class Example(NamedTuple):
    """The tokens of a document, and for each of them whether it is learnt."""

    ids: list[int]
    is_target: list[bool]


class ChatTemplate:
    """The chat template of a run.

    Args:
        text: Jinja
        tokenizer: whose special tokens the template may name
    """

    def __init__(self, text: str, tokenizer: Tokenizer):
        self._text = _FIXED_DAY + text if "strftime_now" in text else text
        self._tokenizer = tokenizer
        self._has_marks = _MARKS.search(text) is not None

    def example(self, messages: Sequence[Message], loss_on: LossOn, tools: Any = None) -> Example:
        """The tokens of a chat.

        Raises:
            BadRecord: the template refuses it, or the assistant's turns cannot be told from the rest of the text
            UnknownToken: the model does not know one of its tokens
        """
        text, spans = self._render(messages, tools, finds_marks=True)
        if loss_on == "all":
            spans = [(0, len(text))]
        elif not self._has_marks:
            spans = self._turns(text, messages, tools)
        if loss_on == "completion":
            spans = spans[-1:]
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        return Example(ids, _overlaps(offsets, spans))

    def continuation(self, prompt: Sequence[Message], completion: Sequence[Message]) -> Example:
        """The tokens of a chat whose last messages, whoever says them, are learnt. Raises as `example`."""
        text, _ = self._render([*prompt, *completion])
        start = self._prefix(text, prompt, None, adds_prompt=completion[0]["role"] == "assistant")
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        return Example(ids, _overlaps(offsets, [(start, self._end(text, start, len(text)))]))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of some messages, with the beginning of the answer to them. Raises as `example`."""
        text, _ = self._render(messages, adds_prompt=True)
        return self._tokenizer.encode(text)

    def ends(self) -> frozenset[int]:
        """The tokens that end an answer: the first special one behind it, and the one that ends a text.

        Raises:
            BadRecord: the template refuses a chat of two messages
        """
        text, _ = self._render(_GREETING)
        behind = self._tokenizer.encode(text.rpartition(_GREETING[-1]["content"])[2])
        special = self._tokenizer.special_tokens
        first = [id_ for id_ in behind if self._tokenizer.decode([id_]) in special][:1]
        return frozenset([*first, self._tokenizer.separator_id])

    def _turns(self, text: str, messages: Sequence[Message], tools: Any) -> list[Span]:
        """Where the assistant's turns stand in the text of some messages."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                start = self._prefix(text, messages[:number], tools, adds_prompt=True)
                end = self._prefix(text, messages[: number + 1], tools)
                spans.append((start, self._end(text, start, end)))
        return spans

    def _prefix(self, text: str, messages: Sequence[Message], tools: Any, *, adds_prompt: bool = False) -> int:
        """The length of the text of the first messages, which has to be a beginning of all messages' text."""
        beginning, _ = self._render(messages, tools, adds_prompt=adds_prompt) if messages else ("", ())
        if not text.startswith(beginning):
            raise BadRecord(
                f"the chat template writes the first {len(messages)} messages in another way when more follow, so that "
                f"the assistant's turns cannot be told: mark them with {{% generation %}} in a template of your own "
                f"(data.chat_template), or set data.loss_on to all"
            )
        return len(beginning)

    def _end(self, text: str, start: int, end: int) -> int:
        """The end of a turn, without the line feed that the template writes after the token that ends it."""
        trimmed = text[start:end].rstrip()
        return start + len(trimmed) if trimmed.endswith(self._tokenizer.special_tokens or "\0") else end

    def _render(
        self, messages: Sequence[Message], tools: Any = None, *, adds_prompt: bool = False, finds_marks: bool = False
    ) -> tuple[str, list[Span]]:
        """The text of some messages, and what the template marks in it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        finds_marks &= self._has_marks
        try:
            [text], spans = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self._text,
                return_assistant_tokens_mask=finds_marks,
                add_generation_prompt=adds_prompt,
                **self._tokenizer.named_tokens,
            )
        except Exception as error:  # whatever a template's own expressions raise
            raise BadRecord(f"the chat template refuses it ({first_line(error)})") from error
        return text, list(spans[0]) if finds_marks else []


def template_of(section: DataSection, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of a run: its own, or its tokenizer's; None if there is none."""
    text = section.chat_template or tokenizer.chat_template
    return None if text is None else ChatTemplate(text, tokenizer)


def check_template(template: ChatTemplate) -> None:
    """Check that a chat of two messages can be rendered with a template.

    Raises:
        UserError: it cannot
    """
    try:
        template.example(_GREETING, "all")
    except BadRecord as error:
        raise UserError(f"the chat template cannot be used: {error}; correct data.chat_template") from error


def _overlaps(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """For each token whether a part of it is in one of the spans. Both are in the order of the text."""
    spans, result = list(spans), []
    number = 0
    for start, end in offsets:
        while number < len(spans) and start >= spans[number][1]:
            number += 1
        result.append(number < len(spans) and end > spans[number][0])
    return result
