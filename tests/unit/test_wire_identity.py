import errno
import io
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError

import base58
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm_peer.errors import UserError
from swarm_peer.wire import identity
from swarm_peer.wire.identity import Identity, is_peer_id, verify


def make_identity(seed=1):
    return Identity(Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32))


def test_a_key_survives_its_file(tmp_path):
    path = tmp_path / "keys" / "peer.key"
    identity = Identity.generate()
    identity.save(path)
    again = Identity.from_file(path)
    assert again.peer_id == identity.peer_id
    assert again.sign(b"text") == identity.sign(b"text")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_is_made_once(tmp_path):
    path = tmp_path / "peer.key"
    assert Identity.load_or_create(path).peer_id == Identity.load_or_create(path).peer_id


def test_a_key_is_never_overwritten(tmp_path):
    path = tmp_path / "peer.key"
    make_identity(1).save(path)
    with pytest.raises(UserError, match="name another path"):
        make_identity(2).save(path)
    assert Identity.from_file(path).peer_id == make_identity(1).peer_id


def test_hivemind_and_libp2p_take_the_key_for_the_same_peer(tmp_path):
    from hivemind.p2p import PeerID
    from hivemind.proto import crypto_pb2

    path = tmp_path / "peer.key"
    identity = make_identity()
    identity.save(path)
    stored = crypto_pb2.PrivateKey.FromString(path.read_bytes())
    assert stored.key_type == crypto_pb2.KeyType.Ed25519
    public = make_identity()._key.public_key().public_bytes_raw()
    assert stored.data[32:] == public
    # libp2p hashes public keys of more than 42 bytes; those of Ed25519 have 36 and are the id themselves.
    encoded = crypto_pb2.PublicKey(key_type=crypto_pb2.KeyType.Ed25519, data=public).SerializeToString()
    assert PeerID(bytes([0x00, len(encoded)]) + encoded).to_base58() == identity.peer_id
    assert PeerID.from_base58(identity.peer_id).to_base58() == identity.peer_id
    assert identity.peer_id.startswith("12D3KooW"), "as all Ed25519 peer ids of libp2p do"


def rsa_key():
    from hivemind.proto import crypto_pb2

    der = rsa.generate_private_key(65537, 1024).private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    return crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.RSA, data=der).SerializeToString()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08\x01\x12\x40",
        bytes(range(7, 75)),
        b"\x08\x01\x12\x40" + bytes(63),
        b"\x08\x01\x12\x40" + bytes(65),
        b"-----BEGIN OPENSSH PRIVATE KEY-----",
        pytest.param(None, id="rsa"),
    ],
)
def test_what_is_no_ed25519_key_is_refused(tmp_path, content):
    path = tmp_path / "peer.key"
    path.write_bytes(rsa_key() if content is None else content)
    with pytest.raises(UserError, match=r"peer\.key is no Ed25519 identity: name a file"):
        Identity.from_file(path)
    assert path.exists(), "it may be somebody's key"


def test_a_missing_file_and_a_folder_that_cannot_be_written_are_explained(tmp_path):
    with pytest.raises(UserError, match="No such file or directory; check the path"):
        Identity.from_file(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the identity .*; name another path"):
        Identity.generate().save(tmp_path / "file" / "key")


def test_of_a_key_that_could_not_be_written_nothing_stays(tmp_path, monkeypatch):
    class FullDisk(io.FileIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(identity.os, "fdopen", FullDisk)
        with pytest.raises(UserError, match="No space left on device"):
            Identity.load_or_create(tmp_path / "key")
    kept = Identity.load_or_create(tmp_path / "key")
    assert Identity.from_file(tmp_path / "key").peer_id == kept.peer_id


def test_the_private_key_is_not_shown():
    identity = make_identity()
    assert repr(identity) == f"Identity({identity.peer_id})"


def test_signatures_are_bound_to_text_and_author():
    author, other = make_identity(1), make_identity(2)
    signature = author.sign(b"text")
    assert verify(author.peer_id, b"text", signature)
    assert not verify(author.peer_id, b"texd", signature)
    assert not verify(other.peer_id, b"text", signature)
    assert not verify(author.peer_id, b"text", signature[:-1])
    assert not verify(author.peer_id, b"text", b"")
    assert not verify(author.peer_id, b"text", bytes([signature[0] ^ 1]) + signature[1:])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "me",
        "0OIl",
        "ü",
        "12D3KooW",
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",  # the hash of an RSA key
        base58.b58encode(b"\0\x24\x08\x02\x12\x20" + bytes(32)).decode(),  # the same with another type of key
        "1" * 65,
        "1" * 10**6,
    ],
)
def test_what_is_no_peer_id(text):
    assert not is_peer_id(text)
    assert not verify(text, b"text", bytes(64))


def test_a_peer_id_with_one_character_changed_is_another_peer():
    peer_id = make_identity().peer_id
    assert is_peer_id(peer_id)
    assert not verify(peer_id[:-1] + ("a" if peer_id[-1] != "a" else "b"), b"text", make_identity().sign(b"text"))
    assert not is_peer_id(peer_id[:-1])
    assert not is_peer_id(peer_id + "1")


def test_only_the_right_signatures_seen_last_are_remembered(monkeypatch):
    monkeypatch.setattr(identity, "_remembered", {})
    monkeypatch.setattr(identity, "_MAX_REMEMBERED", 2)
    author = make_identity()
    texts = [b"first", b"second", b"third"]
    for text in texts:
        assert verify(author.peer_id, text, author.sign(text))
        assert not verify(author.peer_id, text + b".", author.sign(text))
    assert [known[1] for known in identity._remembered] == [author.sign(text) for text in texts[1:]]
    assert all(verify(author.peer_id, text, author.sign(text)) for text in texts), "forgotten ones are checked again"


def test_two_threads_that_forget_the_oldest_signature_at_once_do_not_fail(monkeypatch):
    both = Barrier(2)

    class Remembered(dict):
        def __iter__(self):
            oldest = list(super().__iter__())
            with suppress(BrokenBarrierError):
                both.wait(timeout=0.2)
            return iter(oldest)

    monkeypatch.setattr(identity, "_remembered", Remembered())
    monkeypatch.setattr(identity, "_MAX_REMEMBERED", 1)
    author = make_identity()
    assert verify(author.peer_id, b"oldest", author.sign(b"oldest"))

    def check(text):
        return verify(author.peer_id, text, author.sign(text))

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(check, [b"second", b"third"]))


def test_long_texts_that_are_no_peer_ids_are_not_remembered():
    before = identity._decoded_key.cache_info().currsize
    assert not is_peer_id("1" * 100_000)
    assert not verify("1" * 100_000, b"data", bytes(64))
    assert identity._decoded_key.cache_info().currsize == before


@pytest.mark.parametrize("blanks", [" ", "\n", "\t\t"])
def test_a_key_has_one_id(blanks):
    """Otherwise one peer could announce itself as many, and go on under another name when it is revoked."""
    me = make_identity()
    assert not is_peer_id(me.peer_id + blanks)
    assert not verify(me.peer_id + blanks, b"text", me.sign(b"text"))
