"""The messages of the protocol (swarm_peer/protocol) as bytes, and the signatures of its statements.

The protocol has plain classes, and their type hints are the schema. A class travels as the list of its number and its
fields. A value that does not fit the hints exactly is refused, and so is a statement whose signature does not match, so
that the protocol can believe each author.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack

from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.data.ranges import SliceId, WindowRange
from swarm_peer.protocol import epochs, grants, log, messages, statements
from swarm_peer.protocol.statements import KeySigned, S, Signed
from swarm_peer.wire.identity import Identity, verify
from swarm_peer.wire.packing import unpack

# A message with some entries of a stage of a hundred members.
MAX_MESSAGE_BYTES = 1 << 20
MAX_TEXT_CHARS = 128
MAX_ITEMS_IN_FIELD = 1 << 13
# Signed statements in one message. Of those of honest seats that MAX_MESSAGE_BYTES lets pass, a log of twelve seats in
# each of two stages has some 2,700.
MAX_SIGNED = 3000
MAX_NUMBER = 1 << 62
SIGNATURE_BYTES = 64

# The number of a class is its place here, so new ones come last.
CLASSES: tuple[type, ...] = (
    messages.Message,
    statements.Seat,
    statements.EpochId,
    statements.Ballot,
    statements.Signed,
    statements.Join,
    statements.Leave,
    statements.Silent,
    statements.Stuck,
    statements.Snapshot,
    statements.Offer,
    statements.Accepted,
    statements.KeySigned,
    epochs.Place,
    epochs.Restart,
    epochs.Epoch,
    epochs.Certified,
    SliceId,
    WindowRange,
    grants.Wants,
    grants.Grant,
    log.Name,
    log.Contribution,
    log.Part,
    log.Blamed,
    log.Cut,
    log.Have,
    log.Pass,
    log.Entry,
    log.Receipt,
    log.Done,
    log.Close,
    log.Committed,
    messages.Alive,
    messages.Probe,
    messages.Missing,
    messages.Wanted,
    messages.Prepare,
    messages.Promise,
    messages.Accept,
    messages.Vote,
    messages.Fetch,
    messages.Recall,
    messages.News,
    messages.Counted,
    messages.Granted,
    messages.Head,
    messages.WantHead,
    messages.Begin,
    messages.WantRoot,
    messages.Evidence,
    messages.Status,
    messages.Entries,
    messages.Ready,
    messages.Cutting,
    messages.Said,
    messages.Blame,
    messages.Commit,
    log.HandedOver,
)
_NUMBERS = {cls: number for number, cls in enumerate(CLASSES)}

V = TypeVar("V")


class Statements:
    """Signs the statements of one process in one run, and checks those of others.

    Args:
        run: the run's id, which is its public key
        identity: that signs; the peer's, or the run's
    """

    def __init__(self, run: str, identity: Identity):
        self._run = run
        self._identity = identity

    def sign(self, body: S) -> Signed[S]:
        """The statement with its signature."""
        return Signed(body, self._identity.sign(_signed_bytes(self._run, body)))

    def encode(self, value: object) -> bytes:
        """A message, or another value of the protocol, as bytes."""
        return bytes(msgpack.packb(_plain(value)))

    def decode(self, cls: type[V], data: bytes) -> V:
        """The value that `encode` encoded.

        Raises:
            InvalidMessage: it is none of this class, or one of its signatures does not match
        """
        found, statements = self.read(cls, data)
        for signed in statements:
            self.check(signed)
        return found

    def read(self, cls: type[V], data: bytes) -> tuple[V, list[Signed[Any]]]:
        """The value that `encode` encoded, and the statements in it, whose signatures are to be checked.

        Raises:
            InvalidMessage: it is none of this class
        """
        name = f"{getattr(cls, '__name__', cls)} of the protocol"
        if len(data) > MAX_MESSAGE_BYTES:
            raise InvalidMessage(f"{name}: {len(data)} bytes; at most {MAX_MESSAGE_BYTES} go")
        statements = list[Signed[Any]]()

        def note(signed: Signed[Any]) -> None:
            if len(statements) >= MAX_SIGNED:
                raise _Unfit(f"more than {MAX_SIGNED} signed statements")
            statements.append(signed)

        try:
            found: V = _reader(cls)(unpack(data, name), note)
        except _Unfit as error:
            raise InvalidMessage(f"{name}: {error}") from error
        return found, statements

    def check(self, signed: Signed[Any]) -> None:
        """Check a statement's signature. Takes 0.1 ms, if it was not checked lately.

        Raises:
            InvalidMessage: it does not match
        """
        body = signed.body
        author = self._run if isinstance(body, KeySigned) else body.author.peer
        if not verify(author, _signed_bytes(self._run, body), signed.signature):
            raise InvalidMessage(f"the signature of a {type(body).__name__} of {author[:60]} does not match")


class _Unfit(Exception):
    """A value does not fit its type."""


# Takes note of a signed statement, whose signature is checked once all else fits.
Note = Callable[[Signed[Any]], None]
Reader = Callable[[object, Note], Any]


def _signed_bytes(run: str, body: object) -> bytes:
    return bytes(msgpack.packb(["agreement", run, _plain(body)]))


def _plain(value: Any) -> Any:
    kind: Any = type(value)
    if kind in _NUMBERS:
        return [_NUMBERS[kind], *(_plain(getattr(value, name)) for name in _names(kind))]
    if isinstance(value, frozenset):
        return sorted((_plain(each) for each in value), key=repr)
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


# --- readers, which the type hints say how to make


def _reader(hint: Any) -> Reader:
    """The function that reads a value of a type."""
    return _cached_reader(hint)


@functools.cache
def _cached_reader(hint: Any) -> Reader:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _NUMBERS or origin is Signed:
        return _one_of((hint,))
    if origin in (types.UnionType, typing.Union):
        return _optional(arguments) if type(None) in arguments else _one_of(arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _pair(arguments)
    if origin in (tuple, frozenset):
        return _many(origin, _reader(arguments[0]))
    return _PLAIN[hint]


def _one_of(hints: tuple[Any, ...]) -> Reader:
    """Reads one of several classes, by its number."""
    bodies: dict[int, list[Any]] = {}
    for hint in hints:
        if typing.get_origin(hint) is Signed:
            bodies.setdefault(_NUMBERS[Signed], []).append(typing.get_args(hint)[0])
        else:
            bodies[_NUMBERS[hint]] = []
    signed = bodies.get(_NUMBERS[Signed])
    body_reader = _reader(functools.reduce(lambda a, b: a | b, signed)) if signed else None

    def read(data: object, note: Note) -> Any:
        if not isinstance(data, tuple) or not data or type(data[0]) is not int or data[0] not in bodies:
            raise _Unfit(f"none of {', '.join(CLASSES[number].__name__ for number in bodies)}: {data!r:.80}")
        number, *values = data
        if body_reader is None or number != _NUMBERS[Signed]:
            return _read_fields(CLASSES[number], values, note)
        match values:
            case [body, bytes() as signature] if len(signature) == SIGNATURE_BYTES:
                found = Signed(body_reader(body, note), signature)
                note(found)
                return found
        raise _Unfit(f"a signed statement is a statement and {SIGNATURE_BYTES} bytes")

    return read


def _read_fields(cls: type, values: list[object], note: Note) -> Any:
    readers = _field_readers(cls)
    if len(values) != len(readers):
        raise _Unfit(f"{cls.__name__} has {len(readers)} fields, not {len(values)}")
    found = {}
    for (name, reader), value in zip(readers.items(), values, strict=True):
        try:
            found[name] = reader(value, note)
        except _Unfit as error:
            raise _Unfit(f"{cls.__name__}.{name}: {error}") from error
    return cls(**found)


@functools.cache
def _field_readers(cls: Any) -> dict[str, Reader]:
    hints = typing.get_type_hints(cls)
    return {name: _reader(hints[name]) for name in _names(cls)}


@functools.cache
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(each.name for each in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else cls._fields


def _optional(arguments: tuple[Any, ...]) -> Reader:
    reader = _reader(functools.reduce(lambda a, b: a | b, (each for each in arguments if each is not type(None))))
    return lambda data, note: None if data is None else reader(data, note)


def _pair(arguments: tuple[Any, ...]) -> Reader:
    readers = [_reader(each) for each in arguments]

    def read(data: object, note: Note) -> Any:
        if not isinstance(data, tuple) or len(data) != len(readers):
            raise _Unfit(f"{len(readers)} values: {data!r:.80}")
        return tuple(reader(each, note) for reader, each in zip(readers, data, strict=True))

    return read


def _many(kind: type, reader: Reader) -> Reader:
    def read(data: object, note: Note) -> Any:
        if not isinstance(data, tuple) or len(data) > MAX_ITEMS_IN_FIELD:
            raise _Unfit(f"no list of at most {MAX_ITEMS_IN_FIELD}: {data!r:.80}")
        found = kind(reader(each, note) for each in data)
        if len(found) != len(data):
            raise _Unfit("one twice in a set")
        return found

    return read


def _text(data: object, _: Note) -> str:
    if not isinstance(data, str) or len(data) > MAX_TEXT_CHARS:
        raise _Unfit(f"no text of at most {MAX_TEXT_CHARS} characters: {data!r:.80}")
    return data


def _number(data: object, _: Note) -> int:
    if type(data) is not int or not -1 <= data <= MAX_NUMBER:
        raise _Unfit(f"no number from -1 to {MAX_NUMBER}: {data!r:.80}")
    return data


def _truth(data: object, _: Note) -> bool:
    if not isinstance(data, bool):
        raise _Unfit(f"neither true nor false: {data!r:.80}")
    return data


def _real(data: object, _: Note) -> float:
    if not isinstance(data, float) or not math.isfinite(data):
        raise _Unfit(f"no finite number with a point: {data!r:.80}")
    return data


_PLAIN: dict[Any, Reader] = {str: _text, int: _number, float: _real, bool: _truth}
