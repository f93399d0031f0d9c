import pytest

from swarm_peer.addresses import (
    announced_addresses,
    check_own_addresses,
    multiaddress,
    peer_address,
)
from swarm_peer.errors import UserError
from swarm_peer.initial_peers import check_initial_peers

ID = "12D3KooWQesj3rCQXBSXiQYgCbooCQU8No5gkgRdpAaK8ahDYgsJ"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/ip4/1.2.3.4/tcp/5", "/ip4/1.2.3.4/tcp/5"),
        ("1.2.3.4:5", "/ip4/1.2.3.4/tcp/5"),
        ("[::1]:5", "/ip6/::1/tcp/5"),
        ("gpu-1.example.org:31337", "/dns/gpu-1.example.org/tcp/31337"),
        ("localhost:0", "/dns/localhost/tcp/0"),
    ],
)
def test_host_and_port_make_a_multiaddress(text, expected):
    assert multiaddress(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("localhost", "'localhost' is no address: expected one such as /ip4/1.2.3.4/tcp/31337 or host"),
        ("", "'' is no address"),
        ("a:b", "'a:b' is no address"),
        ("::1:5", "'::1:5' is no address"),
        ("a b:5", "'a b:5' is no address"),
        ("host:99999", "there is no port 99999"),
        ("1.2.3.400:5", "1.2.3.400 is no IP address"),
        ("[1:2]:5", "1:2 is no IP address"),
    ],
)
def test_what_is_no_address(text, words):
    with pytest.raises(UserError) as caught:
        multiaddress(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"/ip4/1.2.3.4/tcp/5/p2p/{ID}", f"/ip4/1.2.3.4/tcp/5/p2p/{ID}"),
        (f"1.2.3.4:5/{ID}", f"/ip4/1.2.3.4/tcp/5/p2p/{ID}"),
        (f"[::1]:5/{ID}", f"/ip6/::1/tcp/5/p2p/{ID}"),
        (f"host.example.org:5/{ID}", f"/dns/host.example.org/tcp/5/p2p/{ID}"),
    ],
)
def test_a_peer_is_named_by_host_port_and_id(text, expected):
    assert peer_address(text) == expected


@pytest.mark.parametrize(
    "text", ["1.2.3.4:5", "/ip4/1.2.3.4/tcp/5", "1.2.3.4:5/me", "/ip4/1.2.3.4/tcp/5/p2p/me", "1.2.3.4:5/"]
)
def test_without_an_id_nobody_is_dialled(text):
    with pytest.raises(UserError) as caught:
        peer_address(text)
    said = str(caught.value)
    assert f"{text!r} does not say who listens there" in said
    assert "as in /ip4/1.2.3.4/tcp/5/p2p/12D3Koo...; copy the whole line" in said


def test_options_are_checked_as_typed():
    check_initial_peers(("@addresses.txt", f"1.2.3.4:5/{ID}"))
    with pytest.raises(UserError, match="nonsense"):
        check_initial_peers((f"1.2.3.4:5/{ID}", "nonsense"))
    with pytest.raises(UserError, match="this invite is damaged"):
        check_initial_peers(("swarm-invite-lMQgavLkz0Gna4dp",))
    check_own_addresses(("0.0.0.0:0", "/ip6/::/tcp/1"), ("host.example.org:1", "/ip4/1.2.3.4/tcp/1"))


@pytest.mark.parametrize(
    ("host_maddrs", "announce_maddrs", "words"),
    [
        (("host.example.org:5",), (), "listen on an IP address, such as 0.0.0.0, and announce the name"),
        (("0.0.0.0:5",), ("host.example.org:0",), "--announce-maddrs host.example.org:0: nobody can dial port 0"),
        (("0.0.0.0:5",), ("/ip4/1.2.3.4/tcp/0",), "--announce-maddrs /ip4/1.2.3.4/tcp/0: nobody can dial port 0"),
        (("0.0.0.0:5",), ("1.2.3",), "1.2.3' is no address"),
    ],
)
def test_what_cannot_be_listened_on_or_announced(host_maddrs, announce_maddrs, words):
    with pytest.raises(UserError) as caught:
        check_own_addresses(host_maddrs, announce_maddrs)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.2.3.4", ["/ip4/1.2.3.4/tcp/7", "/ip4/1.2.3.4/tcp/8"]),
        ("1.2.3.4:5", ["/ip4/1.2.3.4/tcp/5"]),
        ("[::1]", ["/ip6/::1/tcp/7", "/ip6/::1/tcp/8"]),
        ("vm.example.org", ["/dns/vm.example.org/tcp/7", "/dns/vm.example.org/tcp/8"]),
        ("/ip4/1.2.3.4", ["/ip4/1.2.3.4/tcp/7", "/ip4/1.2.3.4/tcp/8"]),
        ("/ip4/1.2.3.4/tcp/5", ["/ip4/1.2.3.4/tcp/5"]),
    ],
)
def test_a_host_that_is_announced_alone_takes_the_ports_that_are_listened_on(text, expected):
    assert announced_addresses((text,), (7, 8)) == expected


def test_a_host_alone_needs_a_port_to_be_known():
    check_own_addresses(("0.0.0.0",), ("1.2.3.4", "vm.example.org"))
    with pytest.raises(UserError, match=r"--announce-maddrs 1\.2\.3\.4: name a port, since --host-maddrs leaves it"):
        check_own_addresses(("0.0.0.0:0",), ("1.2.3.4",))
