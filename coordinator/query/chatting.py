"""A conversation with a model: turns become a prompt by the run's chat template, within the run's sequence length."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing

from coordinator.query.sampling import TextStream
from swarm_peer.config import DataSection
from swarm_peer.errors import UserError
from swarm_peer.runtime.data.chats import ChatTemplate, template_of
from swarm_peer.runtime.data.formats import Message
from swarm_peer.runtime.data.records import BadRecord
from swarm_peer.runtime.data.tokenizers import Tokenizer

# Continues some tokens by as many as are asked for, or fewer.
Continue = Callable[[Sequence[int], int], AsyncGenerator[int, None]]


class Chat:
    """A conversation of a person and a model, which gives the model's next answer.

    Args:
        section: of a run; its sequence length bounds what the model sees of the conversation, the answer included
        most_tokens: of an answer
        tell: called with a sentence about what is left out

    Raises:
        UserError: the run has no chat template, or none that works
    """

    def __init__(self, section: DataSection, tokenizer: Tokenizer, most_tokens: int, tell: Callable[[str], None]):
        self._template, self._ends = template_and_ends(section, tokenizer)
        self._tokenizer = tokenizer
        self._length = section.sequence_length
        self._most_tokens = most_tokens
        self._tell = tell
        self._messages: list[Message] = []

    async def answer(self, message: str, go_on: Continue) -> AsyncIterator[str]:
        """Ask something; the answer comes in pieces, with a line feed at its end. Both are remembered from then on.

        Args:
            go_on: has the model continue the prompt

        Raises:
            UserError: the message is too long for the run, or its template or tokenizer refuses it
        """
        prompt, num_dropped = self._prompt([*self._messages, {"role": "user", "content": message}])
        del self._messages[:num_dropped]
        if num_dropped:
            what = (
                "question and its answer are" if num_dropped == 2 else f"{num_dropped // 2} questions and answers are"
            )
            self._tell(f"The oldest {what} left out from here on: the run's sequences have {self._length} tokens.")
        stream, said, num_tokens = TextStream(self._tokenizer, prompt), "", 0
        room = min(self._most_tokens, self._length - len(prompt))
        async with aclosing(go_on(prompt, room)) as tokens:
            async for token in tokens:
                if token in self._ends:
                    break
                num_tokens += 1
                said += (piece := stream.push(token))
                yield piece
        said += (piece := stream.rest())
        yield f"{piece}\n"
        if num_tokens == room:
            full = f"the run's sequences have {self._length} tokens"
            self._tell(f"The answer is cut off: {full if room < self._most_tokens else f'--tokens is {room}'}.")
        self._messages += [{"role": "user", "content": message}, {"role": "assistant", "content": said}]

    def _prompt(self, messages: Sequence[Message]) -> tuple[list[int], int]:
        """The tokens of the newest messages that leave room for an answer, and how many messages are left out."""
        room = min(self._most_tokens, self._length // 2)
        for num_dropped in range(0, len(messages), 2):
            tokens = prompt_of(self._template, messages[num_dropped:])
            if len(tokens) + room <= self._length:
                return tokens, num_dropped
        if len(tokens) >= self._length:
            raise UserError(
                f"the message has {len(tokens)} tokens in the run's chat template, and the run's sequences have "
                f"{self._length}: write a shorter one"
            )
        return tokens, num_dropped


def template_and_ends(section: DataSection, tokenizer: Tokenizer) -> tuple[ChatTemplate, frozenset[int]]:
    """The chat template of a run, and the tokens that end an answer.

    Raises:
        UserError: there is no template, or none that works
    """
    if (template := template_of(section, tokenizer)) is None:
        raise UserError(
            f"the run has no chat template, since data.tokenizer={section.tokenizer!r} brings none: leave --chat "
            f"and --ask out, or begin a run with data.chat_template or the tokenizer of a model for chats"
        )
    try:
        return template, template.ends()
    except BadRecord as error:
        raise UserError(f"the run's chat template cannot be used: {error}; correct data.chat_template") from error


def prompt_of(template: ChatTemplate, messages: Sequence[Message]) -> list[int]:
    """The tokens of some messages, with the beginning of an answer.

    Raises:
        UserError: the template or the tokenizer refuses them
    """
    try:
        return template.prompt(messages)
    except BadRecord as error:
        raise UserError(f"{error}: write another message") from error
