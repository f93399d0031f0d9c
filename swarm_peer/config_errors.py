"""Mistakes in configurations and messages, in words that name the place and the remedy."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import get_args

from pydantic import BaseModel, ValidationError

from swarm_peer.settings import NAME, PEER_NAME, RUN_NAME


def dotted(place: tuple[int | str, ...]) -> str:
    """A place in a file as people write it: training.steps."""
    return ".".join(str(key) for key in place)


def describe(
    error: ValidationError,
    model: type[BaseModel] | None = None,
    name: Callable[[tuple[int | str, ...]], str] = dotted,
) -> str:
    """A pydantic error as one line: for each mistake its place, what is wrong, and the value.

    Args:
        model: that was to be made; its keys are suggested for unknown ones
        name: how to write a place
    """
    parts = []
    errors = error.errors()
    for item in errors:
        place, value, kind = item["loc"], item["input"], item["type"]
        if kind == "too_short" and value and len(errors) > 1:
            continue  # it counts without the values that have errors of their own
        message = _MESSAGES.get(kind, item["msg"]).removeprefix("Value error, ")
        if kind == "string_type" and value is None:
            message = "expected text: give some, or leave it out"
        message = _PATTERNS.get(item.get("ctx", {}).get("pattern", ""), message)
        if kind == "extra_forbidden":
            message += suggestion(str(place[-1]), _keys_beside(model, place))
        # Our own validators name the values that matter.
        elif kind not in ("missing", "value_error") and not isinstance(value, dict) and value != []:
            message += f" (got {reprlib.repr(value)})"  # bounded in depth: it may come from a peer
        parts.append(f"{name(place)}: {message}" if place else message)
    return "; ".join(parts)


def suggestion(key: str, known: Iterable[str]) -> str:
    """The known key that somebody may have meant, as ` (key?)`; empty if none is near."""
    near = get_close_matches(key, known, n=1)
    return f" ({near[0]}?)" if near else ""


_MESSAGES = {
    "extra_forbidden": "unknown key: remove it or correct its spelling",
    "missing": "missing: add it",
    "byte_size": "expected a size such as 8GiB",
    "int_from_float": "expected a whole number",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_parsing_size": "this number is too large",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "string_type": "expected text: put it into quotes",
    "tuple_type": "expected a list, such as [a, b]",
    "model_type": "expected keys with values: give some, or leave it out",
    "dict_type": "expected keys with values",
    "invalid_key": "no name of a setting: correct it (a number has a point, and no comma)",
    "too_short": "needs more values",
}

_PATTERNS = {
    NAME: "expected a name, without control characters",
    RUN_NAME: "expected a name of a-z, 0-9 and -, of 63 characters at most",
    PEER_NAME: "expected letters, digits and . _ @ + -",
}


def _keys_beside(model: type[BaseModel] | None, place: tuple[int | str, ...]) -> list[str]:
    """The keys that a model knows where it found an unknown one."""
    for key in (key for key in place[:-1] if isinstance(key, str)):
        field = model.model_fields.get(key) if model is not None else None
        annotation = field.annotation if field is not None else None
        kinds = (annotation, *get_args(annotation))
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return list(model.model_fields) if model is not None else []
