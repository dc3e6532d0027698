"""What happens at the door of a TLS listener, counted and logged; and whose a connection is.

The listener (`transports.http_server`) tells; a flood makes one line now and then.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import structlog

from kubelend.broker.journal import Journal
from kubelend.broker.metrics import HANDSHAKE, Metrics
from kubelend.core.errors import InvalidIdentity
from kubelend.core.journal import Actor
from kubelend.core.roles import Role
from kubelend.kits.repeats import Repeats
from kubelend.pki import identities
from kubelend.transports.admission import Limit

CONNECTION = "connection"
"""Stands in the log where a route would."""

REFUSED = "HandshakeRefused"

NAMELESS = "nameless"
"""All whose certificates name nobody: their calls are refused one by one."""

log = structlog.get_logger("kubelend.api")


class Visitors:
    """Watches the connections of one broker."""

    def __init__(self, metrics: Metrics, journal: Journal, *, trust_proxies: bool) -> None:
        self._metrics = metrics
        self._journal = journal
        self._trust_proxies = trust_proxies
        self._repeats = Repeats()

    def who(self, certificate: Mapping[str, object]) -> Hashable:
        """Whose connections are counted together. A proxy's are those of many, so without a limit."""
        try:
            caller = identities.caller_of(certificate)
        except InvalidIdentity:
            return NAMELESS
        if caller.role is Role.PROXY and self._trust_proxies:
            return None
        return f"{caller.role} {caller.name}"

    def opened(self) -> None:
        self._metrics.connection_opened()

    def closed(self) -> None:
        self._metrics.connection_closed()

    def turned_away(self, limit: Limit, remote: str, caller: Hashable) -> None:
        self._metrics.connection_refused(limit)
        self._journal.turned_away(_stranger(remote), CONNECTION, "", str(limit))
        left_out = self._repeats.left_out((limit, remote, caller))
        if left_out is not None:
            log.warning(
                "refused",
                route=CONNECTION,
                caller=caller,
                remote=remote,
                code=str(limit),
                left_out=left_out,
            )

    def handshake_refused(self, remote: str, reason: str) -> None:
        self._metrics.refused(HANDSHAKE, REFUSED)
        self._journal.turned_away(_stranger(remote), HANDSHAKE, "", REFUSED, reason)
        left_out = self._repeats.left_out((HANDSHAKE, remote, reason))
        if left_out is not None:
            log.warning(
                "refused",
                route=HANDSHAKE,
                remote=remote,
                code=REFUSED,
                problem=reason,
                left_out=left_out,
            )


def _stranger(remote: str) -> Actor:
    return Actor("", "unknown", remote)
