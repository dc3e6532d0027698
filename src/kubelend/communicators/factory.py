"""Creates a communicator by the name of its transport (`--broker-transport`), with the options of all
transports.

Another transport is a module here with a function `connect(options)`, one line in `TRANSPORTS`, and a
line in the contract test; docs/transports.md shows how. A module is imported only when it is chosen, so
that an agent loads the libraries of one transport.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable

from kubelend.agent.ports import BrokerCommunicator
from kubelend.communicators.options import CommunicatorOptions
from kubelend.core.errors import InvalidSettings

Connect = Callable[[CommunicatorOptions], Awaitable[BrokerCommunicator]]

TRANSPORTS = {
    "http": "kubelend.communicators.http",
    "kubernetes": "kubelend.communicators.kubernetes",
}


async def open_communicator(name: str, options: CommunicatorOptions) -> BrokerCommunicator | None:
    """A communicator, to be closed by the caller; None for an empty name: an agent without a broker."""
    if not name:
        return None
    if name not in TRANSPORTS:
        known = " or ".join(TRANSPORTS)
        raise InvalidSettings(
            f"--broker-transport: unknown transport {name[:40]!r}",
            hint=f"use {known}, or leave it empty",
        )
    connect: Connect = importlib.import_module(TRANSPORTS[name]).connect
    return await connect(options)
