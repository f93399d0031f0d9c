"""Conversations with a model: what it is shown of them, where its answers end, and what is left out."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from chat_templates import CHATML, GEMMA, MISTRAL, PUBLISHED, Published
from test_runtime_examples import save
from transformers import AutoTokenizer

from coordinator.commands.terminal import Terminal
from coordinator.query import queries
from coordinator.query.chatting import Chat
from coordinator.query.sampling import Sampling
from swarm_peer.config import DataSection
from swarm_peer.errors import UserError
from swarm_peer.runtime.data.tokenizers import BytesTokenizer, Tokenizer, read_tokenizer


def data(tokenizer: str = "x", length: int = 1000, **more: Any) -> DataSection:
    return DataSection(tokenizer=tokenizer, sequence_length=length, **more)


class Model:
    """Says what it is told to, and keeps its prompts; goes on for as long as it is let."""

    def __init__(self, tokenizer: Tokenizer, *answers: str):
        self.tokenizer = tokenizer
        self.answers = [tokenizer.encode(answer) for answer in answers]
        self.prompts: list[str] = []
        self.num_generated = 0

    async def go_on(self, prompt: Sequence[int], most: int) -> AsyncGenerator[int, None]:
        self.prompts.append(self.tokenizer.decode(list(prompt)))
        for token in self.answers.pop(0)[:most]:
            self.num_generated += 1
            yield token


async def said(chat: Chat, model: Model, message: str) -> str:
    pieces = "".join([piece async for piece in chat.answer(message, model.go_on)])
    assert pieces.endswith("\n")
    return pieces[:-1]


@pytest.mark.parametrize("name", PUBLISHED)
async def test_a_model_sees_what_transformers_makes_of_a_chat_and_ends_where_its_template_does(name, tmp_path):
    published = PUBLISHED[name]
    folder = save(tmp_path, published, published.template)
    tokenizer, told = read_tokenizer(folder, None), []
    end = {"gemma": "<end_of_turn>"}.get(name, published.eos_token)
    model = Model(tokenizer, f"Ja 🙂{end}\nrubbish", f"No{end}", "Yes")
    chat = Chat(data(folder), tokenizer, 50, told.append)
    assert await said(chat, model, "Ünïcode?") == "Ja 🙂"
    assert model.num_generated == len(tokenizer.encode("Ja 🙂")) + 1, "nothing is asked for beyond the end"
    assert await said(chat, model, "b") == "No"

    chats = [{"role": role, "content": text} for role, text in [("user", "Ünïcode?"), ("assistant", "Ja 🙂")]]
    theirs = AutoTokenizer.from_pretrained(folder)
    for prompt, messages in zip(model.prompts, ([chats[0]], [*chats, {"role": "user", "content": "b"}]), strict=True):
        assert prompt == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert told == []


async def test_the_token_that_ends_a_text_ends_an_answer_too(tmp_path):
    folder = save(tmp_path, GEMMA, GEMMA.template)
    tokenizer = read_tokenizer(folder, None)
    model = Model(tokenizer, "Yes<eos>rubbish")
    assert await said(Chat(data(folder), tokenizer, 50, print), model, "a") == "Yes"


async def test_the_runs_own_template_goes_before_the_tokenizers(tmp_path):
    folder = save(tmp_path, CHATML, CHATML.template)
    tokenizer = read_tokenizer(folder, None)
    model = Model(tokenizer, "Yes")
    section = data(folder, chat_template=MISTRAL.template)
    assert await said(Chat(section, tokenizer, 50, print), model, "a") == "Yes"
    assert model.prompts == ["<|im_start|>[INST] a [/INST]"]


@pytest.fixture
def plain(tmp_path) -> tuple[Tokenizer, str]:
    """A template of which a turn is a letter, its text, and a token that ends it."""
    template = "{% for m in messages %}{{ m['role'][0] + m['content'] + '<e>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'a' }}{% endif %}"
    folder = save(tmp_path, Published("", ("<e>",), "<e>", "<e>", ""), template)
    return read_tokenizer(folder, None), folder


async def test_the_oldest_turns_are_left_out_and_that_is_told(plain):
    tokenizer, folder = plain
    told: list[str] = []
    model = Model(tokenizer, *("1<e>", "2<e>", "3<e>", "4<e>"))
    # A question of one letter is three tokens, an answer another three, and the beginning of one is one.
    chat = Chat(data(folder, length=20), tokenizer, 6, told.append)
    for message in "ABC":
        await said(chat, model, message)
    assert model.prompts[1:] == ["uA<e>a1<e>uB<e>a", "uB<e>a2<e>uC<e>a"]
    assert told == ["The oldest question and its answer are left out from here on: the run's sequences have 20 tokens."]
    await said(chat, model, "D" * 10)
    assert model.prompts[3] == f"u{'D' * 10}<e>a"
    assert told[1].startswith("The oldest 2 questions and answers are left out from here on")


async def test_a_message_that_is_too_long_is_refused_and_the_chat_goes_on(plain):
    tokenizer, folder = plain
    model = Model(tokenizer, "1<e>", "2<e>")
    chat = Chat(data(folder, length=20), tokenizer, 6, print)
    await said(chat, model, "A")
    with pytest.raises(UserError, match="the message has 33 tokens in the run's chat template, and the run's sequence"):
        await said(chat, model, "B" * 30)
    await said(chat, model, "C")
    assert model.prompts[1] == "uA<e>a1<e>uC<e>a", "what was refused has not been said"


@pytest.mark.parametrize(
    ("question", "most", "answer", "reason"),
    [("A", 6, "1" * 6, "--tokens is 6"), ("A" * 14, 6, "1" * 3, "the run's sequences have 20 tokens")],
)
async def test_an_answer_that_is_cut_off_says_why(question, most, answer, reason, plain):
    tokenizer, folder = plain
    told: list[str] = []
    model = Model(tokenizer, "1" * 99)
    assert await said(Chat(data(folder, length=20), tokenizer, most, told.append), model, question) == answer
    assert told == [f"The answer is cut off: {reason}."]


def test_a_run_without_a_chat_template_says_what_to_do():
    with pytest.raises(UserError, match=r"no chat template, since data\.tokenizer='bytes' brings none: leave --chat"):
        Chat(data("bytes"), BytesTokenizer(), 9, print)


def test_a_template_that_does_not_work_is_named():
    section = data("bytes", chat_template="{{ raise_exception('no chats here') }}")
    with pytest.raises(UserError, match=r"cannot be used: .*no chats here.*correct data\.chat_template"):
        Chat(section, BytesTokenizer(), 9, print)


async def test_a_message_that_the_template_refuses_is_told():
    template = "{% for m in messages %}{% if m['content'] == 'x' %}{{ raise_exception('no x') }}{% endif %}{% endfor %}"
    chat = Chat(data("bytes", chat_template=template), BytesTokenizer(), 9, print)
    with pytest.raises(UserError, match=r"refuses it \(no x\): write another message"):
        await said(chat, Model(BytesTokenizer(), "a"), "x")


class Screen:
    def __init__(self, *messages: str):
        self.messages = [*messages, ""]
        self.shown = ""

    def read(self) -> str:
        return self.messages.pop(0)

    def write(self, text: str) -> None:
        self.shown += text

    def tell(self, sentence: str) -> None:
        self.shown += f"({sentence})"


@pytest.fixture
def live(plain, monkeypatch):
    """A live run whose model answers with the number of tokens that it has been shown."""
    tokenizer, folder = plain

    async def generate(tokens: Sequence[int], sampling: Sampling) -> AsyncGenerator[int, None]:
        for token in tokenizer.encode(f"{len(tokens)}<e>")[: sampling.num_tokens]:
            yield token

    manifest = SimpleNamespace(data=data(folder, length=20))
    model = SimpleNamespace(resolved=SimpleNamespace(manifest=manifest, vocab_size=300), generate=generate)
    monkeypatch.setattr(queries, "_with_live_model", lambda addresses, run_id, work: anyio.run(work, model))


@pytest.mark.usefixtures("live")
def test_a_conversation_ends_with_an_empty_line_and_survives_a_message_that_is_refused(tmp_path):
    screen = Screen("A", "B" * 30, "CC", "", "never asked")
    queries.chat_with_run((), None, None, Sampling(num_tokens=6), screen, data_dir=tmp_path)
    refused, answers = screen.shown.partition("(the message has 33 tokens")[0], screen.shown.splitlines()
    assert refused == "4\n"
    assert answers[-1].endswith("write a shorter one.)11")
    assert screen.messages == ["never asked", ""]


@pytest.mark.usefixtures("live")
def test_a_prompt_is_answered_or_refused(tmp_path):
    screen = Screen("never asked")
    queries.chat_with_run((), None, "AB", Sampling(num_tokens=6), screen, data_dir=tmp_path)
    assert (screen.shown, screen.messages) == ("5\n", ["never asked", ""])
    with pytest.raises(UserError, match="the message has 33 tokens"):
        queries.chat_with_run((), None, "B" * 30, Sampling(num_tokens=6), screen, data_dir=tmp_path)


@pytest.mark.usefixtures("live")
def test_a_run_has_its_tokenizer_read_here_only_where_it_may(tmp_path):
    with pytest.raises(UserError, match=r"wants to read the tokenizer .*--data-dir FOLDER"):
        queries.chat_with_run((), None, "A", Sampling(num_tokens=6), Screen(), data_dir=tmp_path / "other")


def test_a_terminal_is_read_line_by_line_and_commanded_by_nobody(capsys):
    reading, writing = os.pipe()
    os.write(writing, "Grüße \nzwei\n\ndrei".encode())
    os.close(writing)
    used = []
    terminal = Terminal(lambda: used.append(1), reading)
    assert [terminal.read() for _ in range(5)] == ["Grüße", "zwei", "", "drei", ""]
    os.close(reading)
    assert not used, "what waits may go on until there is something to show"
    terminal.write("\x1b[2Ja\n")
    terminal.tell("\x07b")
    said = capsys.readouterr()
    assert (said.out, said.err, len(used)) == ("[2Ja\n", "b\n", 2)


def test_on_a_terminal_a_line_is_asked_for(capsys):
    ours, theirs = os.openpty()
    os.write(ours, b"hello\n")
    used = []
    assert Terminal(lambda: used.append(1), theirs).read() == "hello"
    assert (capsys.readouterr().err, used) == ("> ", [1])
    os.close(ours)
    os.close(theirs)
