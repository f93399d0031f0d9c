"""Which peers an invite names beside the coordinator, and when a new line is printed."""

from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.run.invites import STANDING_LABEL, InviteBook
from coordinator.run.lasting_peers import MAX_NAMED, LastingPeers, addresses_to_name, choose_lasting
from coordinator.run.way_in import WayIn
from swarm_peer.config import DataSection
from swarm_peer.policy.view import PeerState, PeerView
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.passes import Invite

# The same each time: they are in the names of tests, which all workers must find alike.
RUN, *PEERS = (Identity(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)) for number in range(7))
IDS = sorted(peer.peer_id for peer in PEERS)
OWN = [f"/ip4/203.0.114.1/tcp/31337/p2p/{RUN.peer_id}"]
PRIVATE_OWN = [f"/ip4/10.0.0.1/tcp/31337/p2p/{RUN.peer_id}"]
LOOPBACK_OWN = [f"/ip4/127.0.0.1/tcp/31337/p2p/{RUN.peer_id}"]


def at(host, number, port=31338):
    return f"/{host}/tcp/{port}/p2p/{IDS[number]}"


def peer(number, state=PeerState.SERVING, is_reachable=True):
    return PeerView(peer_id=IDS[number], stage=0, state=state, is_reachable=is_reachable)


def look(lasting, addresses, peers=None, own=OWN, now_s=0.0):
    known = {address.rpartition("/")[2]: [address] for address in addresses}
    shown = peers if peers is not None else [peer(IDS.index(peer_id)) for peer_id in known]
    lasting.look(shown, lambda peer_id: known.get(peer_id, ()), own=own, now_s=now_s)
    return list(lasting.addresses)


def public(*numbers):
    return [at(f"ip4/8.8.8.{number}", number) for number in numbers]


def test_those_that_were_there_longest_are_named_for_as_long_as_they_stay(tmp_path):
    lasting = LastingPeers(tmp_path)
    assert look(lasting, public(5), now_s=1.0) == public(5)
    assert look(lasting, public(5, 4, 3), now_s=2.0) == public(5, 3, 4)
    assert look(lasting, public(0, 1, 2, 3, 4, 5), now_s=3.0) == public(5, 3, 4), "others came first"
    assert look(lasting, public(0, 2, 3, 4), now_s=4.0) == public(3, 4, 0)
    assert look(lasting, []) == public(3, 4, 0), "they may be out of sight"
    assert list(LastingPeers(tmp_path).addresses) == public(3, 4, 0)
    (tmp_path / "coordinator").write_text("\n".join(OWN))
    assert addresses_to_name(tmp_path) == [*OWN, *public(3, 4, 0)]


def test_machines_of_their_own_come_first():
    same = {IDS[0]: at("ip4/203.0.114.1", 0), **{IDS[n]: at("ip4/8.8.8.8", n, n) for n in (1, 2)}, IDS[5]: public(5)[0]}
    since = {IDS[0]: 1.0, IDS[1]: 2.0, IDS[2]: 3.0, IDS[5]: 4.0}
    assert choose_lasting((), same, since, OWN) == (same[IDS[1]], same[IDS[5]], same[IDS[0]])


@pytest.mark.parametrize(
    ("address", "own", "is_named"),
    [
        (at("dns/example.org", 0), OWN, True),
        (at("ip6/2600::1", 0), OWN, True),
        (at("ip4/10.0.0.7", 0), OWN, False),
        (at("ip4/10.0.0.7", 0), PRIVATE_OWN, True),
        (at("ip4/8.8.8.8", 0), PRIVATE_OWN, True),
        (at("ip4/127.0.0.1", 0), LOOPBACK_OWN, True),
        # A member can announce anything.
        (at("ip4/127.0.0.1", 0), OWN, False),
        (at("ip4/127.0.0.1", 0), PRIVATE_OWN, False),
        (at("ip4/169.254.169.254", 0), PRIVATE_OWN, False),
        (at("ip6/::ffff:169.254.169.254", 0), PRIVATE_OWN, False),
        (at("ip4/0.0.0.0", 0), PRIVATE_OWN, False),
        (at("ip4/224.0.0.1", 0), OWN, False),
        (at("ip4/999.8.8.8", 0), OWN, False),
        (at("ip4/8.8.8.8", 0, 99999), OWN, False),
        (at(f"dns/{'a' * 65}", 0), OWN, False),
        (at("ip4/8.8.8.8", 0), LOOPBACK_OWN, False),
    ],
)
def test_an_address_that_newcomers_may_be_sent_to(tmp_path, address, own, is_named):
    assert look(LastingPeers(tmp_path), [address], own=own) == ([address] if is_named else [])


def test_of_two_families_an_invite_names_the_one_that_newcomers_have(tmp_path):
    six, four = at("ip6/2600::1", 0), at("ip4/8.8.8.8", 0)
    lasting = LastingPeers(tmp_path)
    lasting.look([peer(0)], lambda peer_id: (six, at("ip4/10.0.0.7", 0), four), own=OWN, now_s=0.0)
    assert lasting.addresses == (four,)


@pytest.mark.parametrize(
    ("state", "is_reachable", "own", "is_named"),
    [
        (PeerState.SERVING, None, OWN, False),
        (PeerState.SERVING, False, OWN, False),
        (PeerState.JOINING, True, OWN, False),
        (PeerState.DRAINING, True, OWN, False),
        (PeerState.SERVING, None, LOOPBACK_OWN, True),
        (PeerState.SERVING, False, LOOPBACK_OWN, False),
    ],
)
def test_a_peer_that_newcomers_may_be_sent_to(tmp_path, state, is_reachable, own, is_named):
    (address,) = [at("ip4/127.0.0.1", 0)] if own is LOOPBACK_OWN else public(0)
    named = look(LastingPeers(tmp_path), [address], [peer(0, state, is_reachable)], own)
    assert named == ([address] if is_named else [])


def make_way_in(folder, said, admission, address_file=None, base=(None, None), **data):
    pretrained, sha256 = base
    return WayIn(
        dht=SimpleNamespace(addresses=OWN),
        manifest=SimpleNamespace(
            admission=admission,
            data=DataSection(sequence_length=8, **data),
            model=SimpleNamespace(pretrained=pretrained, base_sha256=sha256),
        ),
        run_key=RUN,
        output=folder,
        address_file=address_file,
        is_announced=False,
        say=said.append,
    )


def test_what_a_full_disk_has_not_taken_is_written_at_the_next_look(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError("no space")

    said = []
    way_in = make_way_in(tmp_path, said, "open")
    lasting = LastingPeers(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr("coordinator.run.way_in.write_addresses", full)
        disk.setattr("coordinator.run.lasting_peers.write_addresses", full)
        with pytest.raises(OSError, match="no space"):
            way_in.tell(())
        assert look(lasting, public(1)) == public(1)
        num_said = len(said)
        assert num_said, "a terminal needs no disk"
    way_in.tell(())
    assert len(said) == num_said
    assert (tmp_path / "coordinator").read_text().split() == OWN
    assert look(lasting, public(1)) == list(LastingPeers(tmp_path).addresses) == public(1)


@pytest.mark.parametrize("is_folder", [True, False])
def test_the_line_of_a_run_over_local_files_names_their_folder(tmp_path, is_folder):
    books = tmp_path / "my books"
    books.mkdir()
    (books / "one.txt").write_text("text")
    local = {"dataset": str(books)} if is_folder else {"dataset": "text", "files": (str(books / "*.txt"),)}
    said = []
    way_in = make_way_in(tmp_path, said, "open", **local)
    way_in.tell(())
    assert way_in.line.endswith(f" --data-dir '{books}'")
    assert said[-1].startswith("On another machine, --data-dir is the folder there")


@pytest.mark.parametrize("is_given", [True, False])
def test_the_line_names_no_folder_for_a_tokenizer_that_members_give(tmp_path, is_given):
    base = str(tmp_path), "0" * 64 if is_given else None
    way_in = make_way_in(tmp_path, [], "open", base=base, dataset="embedded", tokenizer=str(tmp_path))
    way_in.tell(())
    assert ("--data-dir" in way_in.line) is not is_given


@pytest.mark.parametrize("admission", ["invite", "open"])
def test_page_and_files_follow_each_change_and_the_terminal_few(tmp_path, admission):
    said = []
    way_in = make_way_in(tmp_path, said, admission, tmp_path / "line")

    def tell(*numbers):
        del said[:]
        way_in.tell(public(*numbers))
        words = way_in.line.split()[4:]
        assert (tmp_path / "line").read_text().split() == words
        assert not said or way_in.line in said[0]
        if admission == "invite":
            assert (tmp_path / "invite").read_text().split() == words
            words = list(Invite.parse(words[0]).addresses)
        assert words == [*OWN, *public(*numbers)]
        return bool(said)

    assert tell()
    assert said[0].startswith("Peers join with:")
    assert tell(0)
    assert said[0].startswith("There are other peers to name now. Peers join with, as long as")
    assert "one of the peers named lives" in said[0]
    assert not tell(0, 1)
    assert tell(0, 1, 2), "the line printed last names one of three"
    assert not tell(0, 1, 3)
    assert tell(1, 3, 4), "one of three again"
    way_in._dht = SimpleNamespace(addresses=PRIVATE_OWN)
    way_in.tell(public(1, 3, 4))
    assert said[-2].startswith("The coordinator has other addresses now. Peers join with")
    assert "This machine has no public address" in said[-1]
    assert (tmp_path / "coordinator").read_text().split() == PRIVATE_OWN
    way_in._dht = SimpleNamespace(addresses=[at("ip6/2600::9", 0), *PRIVATE_OWN])
    way_in.tell(public(1, 3, 4))
    assert "public address of IPv6 alone" in said[-1]
    assert "--announce-maddrs HOST '[2600::9]'" in said[-1]


def test_a_line_whose_invite_was_revoked_is_told_anew(tmp_path):
    said = []
    way_in = make_way_in(tmp_path, said, "invite")
    way_in.tell(())
    way_in.tell(())
    before = way_in.line
    assert len(said) == 1
    InviteBook(tmp_path).revoke(RUN, STANDING_LABEL)
    way_in.tell(())
    way_in.tell(())
    assert len(said) == 2
    assert way_in.line != before
    assert way_in.line in said[-1]
    assert said[-1].startswith("The invite above holds no longer. Peers join with")


def test_an_invite_stays_short():
    own = [*OWN, f"/ip6/2600:1f18:1:2:3:4:5:6/tcp/31337/p2p/{RUN.peer_id}", *PRIVATE_OWN]
    invite = Invite.issue(RUN, [*own, *public(*range(MAX_NAMED))], label="alice", expires=2**31, at_once=8)
    assert len(invite.text()) < 650
    assert Invite.parse(invite.text()).addresses == (*own, *public(*range(MAX_NAMED)))
