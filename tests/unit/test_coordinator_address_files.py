import pytest

from coordinator.run.address_files import MAX_KNOWN, KnownPeers
from swarm_peer.errors import UserError
from swarm_peer.wire.identity import Identity

ID = Identity.generate().peer_id


def address(number):
    return f"/ip4/127.0.0.1/tcp/{number}/p2p/{ID}"


def test_the_newest_addresses_are_kept_and_never_none(tmp_path):
    peers = KnownPeers(tmp_path / "out")
    assert peers.read() == []
    peers.keep([])
    assert peers.read() == []
    peers.keep([address(1), address(2)])
    peers.keep([])
    assert sorted(peers.read()) == [address(1), address(2)]
    peers.keep([address(3)])
    assert KnownPeers(tmp_path / "out").read() == [address(3)]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["peers"]


def test_of_many_some_are_kept(tmp_path):
    many = [address(number) for number in range(3 * MAX_KNOWN)]
    KnownPeers(tmp_path).keep(many)
    kept = KnownPeers(tmp_path).read()
    assert len(set(kept)) == MAX_KNOWN
    assert set(kept) < set(many)


def test_what_is_no_address_is_passed_over(tmp_path):
    others = f"hello /unix/x/p2p/{ID} /ip4/999.1.1.1/tcp/1/p2p/{ID} {address(99999)} /ip4/1.2.3.4/tcp/1/p2p/.*"
    (tmp_path / "peers").write_text(f"\n{address(1)}\n{others}\n")
    assert KnownPeers(tmp_path).read() == [address(1)]


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "peers").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="peers"):
        KnownPeers(tmp_path).read()


def test_a_file_that_cannot_be_written_stops_nobody_and_is_tried_again(tmp_path):
    (tmp_path / "out").write_text("in the way")
    peers = KnownPeers(tmp_path / "out")
    peers.keep([address(1)])
    (tmp_path / "out").unlink()
    peers.keep([address(1)])
    assert peers.read() == [address(1)]
