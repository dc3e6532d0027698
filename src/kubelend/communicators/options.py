"""What a transport may need to know to reach the broker: one record for all, filled in by the settings."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec

from kubelend.core.errors import InvalidSettings

Report = Callable[[InvalidSettings], None]

SILENCE = timedelta(seconds=40)
"""A stream that says nothing for so long is dead: two signs of life have failed to come."""


class Options(msgspec.Struct, frozen=True):
    """Each transport reads what it needs, and says what is missing."""

    url: str = ""
    """Address of the broker."""
    certificates: Path | None = None
    """Directory with tls.crt, tls.key and ca.crt: who this cluster is, and which broker is trusted."""
    timeout: timedelta = timedelta(seconds=30)
    """How long one try of a call may take."""
    silence: timedelta = SILENCE
    instance: str = ""
    """Which agent of this cluster it is, for a broker that lets only one speak at a time."""
    kubeconfig: str = ""
    """Of the cluster that the broker's objects are in; if empty what the environment says."""
    namespace: str = ""
    """This cluster's mailbox there; if empty the kubeconfig's own."""
    report: Report = lambda _: None
    """Told why changed certificates could not be taken up."""
