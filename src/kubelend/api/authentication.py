"""Authentication: the client certificate of the TLS connection, or the one that a trusted proxy forwards.

TLS verified the certificate when the connection was established, which may be long ago. Therefore every
request checks revocation, expiry, and whether the issuing CA is still trusted. `ConnectionMetrics` counts
connections and audits rejected handshakes.
"""

from __future__ import annotations

import ssl
from collections.abc import Hashable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import cast
from weakref import WeakKeyDictionary

import structlog
from aiohttp import web
from cryptography import x509

from kubelend.broker.audit_log import AuditLog
from kubelend.broker.metrics import HANDSHAKE_ROUTE, BrokerMetrics
from kubelend.broker.writer import LedgerWriter
from kubelend.core.audit_log import Actor
from kubelend.core.errors import InvalidIdentity, Unavailable
from kubelend.core.lifecycle import Role
from kubelend.kits.ratelimit import LogThrottle
from kubelend.pki import files as pki_files
from kubelend.pki import identity as pki_identity
from kubelend.pki import x509 as pki_x509
from kubelend.pki.identity import Caller, ForwardedCertificateVerifier
from kubelend.transports.listener import ConnectionLimit, ConnectionObserver
from kubelend.transports.tls import ReloadingServerContext, ServerContext


class Authenticator:
    """Authenticates requests by certificate; knows revocations and the trusted CAs."""

    def __init__(
        self,
        directory: Path,
        writer: LedgerWriter,
        trust: ReloadingServerContext,
        *,
        trust_proxies: bool,
    ) -> None:
        self._directory = directory
        self._writer = writer
        self._trust = trust
        self._trust_proxies = trust_proxies
        self._own_names: frozenset[str] = frozenset()
        self._authorities: list[x509.Certificate] = []
        self._forwarded: ForwardedCertificateVerifier | None = None
        self._identities: WeakKeyDictionary[ssl.SSLObject, Caller] = WeakKeyDictionary()
        self.refresh()

    def refresh(self) -> None:
        """Reloads the certificates of the directory."""
        self._authorities = [
            x509.load_der_x509_certificate(each) for each in self._trust.authorities
        ]
        self._identities.clear()
        try:
            self._own_names = frozenset(pki_files.common_names(self._directory))
        finally:  # a removed CA must lose its trust in any case
            if self._trust_proxies:
                self._forwarded = ForwardedCertificateVerifier(self._authorities, self._own_names)

    def connection_identity(self, request: web.BaseRequest) -> Caller:
        """Returns the identity of the connection; raises `InvalidIdentity` or `Revoked`."""
        transport = request.transport
        connection = None if transport is None else transport.get_extra_info("ssl_object")
        if connection is None:
            raise InvalidIdentity("no verified client certificate")
        caller = self._identities.get(connection) or self._read_certificate(connection, request)
        if caller.until is not None and caller.until < self._writer.clock():
            raise InvalidIdentity(
                f"the certificate of {caller.name} has expired", hint="renew the certificate"
            )
        return caller

    def caller(self, identity: Caller, request: web.BaseRequest) -> Caller:
        """Returns the caller of a request: the connection's identity, or the one that a proxy forwards."""
        is_proxy = identity.role is Role.PROXY
        return self._forwarded_caller(identity, request) if is_proxy else identity

    def check(self, caller: Caller) -> None:
        """Rejects a revoked caller or proxy; raises `NotReady` while revocations are not loaded.

        One dictionary lookup, because it is done for every request.
        """
        registry = self._writer.members
        for each in (caller, caller.via):
            if each is not None and each.since is not None:
                registry.check_not_revoked(each.role, each.name, each.since)

    def recheck(self, request: web.BaseRequest) -> None:
        """Authenticates again: for long requests and streams."""
        self.check(self.caller(self.connection_identity(request), request))

    def _read_certificate(self, connection: ssl.SSLObject, request: web.BaseRequest) -> Caller:
        """Parses the certificate, once per connection and again when certificates were reloaded."""
        peercert = connection.getpeercert()
        if not peercert:
            raise InvalidIdentity("no verified client certificate")
        if cast("ServerContext", connection.context).generation != self._trust.generation:
            self._recheck_issuer(connection, request)
        caller = pki_identity.caller_from_peercert(peercert, broker_names=self._own_names)
        since, until = (_parse_cert_time(str(peercert[key])) for key in ("notBefore", "notAfter"))
        self._identities[connection] = caller = Caller(caller.name, caller.role, since, until)
        return caller

    def _recheck_issuer(self, connection: ssl.SSLObject, request: web.BaseRequest) -> None:
        """Closes a connection that was verified before a CA was removed, unless a trusted one signed its
        certificate. Only a new handshake can verify intermediates, which are not stored.
        """
        shown = x509.load_der_x509_certificate(connection.getpeercert(binary_form=True) or b"")
        if not any(pki_x509.is_issued_by(shown, each) for each in self._authorities):
            request.protocol.close()  # after the response
            raise Unavailable("the trusted CAs have changed", hint="reconnect")

    def _forwarded_caller(self, proxy: Caller, request: web.BaseRequest) -> Caller:
        if self._forwarded is None:
            raise InvalidIdentity(
                f"{proxy.name} is a proxy, and this broker trusts no proxies",
                hint="see --trust-proxies",
            )
        if self._writer.unready is None:
            self.check(proxy)
        forwarded = request.headers.getall(pki_identity.CLIENT_CERT_HEADER, [])
        if len(forwarded) != 1:
            raise InvalidIdentity(
                f"{proxy.name} forwarded {len(forwarded)} certificates",
                hint=f"send one {pki_identity.CLIENT_CERT_HEADER} header with each request",
            )
        return self._forwarded.verify(forwarded[0], proxy, self._writer.clock())


@lru_cache(maxsize=4096)
def _parse_cert_time(text: str) -> datetime:
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(text), UTC)


# The first call loads a module, for which a broker that has run out of files cannot open another one.
_parse_cert_time("Jan  1 00:00:00 2026 GMT")


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


class ConnectionMetrics(ConnectionObserver):
    """Observes the connections of one broker."""

    def __init__(self, metrics: BrokerMetrics, audit_log: AuditLog, *, trust_proxies: bool) -> None:
        self._metrics = metrics
        self._audit_log = audit_log
        self._trust_proxies = trust_proxies
        self._throttle = LogThrottle()

    def caller_key(self, certificate: Mapping[str, object]) -> Hashable:
        """Returns the key by which connections are limited; None (no limit) for a trusted proxy."""
        try:
            caller = pki_identity.caller_from_peercert(certificate)
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
            Actor("", "unknown", remote), CONNECTION_ACTION, "", str(limit)
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
            Actor("", "unknown", remote), HANDSHAKE_ROUTE, "", HANDSHAKE_REJECTED_CODE, reason
        )
        suppressed = self._throttle.suppressed((HANDSHAKE_ROUTE, remote, reason))
        if suppressed is not None:
            log.warning(
                _HANDSHAKE_TEXTS.get(reason, "TLS handshake rejected"),
                remote=remote,
                reason=reason,
                suppressed=suppressed,
            )
