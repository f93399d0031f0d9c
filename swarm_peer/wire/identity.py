"""Keys and signatures. A peer's libp2p id *is* its Ed25519 public key, so a signature needs no key exchange.

Source: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md (identity multihash of the encoded key).
"""

from __future__ import annotations

import os
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from threading import Lock

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm_peer.errors import UserError

# Protobuf encodings of libp2p's `PrivateKey{type: Ed25519, data: 64 bytes}` and `PublicKey{type: Ed25519, data: 32}`.
_PRIVATE_PREFIX = bytes([0x08, 0x01, 0x12, 0x40])
_PUBLIC_PREFIX = bytes([0x08, 0x01, 0x12, 0x20])
# Identity multihash (code 0) of the 36 bytes of the encoded public key.
_PEER_ID_PREFIX = bytes([0x00, 0x24]) + _PUBLIC_PREFIX
# Longest text that can be a peer id; anything longer is not worth decoding.
_MAX_PEER_ID_CHARS = 64
# Right signatures that are remembered, at some 300 bytes each. A record in the DHT comes from several nodes, at each
# look again; a count comes with each message.
_MAX_REMEMBERED = 4096
_remembered: dict[tuple[str, bytes, bytes], None] = {}  # author, signature and digest of what is signed; oldest first
_remembering = Lock()  # held while that changes


class Identity:
    """The private key of a peer or of a run. Signing takes 0.03 ms."""

    def __init__(self, key: Ed25519PrivateKey):
        self._key = key
        self.peer_id = id_of_key(key.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    @classmethod
    def generate(cls) -> Identity:
        """Make a new random key."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_file(cls, path: Path) -> Identity:
        """Read a key that `save` or libp2p wrote.

        Raises:
            UserError: the file is not readable, or holds no Ed25519 key
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read the identity {path}: {error.strerror}; check the path") from error
        if len(data) != 68 or not data.startswith(_PRIVATE_PREFIX):
            raise UserError(
                f"{path} is no Ed25519 identity: name a file that swarm made, or one that does not exist yet"
            )
        return cls(Ed25519PrivateKey.from_private_bytes(data[4:36]))

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the key from the file; if there is none, make a new key and save it there."""
        if path.exists():
            return cls.from_file(path)
        identity = cls.generate()
        identity.save(path)
        return identity

    def save(self, path: Path) -> None:
        """Write the key in libp2p's format, to a new file that only its owner can read."""
        is_new = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                is_new = True
                file.write(_PRIVATE_PREFIX + self._key.private_bytes_raw() + self._key.public_key().public_bytes_raw())
        except OSError as error:
            if is_new:  # a half of a key would stop every later start
                path.unlink(missing_ok=True)
            raise UserError(f"cannot write the identity {path}: {error.strerror}; name another path") from error

    def private_bytes(self) -> bytes:
        """The private key itself, 32 bytes."""
        return self._key.private_bytes_raw()

    def sign(self, data: bytes) -> bytes:
        """The signature of `data`, 64 bytes."""
        return self._key.sign(data)


@lru_cache(maxsize=4096)
def _decoded_key(peer_id: str) -> Ed25519PublicKey | None:
    try:
        data = base58.b58decode(peer_id)
        if len(data) != len(_PEER_ID_PREFIX) + 32 or not data.startswith(_PEER_ID_PREFIX):
            return None
        if id_of_key(data[len(_PEER_ID_PREFIX) :]) != peer_id:  # base58 overlooks blanks, and one key has one id
            return None
        return Ed25519PublicKey.from_public_bytes(data[len(_PEER_ID_PREFIX) :])
    except ValueError:
        return None


def _public_key(peer_id: str) -> Ed25519PublicKey | None:
    # Before it is remembered: others choose what is asked.
    return None if len(peer_id) > _MAX_PEER_ID_CHARS else _decoded_key(peer_id)


def key_of_id(peer_id: str) -> bytes:
    """The 32 bytes of the public key that a peer id is made of.

    Raises:
        ValueError: it is no peer id
    """
    key = _public_key(peer_id)
    if key is None:
        raise ValueError(f"{peer_id!r:.80} is no peer id")
    return key.public_bytes_raw()


def id_of_key(key: bytes) -> str:
    """The peer id with this public key; of other bytes than a key's, it is none (see is_peer_id)."""
    return base58.b58encode(_PEER_ID_PREFIX + key).decode()


def is_peer_id(text: str) -> bool:
    """Whether the text is a peer id with a valid Ed25519 key in it."""
    return _public_key(text) is not None


def verify(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Whether `signature` is the signature of `data` by the peer `peer_id`.

    Takes 0.1 ms, or 0.002 ms if it was right lately. Any thread may ask.
    """
    key = _public_key(peer_id)
    if key is None:
        return False
    known = (peer_id, signature, sha256(data).digest())
    if known in _remembered:
        return True
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    with _remembering:
        if len(_remembered) >= _MAX_REMEMBERED:
            del _remembered[next(iter(_remembered))]
        _remembered[known] = None
    return True
