"""Who calls: the certificate that TLS verified, or the one that a trusted proxy passes on.

TLS verified it when the connection began, which may be long ago: what can have changed since is asked
here for every call. Who was revoked, when it ends, and whether its authority is still trusted.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import cast
from weakref import WeakKeyDictionary

from aiohttp import web
from cryptography import x509

from kubelend.broker.writer import Writer
from kubelend.core.errors import InvalidIdentity, Revoked, Unavailable
from kubelend.core.roles import Role
from kubelend.pki import chains, forwarding, identities
from kubelend.pki.forwarding import ForwardedCertificates
from kubelend.pki.identities import Caller
from kubelend.transports.tls import ReloadingServerContext, ServerContext


class Callers:
    """Knows the broker's own names, who is revoked, and which authorities are trusted and were once."""

    def __init__(
        self,
        directory: Path,
        writer: Writer,
        trust: ReloadingServerContext,
        *,
        trust_proxies: bool,
    ) -> None:
        self._directory = directory
        self._writer = writer
        self._trust = trust
        self._trust_proxies = trust_proxies
        self._own_names: frozenset[str] = frozenset()
        self._former: set[x509.Certificate] = set()
        self._authorities: set[x509.Certificate] = set()
        self._judged: dict[bytes, bool] = {}
        """Certificates of connections from before an authority was taken away."""
        self._forwarded: ForwardedCertificates | None = None
        self._holders: WeakKeyDictionary[ssl.SSLObject, Caller] = WeakKeyDictionary()
        self.refresh()

    def refresh(self) -> None:
        """Read the directory anew: its certificates have changed."""
        known = {x509.load_der_x509_certificate(each) for each in self._trust.authorities}
        self._former = (self._former | self._authorities) - known
        self._authorities = known
        self._judged = {}
        self._read_forwarded()
        # Last, for it may fail: who is trusted no more is so in any case.
        self._own_names = identities.own_names(self._directory)
        self._holders.clear()
        self._read_forwarded()

    def holder(self, request: web.BaseRequest) -> Caller:
        """Whose connection it is; `InvalidIdentity` if nobody's, `Revoked` if it is not believed."""
        transport = request.transport
        connection = None if transport is None else transport.get_extra_info("ssl_object")
        if connection is None:
            raise InvalidIdentity("no verified client certificate")
        caller = self._holders.get(connection) or self._read(connection)
        if caller.until is not None and caller.until < self._writer.clock():
            raise InvalidIdentity(f"the certificate of {caller.name} has ended", hint="renew it")
        generation = cast("ServerContext", connection.context).generation
        if generation != self._trust.generation:
            self._judge(caller, connection, request)
        return caller

    def of(self, holder: Caller, request: web.BaseRequest) -> Caller:
        """The caller of a request on the connection of `holder`: itself, unless that is a proxy."""
        return self._behind(holder, request) if holder.role is Role.PROXY else holder

    def check(self, caller: Caller) -> None:
        """Refuse who is revoked, or came through a proxy that is; `NotReady` if that is not known now.

        One look into a dictionary: it is done for every call.
        """
        registry = self._writer.registry
        for each in (caller, caller.via):
            if each is not None and each.since is not None:
                registry.check(each.role, each.name, each.since)

    def check_again(self, request: web.BaseRequest) -> None:
        """The same with all else that may have changed since the call began."""
        self.check(self.of(self.holder(request), request))

    def _read(self, connection: ssl.SSLObject) -> Caller:
        """Once for each connection: a certificate does not change in the middle of one."""
        peercert = connection.getpeercert()
        if not peercert:
            raise InvalidIdentity("no verified client certificate")
        caller = identities.caller_of(peercert, broker_names=self._own_names)
        since, until = _moment(str(peercert["notBefore"])), _moment(str(peercert["notAfter"]))
        self._holders[connection] = caller = Caller(caller.name, caller.role, since, until)
        return caller

    def _judge(self, caller: Caller, connection: ssl.SSLObject, request: web.BaseRequest) -> None:
        """Refuse who would not be let in any more, and let go of the connection after that."""
        der = connection.getpeercert(binary_form=True) or b""
        if der not in self._judged:
            self._judged[der] = _is_signed(der, self._authorities)
        if self._judged[der]:
            return
        request.protocol.close()  # once this is answered
        if _is_signed(der, self._former):
            raise Revoked(
                f"the authority of {caller.role} {caller.name}'s certificate is not trusted any more",
                hint="join anew with a token from an administrator",
            )
        # There is an authority in between, which was shown in the handshake and is not kept.
        raise Unavailable("the trusted authorities have changed", hint="connect again")

    def _read_forwarded(self) -> None:
        if self._trust_proxies:
            self._forwarded = ForwardedCertificates(list(self._authorities), self._own_names)

    def _behind(self, proxy: Caller, request: web.BaseRequest) -> Caller:
        if self._forwarded is None:
            raise InvalidIdentity(
                f"{proxy.name} is a proxy, and this broker trusts none", hint="see --trust-proxies"
            )
        if self._writer.unready is None:
            self.check(proxy)
        passed_on = request.headers.getall(forwarding.HEADER, [])
        if len(passed_on) != 1:
            raise InvalidIdentity(
                f"{proxy.name} passed on {len(passed_on)} certificates",
                hint=f"one {forwarding.HEADER} header for each call",
            )
        caller, since, until = self._forwarded.read(passed_on[0], self._writer.clock())
        return Caller(caller.name, caller.role, since, until, proxy)


def _is_signed(der: bytes, authorities: Iterable[x509.Certificate]) -> bool:
    certificate = x509.load_der_x509_certificate(der)
    return any(chains.is_issued_by(certificate, each) for each in authorities)


@lru_cache(maxsize=4096)
def _moment(text: str) -> datetime:
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(text), UTC)
