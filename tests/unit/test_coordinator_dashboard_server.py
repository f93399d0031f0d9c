"""The server of the page, to which anybody may connect who reaches its port."""

import asyncio
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.server import ServerState

from coordinator.dashboard import server
from coordinator.dashboard.server import ASK_S, TAKE_S, Connection, bind


@pytest.fixture
def connect(monkeypatch):
    """Makes a connection, of which there may be two; returns it, its transport, and what is to be done later."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    config, state = uvicorn.Config(Mock(), log_config=None, factory=False, interface="asgi3"), ServerState()
    config.load()

    def make():
        loop, transport = Mock(asyncio.AbstractEventLoop), Mock(asyncio.Transport)
        loop.create_task = Mock(side_effect=lambda coroutine, **_: coroutine.close() or Mock())  # not run
        transport.get_extra_info.return_value = None
        made = Connection(config, state, {}, loop)
        made.connection_made(transport)
        return made, transport, loop.call_later.call_args.args

    return make


def test_nobody_can_use_up_the_files_that_the_program_may_open(connect):
    three = [connect() for _ in range(3)]
    assert [transport.abort.called for _, transport, _ in three] == [False, False, True]
    for made, *_ in three[1:]:
        made.connection_lost(None)
    assert not connect()[1].abort.called


@pytest.mark.parametrize(
    ("sent", "is_closed"), [(b"", True), (b"GET / HT", True), (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", False)]
)
def test_a_connection_that_asks_for_nothing_is_closed(connect, sent, is_closed):
    made, transport, (delay_s, close) = connect()
    if sent:
        made.data_received(sent)
    transport.abort.assert_not_called()
    assert delay_s == ASK_S
    close()
    assert transport.abort.called == is_closed


def test_the_system_closes_connections_whose_other_side_takes_nothing():
    with bind("127.0.0.1", 0) as listening:
        option = getattr(server.socket, "TCP_USER_TIMEOUT", None)
        assert option is None or listening.getsockopt(server.socket.IPPROTO_TCP, option) == TAKE_S * 1000
