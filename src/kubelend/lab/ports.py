"""Selects free ports for programs that cannot do so themselves."""

from __future__ import annotations

import secrets
import socket

# Below the ephemeral ports: an outgoing connection could otherwise take the port of a server that is
# being restarted.
_PORT_RANGE = range(20_000, 32_000)


def free_port() -> int:
    """Returns a random free port on the loopback interface."""
    while True:
        port = secrets.choice(_PORT_RANGE)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
