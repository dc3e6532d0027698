"""Counts and logs connections to the TLS listeners, throttled, and maps certificates to callers."""

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
"""Action in the audit log for a rejected connection."""

REFUSED = "HandshakeRefused"

NAMELESS = "nameless"
"""Key of all connections whose certificate has no valid identity; their requests are rejected."""

_TEXTS = {
    "CERTIFICATE_VERIFY_FAILED": "TLS handshake rejected: client certificate not trusted or expired",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "TLS handshake rejected: client sent no certificate",
}

log = structlog.get_logger("kubelend.api")


class Visitors:
    """Observes the connections of one broker."""

    def __init__(self, metrics: Metrics, journal: Journal, *, trust_proxies: bool) -> None:
        self._metrics = metrics
        self._journal = journal
        self._trust_proxies = trust_proxies
        self._repeats = Repeats()

    def who(self, certificate: Mapping[str, object]) -> Hashable:
        """Returns the key by which connections are limited; None (no limit) for a trusted proxy."""
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
        suppressed = self._repeats.left_out((limit, remote, caller))
        if suppressed is not None:
            log.warning(
                "Connection rejected",
                caller=caller,
                remote=remote,
                reason=str(limit),
                suppressed=suppressed,
            )

    def handshake_refused(self, remote: str, reason: str) -> None:
        self._metrics.refused(HANDSHAKE, REFUSED)
        self._journal.turned_away(_stranger(remote), HANDSHAKE, "", REFUSED, reason)
        suppressed = self._repeats.left_out((HANDSHAKE, remote, reason))
        if suppressed is not None:
            log.warning(
                _TEXTS.get(reason, "TLS handshake rejected"),
                remote=remote,
                reason=reason,
                suppressed=suppressed,
            )


def _stranger(remote: str) -> Actor:
    return Actor("", "unknown", remote)
