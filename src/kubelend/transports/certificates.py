"""Client of the certificate renewal route."""

from __future__ import annotations

from kubelend.transports.sessions import Session
from kubelend.wire import certificate_bodies as bodies


class CertificateClient:
    """`client.certificates`; `kubelend.apps.renewal` calls it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def renew(self, request: str) -> bodies.IssuedCertificate:
        """Renews the own certificate for the key of this signing request (PEM)."""
        body = bodies.CertificateRequest(request)
        return await self._session.call(bodies.IssuedCertificate, "renew_certificate", body=body)
