"""Entry point of the agent process, which keeps optional imports of its libraries out of memory.

`apps.agent_launcher` executes this module. It must be the first import: what is loaded stays loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

UNUSED_LIBRARIES: Final = ("rich",)
"""Optional dependencies of libraries. structlog would use rich to colour tracebacks, for 3 MB."""

IMPORT_VARIABLES: Final = {
    # aiohttp loads the system's CA certificates on import (2 MB). Ours are in --broker-cert-path.
    "SSL_CERT_FILE": os.devnull,
    # The C++ extension of frozenlist takes 1 MB, for lists of a few callbacks.
    "FROZENLIST_NO_EXTENSIONS": "1",
}
"""Set only during the imports, so that child processes of the agent do not inherit them."""

TLS_BUFFER_BYTES: Final = 16 * 1024
"""Read buffer of a TLS connection. asyncio takes 256 KiB for each, and an agent that peers has some forty."""


def main() -> None:
    """Runs the agent."""
    with _without_unused_imports():
        from asyncio import sslproto

        from kubelend.apps import agent

        sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES
    agent.main()


@contextmanager
def _without_unused_imports() -> Iterator[None]:
    for name in UNUSED_LIBRARIES:
        sys.modules[name] = None  # type: ignore[assignment]  # makes the import fail
    before = {name: os.environ.get(name) for name in IMPORT_VARIABLES}
    os.environ.update(IMPORT_VARIABLES)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text


if __name__ == "__main__":
    main()
