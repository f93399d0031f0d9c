"""The records of data for fine-tuning, by `data.format`: which fields they have, and what they mean.

A record becomes a document, which is JSON of the fields that its format knows. So documents of all formats are strings:
they are shuffled, told apart and held out alike. Their tokens are examples.py's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from swarm_peer.config import DataFormat, DataSection
from swarm_peer.runtime.data.records import BadRecord

# A message of a chat: role and content, and whatever else a chat template knows, such as tool_calls.
Message: TypeAlias = dict[str, Any]

# The fields that a record has to have, and those that it may have.
FIELDS: Mapping[DataFormat, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), ("tools",)),
    "prompt_completion": (("prompt", "completion"), ()),
    "alpaca": (("instruction", "output"), ("input", "system")),
    "sharegpt": (("conversations",), ("system", "tools")),
    "tokens": (("input_ids",), ("labels",)),
}
# ShareGPT's names of speakers, and those of its relatives.
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot", "bard", "bing"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}


def columns_of(section: DataSection) -> list[str]:
    """The names that a data set has for the fields of its format."""
    required, optional = FIELDS[section.format]
    return [section.fields.get(name, name) for name in (*required, *optional)]


def document_of(row: Mapping[str, Any], section: DataSection) -> str:
    """The document that a record makes: the same for equal records, however their files are written.

    Raises:
        BadRecord: it is none of the format
    """
    required, optional = FIELDS[section.format]
    found = {}
    for name in (*required, *optional):
        key = section.fields.get(name, name)
        if (value := _without_nulls(row.get(key))) is not None:
            found[name] = value
        elif name in required:
            others = ", ".join(sorted(map(str, row))[:20]) or "none"
            raise BadRecord(
                f"data.format={section.format} needs the field {key!r}, and it has {others}: name it in data.fields "
                f"({{{name}: ITS NAME}}), or choose another format"
            )
    if section.format == "tokens":
        found = {name: _integers(name, value) for name, value in found.items()}
        _check_labels(found)
    elif section.format == "prompt_completion":
        _check_pair(found)
    elif section.format == "alpaca":
        for name, value in found.items():
            _check_text(name, value)
    else:
        messages_of(found)
    return json.dumps(found, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def messages_of(record: Mapping[str, Any]) -> list[Message]:
    """The messages of a record of `messages` or `sharegpt`.

    Raises:
        BadRecord: there are none, or one of them has no role or no content
    """
    if "conversations" in record:
        system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
        return system + [_of_sharegpt(turn) for turn in _turns("conversations", record["conversations"])]
    return [_checked(turn) for turn in _turns("messages", record["messages"])]


def as_messages(name: str, value: Any) -> list[Message]:
    """A prompt or a completion that is a list of messages. Raises BadRecord if it is no such list."""
    return [_checked(turn) for turn in _turns(name, value)]


def _turns(name: str, value: Any) -> list[Any]:
    if isinstance(value, str):  # some data sets keep lists as JSON
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"{name} is a text, not a list of messages") from error
    if not isinstance(value, list) or not value:
        raise BadRecord(f"{name} is {type(value).__name__}, not a list of messages" if value else f"{name} is empty")
    return value


def _checked(turn: Any) -> Message:
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        keys = ", ".join(sorted(turn)) if isinstance(turn, dict) else type(turn).__name__
        hint = ": data.format sharegpt reads these" if isinstance(turn, dict) and "from" in turn else ""
        raise BadRecord(f"a message has no role, but {keys}{hint}")
    content = turn.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return turn | {"content": "".join(str(part.get("text", "")) for part in content)}
    if not isinstance(content, str) and not (content is None and "tool_calls" in turn):
        raise BadRecord(f"the content of a message of {turn['role']!r} is {type(content).__name__}, not text")
    return turn


def _of_sharegpt(turn: Any) -> Message:
    if not isinstance(turn, dict) or "from" not in turn or not isinstance(turn.get("value"), str):
        keys = ", ".join(sorted(turn)) if isinstance(turn, dict) else type(turn).__name__
        hint = ": data.format messages reads these" if isinstance(turn, dict) and "role" in turn else ""
        raise BadRecord(f"a turn has no from and value, but {keys}{hint}")
    if (role := _SPEAKERS.get(str(turn["from"]).lower())) is None:
        raise BadRecord(f"a turn is from {turn['from']!r}: known are {', '.join(_SPEAKERS)}")
    return {"role": role, "content": turn["value"]}


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise BadRecord(f"{name} is {type(value).__name__}, not text")


def _check_pair(record: Mapping[str, Any]) -> None:
    if isinstance(record["prompt"], str) or isinstance(record["completion"], str):
        _check_text("prompt", record["prompt"])
        _check_text("completion", record["completion"])
        return
    for name in ("prompt", "completion"):
        as_messages(name, record[name])


def _integers(name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not value:
        raise BadRecord(f"{name} is no list of token ids")
    try:
        numbers = [int(each) for each in value]
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRecord(f"{name} holds what is no number ({error})") from error
    if numbers != value:
        raise BadRecord(f"{name} holds numbers that are no whole ones")
    return numbers


def _check_labels(record: Mapping[str, list[int]]) -> None:
    ids, labels = record["input_ids"], record.get("labels")
    if min(ids) < 0:
        raise BadRecord(f"input_ids holds {min(ids)}: no token has a number below zero")
    if labels is None:
        return
    if len(labels) != len(ids):
        raise BadRecord(f"it has {len(ids)} input_ids and {len(labels)} labels: there is one label for each token")
    for number, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (token, -100):
            raise BadRecord(
                f"label {number} is {label}, and its token {token}: a label is -100 or its own token, not the next one"
            )


def _without_nulls(value: Any) -> Any:
    """A value without the fields that tables fill with nulls where a record has none."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
