"""The caller's own certificate, at the broker."""

from __future__ import annotations

from kubelend.transports.sessions import Session
from kubelend.wire import certificate_bodies as bodies


class Certificates:
    """`client.certificates`; `kubelend.apps.renewal` calls it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def renew(self, request: str) -> bodies.IssuedCertificate:
        """A successor, for the key with which this request (in PEM form) is signed."""
        body = bodies.CertificateRequest(request)
        return await self._session.ask(bodies.IssuedCertificate, "renew_certificate", body=body)
