"""Who calls: the certificate that TLS verified, or the one that a trusted proxy passes on."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import cast

from aiohttp import web

from kubelend.broker.ports import Clock
from kubelend.core.errors import InvalidIdentity
from kubelend.core.roles import Role
from kubelend.pki import forwarding, identities
from kubelend.pki.forwarding import ForwardedCertificates
from kubelend.pki.identities import Caller

_ends = lru_cache(maxsize=4096)(ssl.cert_time_to_seconds)


class Callers:
    """Knows the broker's own names and, where proxies are trusted, its authorities."""

    def __init__(self, directory: Path, clock: Clock, *, trust_proxies: bool) -> None:
        self._directory = directory
        self._clock = clock
        self._trust_proxies = trust_proxies
        self.refresh()

    def refresh(self) -> None:
        """Read the directory anew: its certificates have changed."""
        self._own_names = identities.own_names(self._directory)
        self._forwarded = (
            ForwardedCertificates(self._directory, self._own_names) if self._trust_proxies else None
        )

    def of(self, request: web.BaseRequest) -> Caller:
        """The caller of a request; `InvalidIdentity` if there is none."""
        transport = request.transport
        peercert = None if transport is None else transport.get_extra_info("peercert")
        if not peercert:
            raise InvalidIdentity("no verified client certificate")
        caller = identities.caller_of(
            cast("Mapping[str, object]", peercert), broker_names=self._own_names
        )
        # TLS looked at the time when the connection began, which may be long ago.
        if _ends(peercert["notAfter"]) < self._clock().timestamp():
            raise InvalidIdentity(f"the certificate of {caller.name} has ended", hint="renew it")
        return self._behind(caller, request) if caller.role is Role.PROXY else caller

    def _behind(self, proxy: Caller, request: web.BaseRequest) -> Caller:
        if self._forwarded is None:
            raise InvalidIdentity(
                f"{proxy.name} is a proxy, and this broker trusts none", hint="see --trust-proxies"
            )
        passed_on = request.headers.getall(forwarding.HEADER, [])
        if len(passed_on) != 1:
            raise InvalidIdentity(
                f"{proxy.name} passed on {len(passed_on)} certificates",
                hint=f"one {forwarding.HEADER} header for each call",
            )
        return self._forwarded.caller(passed_on[0], self._clock())
