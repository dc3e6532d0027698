"""Throw-away certificates: one authority per test, a directory for whomever the test is about.

certificates = Certificates(tmp_path)
server, client = certificates.server(), certificates.cluster("agent-cluster-1")
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

from cryptography import x509

from kubelend.core.lifecycle import Role
from kubelend.pki import files, identity, keys
from kubelend.pki.authority import LEAF_LIFETIME, Authority
from kubelend.pki.identity import Profile
from kubelend.pki.keys import Algorithm

DAY = timedelta(days=1)


def intermediate(root: Authority, name: str, now: datetime) -> Authority:
    """An authority that `root` has signed; it presents its own certificate as the chain."""
    key = keys.generate(Algorithm.P256)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder(
        root.certificate.subject, subject, key.public_key(), 7, now - DAY, now + DAY
    ).add_extension(x509.BasicConstraints(True, None), critical=True)
    certificate = builder.sign(root.key, keys.digest_for(root.key))
    return Authority(certificate, key, (certificate, root.certificate), (certificate,))


class Certificates:
    """Directories with the three files below `root`; the same one when asked again."""

    def __init__(self, root: Path, *, authority: str = "test-ca") -> None:
        self.root = root
        # OpenSSL judges by the machine's clock, and so must we. Older than what it issues, so that
        # even a certificate which has expired came from an authority that was valid at the time.
        self.now = datetime.now(UTC)
        self.authority = Authority.create(authority, now=self.now - 30 * DAY)

    def server(self, *names: str, directory: str = "broker") -> Path:
        """The broker's, for localhost, 127.0.0.1 and `names`."""
        return self.write(directory, identity.server_profile(names=names))

    def cluster(self, name: str) -> Path:
        return self.write(f"cluster-{name}", identity.client_profile(name))

    def admin(self, name: str) -> Path:
        return self.write(f"admin-{name}", identity.client_profile(name, Role.ADMIN))

    def viewer(self, name: str) -> Path:
        return self.write(f"viewer-{name}", identity.client_profile(name, Role.VIEWER))

    def expired(self, name: str) -> Path:
        """A cluster's, which ended yesterday."""
        profile = identity.client_profile(name)
        return self.write(f"expired-{name}", profile, at=self.now - 2 * DAY, lifetime=DAY)

    def early(self, name: str) -> Path:
        """A cluster's, which begins tomorrow."""
        return self.write(f"early-{name}", identity.client_profile(name), at=self.now + DAY)

    def stranger(self, name: str) -> Path:
        """A cluster's, signed by another authority of the same name; itself it trusts ours."""
        other = Authority.create("test-ca", now=self.now)
        credentials = other.issue(identity.client_profile(name), now=self.now)
        directory = self.root / quote(f"stranger-{name}", safe="")
        ours = files.Credentials(credentials.certificate, credentials.key, self.authority.trusted)
        files.save_credentials(directory, ours, overwrite=True)
        return directory

    def write(
        self,
        name: str,
        profile: Profile,
        *,
        at: datetime | None = None,
        lifetime: timedelta = LEAF_LIFETIME,
        algorithm: Algorithm = Algorithm.P256,
    ) -> Path:
        """Whatever else a test needs: any profile, valid from and for any time."""
        directory = self.root / quote(name, safe="")
        if not directory.exists():
            credentials = self.authority.issue(
                profile, lifetime, now=at or self.now, algorithm=algorithm
            )
            files.save_credentials(directory, credentials)
        return directory
