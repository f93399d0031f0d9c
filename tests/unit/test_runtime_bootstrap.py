"""How peers are told whom to join: by addresses, invites and files of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from swarm_peer.errors import UserError
from swarm_peer.runtime.network.bootstrap import read_entrance
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.passes import Invite

RUN_KEY = Identity.generate()
ADDRESS = f"/ip4/127.0.0.1/tcp/31337/p2p/{RUN_KEY.peer_id}"
INVITE = Invite.issue(RUN_KEY, (ADDRESS,), label="alice", expires=int(time.time()) + 3600, at_once=2).text()


@pytest.mark.parametrize(
    "text", [f"swarm-peer --stage auto --initial-peers {INVITE}\n", INVITE, f"{INVITE}\n{ADDRESS}\n"]
)
def test_a_file_may_hold_an_invite_or_the_line_that_the_coordinator_prints(tmp_path: Path, text: str) -> None:
    (tmp_path / "invite").write_text(text)
    entrance = read_entrance([f"@{tmp_path / 'invite'}"])
    assert entrance.addresses == (ADDRESS,)
    assert entrance.invite is not None
    assert entrance.invite.run_id == RUN_KEY.peer_id


def test_a_file_that_is_no_text_is_one_line(tmp_path):
    (tmp_path / "peers").write_bytes(b"\x80\xff\xfe\x00")
    with pytest.raises(UserError):
        read_entrance([f"@{tmp_path / 'peers'}"])


@pytest.mark.parametrize("text", ["", "swarm-peer --stage auto --initial-peers\n"])
def test_a_file_without_any_address_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "peers").write_text(text)
    with pytest.raises(UserError, match="peers is empty: it should hold the coordinator's addresses"):
        read_entrance([f"@{tmp_path / 'peers'}"])


def test_a_file_may_hold_the_line_of_an_open_run(tmp_path: Path) -> None:
    (tmp_path / "line").write_text(f"swarm-peer --stage auto --initial-peers {ADDRESS}\n")
    entrance = read_entrance([f"@{tmp_path / 'line'}"])
    assert (entrance.addresses, entrance.invite) == ((ADDRESS,), None)


def test_invites_to_several_runs_are_an_error() -> None:
    other = Invite.issue(Identity.generate(), (ADDRESS,), label="a", expires=int(time.time()) + 60, at_once=1).text()
    with pytest.raises(UserError, match="these invites are to several runs"):
        read_entrance([INVITE, other])
