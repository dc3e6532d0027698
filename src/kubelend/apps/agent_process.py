"""The agent as a process of its own: the agent, without what its libraries would load and it never uses.

`apps.launching` starts this module. It has to be the first, for what is imported once stays.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

UNUSED: Final = ("rich",)
"""Libraries that others take if they can be had. structlog would colour tracebacks with it, for 3 MB."""

VARIABLES: Final = {
    # aiohttp reads the system's authorities once it is imported. Ours are in --broker-cert-path: 2 MB.
    "SSL_CERT_FILE": os.devnull,
    # Lists of a few callbacks, written in C++: its library takes 1 MB.
    "FROZENLIST_NO_EXTENSIONS": "1",
}
"""Set while the libraries are imported, and for none of the programs that the agent starts."""


def main() -> None:
    """Be the agent."""
    with _frugally():
        from kubelend.apps import agent
    agent.main()


@contextmanager
def _frugally() -> Iterator[None]:
    for name in UNUSED:
        sys.modules[name] = None  # type: ignore[assignment]  # which means that there is none
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update(VARIABLES)
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
