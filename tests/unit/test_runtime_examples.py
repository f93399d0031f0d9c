"""Records of data for fine-tuning as tokens, held to transformers' own masks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, FORGETS_THOUGHTS, PUBLISHED, Published
from tiny_tokenizers import save_tokenizer
from transformers import AutoTokenizer

from swarm_peer.config import DataSection
from swarm_peer.errors import UserError
from swarm_peer.runtime.data.chats import ChatTemplate, Example
from swarm_peer.runtime.data.examples import ExampleMaker
from swarm_peer.runtime.data.formats import document_of
from swarm_peer.runtime.data.records import BadRecord
from swarm_peer.runtime.data.tokenizers import BytesTokenizer, PretrainedTokenizer, read_tokenizer

CHATS = {
    "one turn": [("user", "Hi"), ("assistant", "Yes")],
    "three turns": [("user", "Hi"), ("assistant", "Yes, of course"), ("user", "Ünïcode 🙂?"), ("assistant", "Ja 🙂")],
    "ends with the user": [("user", "a"), ("assistant", "b"), ("user", "c")],
    "spaces": [("user", " a\n"), ("assistant", "\n b \n\n"), ("user", "c"), ("assistant", "d ")],
}


def messages(name: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in CHATS[name]]


def save(folder: Path, published: Published, template: str) -> str:
    special = {token: 256 + number for number, token in enumerate(published.special)}
    tokens = {"bos_token": published.bos_token, "chat_template": template}
    return save_tokenizer(folder, special, published.special, published.eos_token, **tokens)


@pytest.fixture
def chatml(tmp_path: Path) -> PretrainedTokenizer:
    return read_tokenizer(save(tmp_path / "chatml", CHATML, CHATML.template), None)


def section(format: str, **more: Any) -> DataSection:
    return DataSection(dataset="json", files=("a",), format=format, sequence_length=8, **more)


def made(tokenizer: Any, format: str, row: dict[str, Any], **more: Any) -> Example:
    data = section(format, **more)
    example = ExampleMaker(data, tokenizer).example(document_of(row, data))
    assert example is not None
    return example


def learnt(tokenizer: Any, example: Example) -> str:
    return tokenizer.decode([token for token, counts in zip(*example, strict=True) if counts])


# --- chats


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_marked_templates_give_what_transformers_gives(tmp_path: Path, name: str, chat: str) -> None:
    folder = save(tmp_path, PUBLISHED[name], PUBLISHED[name].marked)
    example = made(read_tokenizer(folder, None), "messages", {"messages": messages(chat)})
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages(chat), return_dict=True, return_assistant_tokens_mask=True
    )
    assert example.ids == expected["input_ids"]
    assert example.is_target == [bool(each) for each in expected["assistant_masks"]]
    assert any(example.is_target)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_templates_without_marks_give_the_same_as_with_them(tmp_path: Path, name: str, chat: str) -> None:
    published, row = PUBLISHED[name], {"messages": messages(chat)}
    plain, marked = (
        read_tokenizer(save(tmp_path / kind, published, template), None)
        for kind, template in (("plain", published.template), ("marked", published.marked))
    )
    assert made(plain, "messages", row) == made(marked, "messages", row)


def test_what_is_learnt_of_a_chat(chatml: PretrainedTokenizer) -> None:
    row = {"messages": messages("three turns")}
    assert learnt(chatml, made(chatml, "messages", row)) == "Yes, of course<|im_end|>Ja 🙂<|im_end|>"
    assert learnt(chatml, made(chatml, "messages", row, loss_on="completion")) == "Ja 🙂<|im_end|>"
    whole = made(chatml, "messages", row, loss_on="all")
    assert whole.is_target == [False] + [True] * (len(whole.ids) - 1), "nothing comes before the first token"


def test_a_template_that_changes_what_it_has_written_is_refused(chatml: PretrainedTokenizer) -> None:
    template = ChatTemplate(FORGETS_THOUGHTS, chatml)
    assert learnt(chatml, template.example(messages("one turn"), "assistant")).endswith("</think>\n\nYes<|im_end|>")
    with pytest.raises(BadRecord, match="mark them with"):
        template.example(messages("three turns"), "assistant")


def test_a_template_of_the_run_takes_the_place_of_the_tokenizers(chatml: PretrainedTokenizer) -> None:
    template = "{% for message in messages %}{{ message.role[:1] }}: {{ message.content }}\n{% endfor %}"
    example = made(chatml, "messages", {"messages": messages("one turn")}, chat_template=template, loss_on="all")
    assert chatml.decode(example.ids) == "u: Hi\na: Yes\n"
    with pytest.raises(UserError, match="cannot be used"):
        ExampleMaker(section("messages", chat_template="{% for %}"), chatml)


def test_the_day_in_a_template_is_the_same_on_all_days(chatml: PretrainedTokenizer) -> None:
    template = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}" + CHATML.template
    example = made(chatml, "messages", {"messages": messages("one turn")}, chat_template=template)
    assert chatml.decode(example.ids).startswith("26 Jul 2024<|im_start|>")
    assert learnt(chatml, example) == "Yes<|im_end|>"


def test_bytes_are_enough_for_a_chat_with_a_template() -> None:
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    row = {"messages": [{"role": "user", "content": "ä"}, {"role": "assistant", "content": "öü"}]}
    example = made(BytesTokenizer(), "messages", row, chat_template=template)
    assert learnt(BytesTokenizer(), example) == "assistant: öü\n", "the template begins no answer"
    with pytest.raises(UserError, match="needs a chat template"):
        ExampleMaker(section("messages"), BytesTokenizer())


# --- other formats


def test_a_prompt_and_its_completion(chatml: PretrainedTokenizer) -> None:
    example = made(chatml, "prompt_completion", {"prompt": "1 + 1 =", "completion": " 2"})
    assert chatml.decode(example.ids) == "1 + 1 = 2<|im_end|>"
    assert learnt(chatml, example) == " 2<|im_end|>"
    assert sum(made(chatml, "prompt_completion", {"prompt": "ab", "completion": "c"}, loss_on="all").is_target) == 3


def test_a_prompt_and_its_completion_as_messages(chatml: PretrainedTokenizer) -> None:
    turns = messages("three turns")
    example = made(chatml, "prompt_completion", {"prompt": turns[:3], "completion": turns[3:]})
    assert example == made(chatml, "messages", {"messages": turns}, loss_on="completion")


def test_alpaca_with_and_without_a_template(tmp_path: Path, chatml: PretrainedTokenizer) -> None:
    row = {"instruction": "Add", "input": "1, 2", "output": "3"}
    as_chat = [{"role": "user", "content": "Add\n\n1, 2"}, {"role": "assistant", "content": "3"}]
    assert made(chatml, "alpaca", row) == made(chatml, "messages", {"messages": as_chat})
    plain = read_tokenizer(save_tokenizer(tmp_path / "plain", {"<end>": 256}, ("<end>",)), None)
    example = made(plain, "alpaca", row)
    assert plain.decode(example.ids) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd\n\n### Input:\n1, 2\n\n"
        "### Response:\n3<end>"
    )
    assert learnt(plain, example) == "3<end>"
    assert "### Input" not in plain.decode(made(plain, "alpaca", row | {"input": ""}).ids)


def test_sharegpt(chatml: PretrainedTokenizer) -> None:
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
    row = {"system": "Be short", "conversations": turns, "source": None}
    as_chat = [{"role": "system", "content": "Be short"}, *messages("one turn")]
    assert made(chatml, "sharegpt", row) == made(chatml, "messages", {"messages": as_chat})


def test_tokens_with_labels() -> None:
    row = {"input_ids": [5, 6.0, 7, 8], "labels": [-100, -100, 7, 8]}
    assert made(BytesTokenizer(), "tokens", row) == ([5, 6, 7, 8], [False, False, True, True])
    assert made(BytesTokenizer(), "tokens", {"input_ids": [5, 6]}).is_target == [False, True]


def test_fields_of_other_names(chatml: PretrainedTokenizer) -> None:
    named = made(chatml, "messages", {"chat": messages("one turn")}, fields={"messages": "chat"})
    assert named == made(chatml, "messages", {"messages": messages("one turn")})


def test_equal_records_make_equal_documents() -> None:
    plain = {"messages": messages("one turn")}
    padded = {"messages": [{"tool_calls": None, **turn} for turn in messages("one turn")], "tools": None, "id": 7}
    assert document_of(plain, section("messages")) == document_of(padded, section("messages"))


@pytest.mark.parametrize(
    ("format", "row", "reason"),
    [
        ("messages", {"conversation": []}, "needs the field 'messages', and it has conversation: name it in data.fie"),
        ("messages", {"messages": []}, "messages is empty"),
        ("messages", {"messages": "hello"}, "a text, not a list"),
        ("messages", {"messages": [{"from": "human", "value": "x"}]}, "data.format sharegpt reads these"),
        ("messages", {"messages": [{"role": "user", "content": 7}]}, "is int, not text"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "is list, not text"),
        ("sharegpt", {"conversations": [{"role": "user", "content": "x"}]}, "data.format messages reads these"),
        ("sharegpt", {"conversations": [{"from": "dog", "value": "x"}]}, "a turn is from 'dog': known are human"),
        ("prompt_completion", {"prompt": "a", "completion": [{}]}, "completion is list, not text"),
        ("alpaca", {"instruction": "a", "output": 3.5}, "output is float, not text"),
        ("tokens", {"input_ids": [1, 2], "labels": [-100]}, "2 input_ids and 1 labels"),
        ("tokens", {"input_ids": [1, 2], "labels": [2, 3]}, "not the next one"),
        ("tokens", {"input_ids": [1.5]}, "no whole ones"),
        ("tokens", {"input_ids": [-1]}, "below zero"),
        ("tokens", {"input_ids": "12"}, "no list of token ids"),
    ],
)
def test_records_that_are_none_say_why(format: str, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecord, match=reason):
        document_of(row, section(format))


def test_what_is_cut_or_dropped_is_counted_and_told(
    chatml: PretrainedTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    data = section("prompt_completion")
    maker = ExampleMaker(data, chatml)
    caplog.set_level(logging.WARNING)

    def document(prompt: str, completion: str) -> str:
        return document_of({"prompt": prompt, "completion": completion}, data)

    cut = maker.example(document("ab", "cdefgh"), 5)
    assert cut is not None
    assert (len(cut.ids), sum(cut.is_target)) == (5, 3)
    assert maker.example(document("abcdef", "g"), 5) is None
    assert maker.example(document("ab", "c"), 5) is not None
    assert maker.example(document("", ""), 5) is None, "nothing comes before the one token that ends it"
    assert maker.counts == {"used": 2, "cut": 1, "cut_off": 1, "without_target": 1}
    assert [record.message.split()[0] for record in caplog.records] == [
        *("examples_cut", "examples_cut_off", "examples_without_target")
    ]
    assert json.loads(document("a", "b")) == {"prompt": "a", "completion": "b"}
