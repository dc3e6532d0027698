"""Creates a communicator by the name of its transport (`--broker-transport`), with the options of all
transports.

Another transport is a module here with a function `connect(options)`, one line in `TRANSPORTS`, and a
line in the contract test; docs/transports.md shows how. A module is imported only when it is chosen, so
that an agent loads the libraries of one transport.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import msgspec

from kubelend.agent.ports import BrokerConnection
from kubelend.core.errors import BrokerUnreachable, InvalidSettings

ReloadErrorHandler = Callable[[InvalidSettings], None]

IDLE_TIMEOUT = timedelta(seconds=40)
"""A stream without any data for this long is dead: two keepalives are missing."""


class CommunicatorOptions(msgspec.Struct, frozen=True):
    """Each transport reads what it needs, and reports what is missing."""

    url: str = ""
    """Address of the broker (`--broker-url`)."""
    certificates: Path | None = None
    """Directory with tls.crt, tls.key and ca.crt: this cluster's certificate and the trusted CA."""
    timeout: timedelta = timedelta(seconds=30)
    """Of one attempt of a call."""
    idle_timeout: timedelta = IDLE_TIMEOUT
    instance: str = ""
    """Identifies the agent process: of several with one cluster ID the broker accepts one."""
    kubeconfig: str = ""
    """Of the cluster with the broker's objects; empty for the default of the environment."""
    namespace: str = ""
    """This cluster's namespace there; empty for the kubeconfig's own."""
    on_reload_error: ReloadErrorHandler = lambda _: None
    """Called with the error when changed certificates cannot be loaded."""
    on_handshake: Callable[[str], None] = lambda _: None
    """Called with a reservation whose other side has sent a handshake, while the stream is open."""


Connect = Callable[[CommunicatorOptions], Awaitable[BrokerConnection]]

TRANSPORTS = {
    "http": "kubelend.communicators.http",
    "kubernetes": "kubelend.communicators.kubernetes",
}


async def open_communicator(name: str, options: CommunicatorOptions) -> BrokerConnection | None:
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


def closed_error() -> BrokerUnreachable:
    """For calls after `close`, or during it.

    Retryable, because the broker has rejected nothing: a stopping agent must not mark requests as
    Failed.
    """
    return BrokerUnreachable("the connection to the broker was closed on this side")
