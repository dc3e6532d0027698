"""Where certificates are renewed without a broker: a request goes in, a certificate comes out.

desk = Desk(certificates)
renewer = Renewer(directory, desk.ask, desk.prove)
"""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from certificates import Certificates
from kubelend.core.lifecycle import Role
from kubelend.pki import csr, files, identity
from kubelend.pki.authority import LEAF_LIFETIME, Authority
from kubelend.wire.admin_bodies import IssuedCertificate


class Desk:
    """Issues as the broker does, to whom it is told to: a request says nothing of that."""

    def __init__(
        self, authority: Authority, now: datetime, name: str = "a", role: Role = Role.CLUSTER
    ) -> None:
        self.authority = authority
        self.now = now
        self.name = name
        self.role = role
        self.lifetime = LEAF_LIFETIME
        self.asked: list[str] = []
        self.proven: list[files.Credentials] = []

    async def ask(self, request: str) -> IssuedCertificate:
        self.asked.append(request)
        profile = identity.client_profile(self.name, self.role)
        key = csr.check_csr(request).public_key
        certificate = self.authority.sign(profile, key, self.lifetime, now=self.now)
        return IssuedCertificate(
            files.to_pem([certificate, *self.authority.chain]).decode(),
            files.to_pem(self.authority.trusted).decode(),
        )

    async def prove(self, staged: Path) -> None:
        self.proven.append(files.load_credentials(staged))


def due(certificates: Certificates, name: str = "a", left: float = 0.1) -> Path:
    """A cluster's directory whose certificate has only this part of its life left."""
    life = timedelta(days=100)
    begun = certificates.now - life * (1 - left)
    return certificates.write(f"due-{name}", identity.client_profile(name), at=begun, lifetime=life)
