"""Counts and logs connections to the TLS listeners, throttled, and maps certificates to callers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import structlog

from kubelend.broker.journal import AuditLog
from kubelend.broker.metrics import HANDSHAKE_ROUTE, Metrics
from kubelend.core.errors import InvalidIdentity
from kubelend.core.journal import Actor
from kubelend.core.roles import Role
from kubelend.kits.repeats import LogThrottle
from kubelend.pki import identities
from kubelend.transports.admission import ConnectionLimit

CONNECTION_ACTION = "connection"
"""Action in the audit log for a rejected connection."""

HANDSHAKE_REJECTED_CODE = "HandshakeRefused"

NO_IDENTITY_KEY = "nameless"
"""Key of all connections whose certificate has no valid identity; their requests are rejected."""

_HANDSHAKE_TEXTS = {
    "CERTIFICATE_VERIFY_FAILED": "TLS handshake rejected: client certificate not trusted or expired",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "TLS handshake rejected: client sent no certificate",
}

log = structlog.get_logger("kubelend.api")


class ConnectionMetrics:
    """Observes the connections of one broker."""

    def __init__(self, metrics: Metrics, journal: AuditLog, *, trust_proxies: bool) -> None:
        self._metrics = metrics
        self._audit_log = journal
        self._trust_proxies = trust_proxies
        self._throttle = LogThrottle()

    def caller_key(self, certificate: Mapping[str, object]) -> Hashable:
        """Returns the key by which connections are limited; None (no limit) for a trusted proxy."""
        try:
            caller = identities.caller_from_peercert(certificate)
        except InvalidIdentity:
            return NO_IDENTITY_KEY
        if caller.role is Role.PROXY and self._trust_proxies:
            return None
        return f"{caller.role} {caller.name}"

    def opened(self) -> None:
        self._metrics.connection_opened()

    def closed(self) -> None:
        self._metrics.connection_closed()

    def connection_rejected(self, limit: ConnectionLimit, remote: str, caller: Hashable) -> None:
        self._metrics.connection_rejected(limit)
        self._audit_log.append_rejected_connection(
            _unauthenticated_actor(remote), CONNECTION_ACTION, "", str(limit)
        )
        suppressed = self._throttle.suppressed((limit, remote, caller))
        if suppressed is not None:
            log.warning(
                "Connection rejected",
                caller=caller,
                remote=remote,
                reason=str(limit),
                suppressed=suppressed,
            )

    def handshake_rejected(self, remote: str, reason: str) -> None:
        self._metrics.count_rejected_request(HANDSHAKE_ROUTE, HANDSHAKE_REJECTED_CODE)
        self._audit_log.append_rejected_connection(
            _unauthenticated_actor(remote), HANDSHAKE_ROUTE, "", HANDSHAKE_REJECTED_CODE, reason
        )
        suppressed = self._throttle.suppressed((HANDSHAKE_ROUTE, remote, reason))
        if suppressed is not None:
            log.warning(
                _HANDSHAKE_TEXTS.get(reason, "TLS handshake rejected"),
                remote=remote,
                reason=reason,
                suppressed=suppressed,
            )


def _unauthenticated_actor(remote: str) -> Actor:
    return Actor("", "unknown", remote)
