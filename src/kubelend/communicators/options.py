"""Options of all transports, filled in from the agent's settings."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec

from kubelend.core.errors import InvalidSettings

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
