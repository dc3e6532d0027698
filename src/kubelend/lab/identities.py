"""Credentials of test clusters: temporary CAs, client certificates and kubeconfigs.

Kubernetes uses the common name of a certificate as the user and its organisations as the groups.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kubelend.kits import clock, keyfiles
from kubelend.pki import files, keys
from kubelend.pki.authority import Authority
from kubelend.pki.profiles import Profile

ADMIN_GROUP = "system:masters"
"""The group with unrestricted access, independent of RBAC."""

_CERTIFICATE_LIFETIME = timedelta(days=30)
_SERVER_NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")
_LOOPBACK = ipaddress.ip_address("127.0.0.1")


class TemporaryAuthority:
    """A temporary CA, and the directory for the certificates that it issues."""

    def __init__(self, name: str, directory: Path) -> None:
        self._directory = directory
        self._authority = Authority.create(name, _CERTIFICATE_LIFETIME, now=clock.utc_now())

    @property
    def certificate(self) -> x509.Certificate:
        """The CA certificate."""
        return self._authority.certificate

    def server_directory(self) -> Path:
        """Returns the directory with the server certificate, its key and the CA certificate."""
        names = (*map(x509.DNSName, _SERVER_NAMES), x509.IPAddress(_LOOPBACK))
        subject = _subject("kube-apiserver", ())
        return self._issue("server", Profile(subject, ExtendedKeyUsageOID.SERVER_AUTH, names))

    def client_credentials(self, name: str, groups: Iterable[str] = ()) -> files.Credentials:
        """Returns client credentials to embed in a kubeconfig."""
        profile = Profile(_subject(name, groups), ExtendedKeyUsageOID.CLIENT_AUTH)
        return self._authority.issue(profile, _CERTIFICATE_LIFETIME, now=clock.utc_now())

    def client_directory(self, name: str, groups: Iterable[str] = ()) -> Path:
        """Returns a directory with client credentials as three files."""
        directory = self._directory / name
        if not directory.exists():
            files.save_credentials(directory, self.client_credentials(name, groups))
        return directory

    def _issue(self, name: str, profile: Profile) -> Path:
        directory = self._directory / name
        issued = self._authority.issue(profile, _CERTIFICATE_LIFETIME, now=clock.utc_now())
        files.save_credentials(directory, issued)
        return directory


def make_signing_key(directory: Path) -> tuple[Path, Path]:
    """Creates the key pair with which an API server signs and verifies service account tokens."""
    key = keys.generate(keys.Algorithm.P256)
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    private, checking = directory / "accounts.key", directory / "accounts.pub"
    keyfiles.write_atomic(private, keys.to_pem(key), mode=keyfiles.PRIVATE_MODE)
    checking.write_bytes(public)
    return private, checking


def _subject(name: str, groups: Iterable[str]) -> x509.Name:
    organisations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organisations, x509.NameAttribute(NameOID.COMMON_NAME, name)])
