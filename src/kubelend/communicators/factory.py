"""Transports by the name that `--broker-transport` has for them.

Another one is a module here with a function `connect(options)`, one line in `TRANSPORTS`, and a line in
the contract test; docs/transports.md shows how. A module is imported only when its name is asked for, so
that an agent loads the libraries of one transport and not of all.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable

from kubelend.agent.ports import BrokerCommunicator
from kubelend.communicators.options import Options
from kubelend.core.errors import InvalidSettings

Connect = Callable[[Options], Awaitable[BrokerCommunicator]]

TRANSPORTS = {
    "http": "kubelend.communicators.http",
    "kubernetes": "kubelend.communicators.kubernetes",
}


async def open_communicator(name: str, options: Options) -> BrokerCommunicator | None:
    """A communicator, to be closed by the caller; None for no name: an agent that only measures."""
    if not name:
        return None
    if name not in TRANSPORTS:
        known = " or ".join(TRANSPORTS)
        raise InvalidSettings(
            f"the transport {name[:40]!r} is unknown", hint=f"use {known}, or none at all"
        )
    connect: Connect = importlib.import_module(TRANSPORTS[name]).connect
    return await connect(options)
