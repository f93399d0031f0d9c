"""How the tube sees what the real classes do: by wrapping a few of their methods."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any
from unittest.mock import patch


def before(owner: type, name: str, look: Callable[..., None]) -> Any:
    """Have `look` see each call of a method, with its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        look(self, *args, **options)
        return original(self, *args, **options)

    return patch.object(owner, name, wrapped)


def after(owner: type, name: str, look: Callable[..., None]) -> Any:
    """Have `look` see each call of a method when it is over, with its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        result = original(self, *args, **options)
        look(self, *args, **options)
        return result

    return patch.object(owner, name, wrapped)


def around(owner: type, name: str, call: Callable[..., Any]) -> Any:
    """Have `call` run in place of a method, coroutine function or not, and give it the method."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        return call(functools.partial(original, self), self, *args, **options)

    @functools.wraps(original)
    async def async_wrapped(self: Any, *args: Any, **options: Any) -> Any:
        return await call(functools.partial(original, self), self, *args, **options)

    return patch.object(owner, name, async_wrapped if inspect.iscoroutinefunction(original) else wrapped)
