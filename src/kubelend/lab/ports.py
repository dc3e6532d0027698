"""Free ports for programs that cannot choose one themselves and say which."""

from __future__ import annotations

import secrets
import socket

# Below those that the kernel gives to connections: one of these could take the port of a server that
# is down for a moment.
_RANGE = range(20_000, 32_000)


def free() -> int:
    """A port of loopback that nobody listens on, and that hardly anybody will guess before us."""
    while True:
        port = secrets.choice(_RANGE)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
