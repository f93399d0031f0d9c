"""Where the page is shown, as people write it. Imports nothing heavy: `--help` reads this."""

from __future__ import annotations

from swarm_peer.errors import UserError

LOOPBACK = "127.0.0.1"


def parse_place(text: str) -> tuple[str, int]:
    """Host and port of `--dashboard [HOST:]PORT`.

    Raises:
        UserError: it is none
    """
    host, colon, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535 or (colon and not host):
        raise UserError(f"--dashboard {text}: expected PORT or HOST:PORT, such as 8470 or 127.0.0.1:8470")
    return host.strip("[]") or LOOPBACK, int(port)
