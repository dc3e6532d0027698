"""Issues certificates without a broker, for tests of renewal.

issuer = Issuer(certificates.authority, certificates.now)
await renewal.renew(directory, issuer.issue, issuer.verify, certificates.now)
"""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from certificates import Certificates
from kubelend.core.lifecycle import Role
from kubelend.pki import csr, files, identity
from kubelend.pki.authority import LEAF_LIFETIME, Authority
from kubelend.wire.admin_bodies import IssuedCertificate


class Issuer:
    """Issues as the broker does, for `name` and `role`, which a CSR does not contain."""

    def __init__(
        self, authority: Authority, now: datetime, name: str = "a", role: Role = Role.CLUSTER
    ) -> None:
        self.authority = authority
        self.now = now
        self.name = name
        self.role = role
        self.lifetime = LEAF_LIFETIME
        self.requests: list[str] = []
        self.verified: list[files.Credentials] = []

    async def issue(self, request: str) -> IssuedCertificate:
        self.requests.append(request)
        profile = identity.client_profile(self.name, self.role)
        key = csr.check_csr(request).public_key
        certificate = self.authority.sign(profile, key, self.lifetime, now=self.now)
        return IssuedCertificate(
            files.to_pem([certificate, *self.authority.chain]).decode(),
            files.to_pem(self.authority.trusted).decode(),
        )

    async def verify(self, staged: Path) -> None:
        self.verified.append(files.load_credentials(staged))


def due(certificates: Certificates, name: str = "a", left: float = 0.1) -> Path:
    """A cluster's directory whose certificate has only this part of its lifetime left."""
    life = timedelta(days=100)
    begun = certificates.now - life * (1 - left)
    return certificates.write(f"due-{name}", identity.client_profile(name), at=begun, lifetime=life)
