"""Issues certificates without a broker, for tests of renewal.

issuer = Issuer(certificates.authority, certificates.now)
await renewal.renew(directory, issuer.issue, issuer.verify, certificates.now)
"""

from __future__ import annotations

import functools
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from certificates import Certificates
from kubelend.core.lifecycle import Role
from kubelend.pki import csr, files, identity, keys
from kubelend.pki.authority import LEAF_LIFETIME, Authority
from kubelend.pki.keys import Algorithm
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


@functools.cache
def key_of(kind: str) -> Any:
    """Of a holder. Made once, and not while tests are collected: keys of RSA take long to make."""
    if kind == "ed25519":
        return ed25519.Ed25519PrivateKey.generate()
    if kind == "p384":
        return ec.generate_private_key(ec.SECP384R1())
    return keys.generate(Algorithm(kind))


def due(certificates: Certificates, name: str = "a", left: float = 0.1) -> Path:
    """A cluster's directory whose certificate has only this part of its lifetime left."""
    life = timedelta(days=100)
    begun = certificates.now - life * (1 - left)
    return certificates.write(f"due-{name}", identity.client_profile(name), at=begun, lifetime=life)
