from coordinator.addresses import MAX_KNOWN, KnownPeers


def test_the_newest_addresses_are_kept_and_never_none(tmp_path):
    peers = KnownPeers(tmp_path / "out")
    assert peers.read() == []
    peers.keep([])
    assert peers.read() == []
    peers.keep(["a", "b"])
    peers.keep([])
    assert sorted(peers.read()) == ["a", "b"]
    peers.keep(["c"])
    assert KnownPeers(tmp_path / "out").read() == ["c"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["peers"]


def test_of_many_some_are_kept(tmp_path):
    many = [f"address-{number}" for number in range(3 * MAX_KNOWN)]
    KnownPeers(tmp_path).keep(many)
    kept = KnownPeers(tmp_path).read()
    assert len(set(kept)) == MAX_KNOWN
    assert set(kept) < set(many)
