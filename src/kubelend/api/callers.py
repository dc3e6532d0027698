"""Who calls: the certificate that TLS verified, or the one that a trusted proxy passes on."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import cast

from aiohttp import web
from cryptography import x509

from kubelend.broker.ports import Clock
from kubelend.core.errors import InvalidIdentity
from kubelend.core.registry import Registry
from kubelend.core.roles import Role
from kubelend.kits import keyfiles
from kubelend.pki import files, forwarding, identities
from kubelend.pki.forwarding import ForwardedCertificates
from kubelend.pki.identities import Caller


class Callers:
    """Knows the broker's own names, who is revoked and, where proxies are trusted, its authorities."""

    def __init__(
        self,
        directory: Path,
        clock: Clock,
        registry: Callable[[], Registry],
        *,
        trust_proxies: bool,
        authorities: Callable[[], Sequence[x509.Certificate]] = tuple,
    ) -> None:
        """`authorities` are trusted beside those of the directory."""
        self._directory = directory
        self._clock = clock
        self._registry = registry
        self._trust_proxies = trust_proxies
        self._authorities = authorities
        self.refresh()

    def refresh(self) -> None:
        """Read the directory anew: its certificates have changed."""
        self._own_names = identities.own_names(self._directory)
        self._forwarded = None
        if self._trust_proxies:
            own = files.load_certificates(self._directory / keyfiles.AUTHORITIES)
            trusted = [*own, *self._authorities()]
            self._forwarded = ForwardedCertificates(trusted, self._own_names)

    def of(self, request: web.BaseRequest) -> Caller:
        """The caller of a request; `InvalidIdentity` if there is none."""
        transport = request.transport
        peercert = None if transport is None else transport.get_extra_info("peercert")
        if not peercert:
            raise InvalidIdentity("no verified client certificate")
        caller = identities.caller_of(
            cast("Mapping[str, object]", peercert), broker_names=self._own_names
        )
        since, until = _moment(peercert["notBefore"]), _moment(peercert["notAfter"])
        # TLS looked at the time when the connection began, which may be long ago.
        if until < self._clock():
            raise InvalidIdentity(f"the certificate of {caller.name} has ended", hint="renew it")
        caller = Caller(caller.name, caller.role, since, until)
        return self._behind(caller, request) if caller.role is Role.PROXY else caller

    def check(self, caller: Caller) -> None:
        """Refuse who is revoked. One look into a dictionary: it is done for every call."""
        if caller.since is not None:
            self._registry().check(caller.role, caller.name, caller.since)

    def _behind(self, proxy: Caller, request: web.BaseRequest) -> Caller:
        if self._forwarded is None:
            raise InvalidIdentity(
                f"{proxy.name} is a proxy, and this broker trusts none", hint="see --trust-proxies"
            )
        self.check(proxy)
        passed_on = request.headers.getall(forwarding.HEADER, [])
        if len(passed_on) != 1:
            raise InvalidIdentity(
                f"{proxy.name} passed on {len(passed_on)} certificates",
                hint=f"one {forwarding.HEADER} header for each call",
            )
        caller, since, until = self._forwarded.read(passed_on[0], self._clock())
        return Caller(caller.name, caller.role, since, until)


@lru_cache(maxsize=4096)
def _moment(text: str) -> datetime:
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(text), UTC)
