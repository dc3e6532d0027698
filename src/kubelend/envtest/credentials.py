"""Credentials of test clusters: temporary CAs, client certificates and kubeconfigs.

Kubernetes uses the common name of a certificate as the user and its organisations as the groups.
"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kubelend.kits import clock, files
from kubelend.pki import files as pki_files
from kubelend.pki import keys
from kubelend.pki.authority import Authority
from kubelend.pki.files import Credentials
from kubelend.pki.identity import Profile

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

    def authority_directory(self) -> Path:
        """Returns the directory with the CA certificate and its key, for a signer of certificates."""
        directory = self._directory / "ca"
        self._authority.save(directory)
        return directory

    def server_directory(self, directory: str = "server") -> Path:
        """Returns the directory with a server certificate, its key and the CA certificate."""
        names = (*map(x509.DNSName, _SERVER_NAMES), x509.IPAddress(_LOOPBACK))
        profile = Profile(_subject("kube-apiserver", ()), ExtendedKeyUsageOID.SERVER_AUTH, names)
        return self._save(directory, self._issue(profile))

    def client_directory(self, name: str, groups: Iterable[str] = ()) -> Path:
        """Returns a directory with client credentials as three files."""
        return self._save(name, self.client_credentials(name, groups))

    def client_credentials(self, name: str, groups: Iterable[str] = ()) -> Credentials:
        """Returns client credentials to embed in a kubeconfig."""
        return self._issue(Profile(_subject(name, groups), ExtendedKeyUsageOID.CLIENT_AUTH))

    def _issue(self, profile: Profile) -> Credentials:
        return self._authority.issue(profile, _CERTIFICATE_LIFETIME, now=clock.utc_now())

    def _save(self, name: str, issued: Credentials) -> Path:
        pki_files.save_credentials(self._directory / name, issued)
        return self._directory / name


def make_signing_key(directory: Path) -> tuple[Path, Path]:
    """Creates the key pair with which an API server signs and verifies service account tokens."""
    key = keys.generate(keys.Algorithm.P256)
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    private, checking = directory / "accounts.key", directory / "accounts.pub"
    files.write_atomic(private, keys.to_pem(key), mode=files.PRIVATE_MODE)
    checking.write_bytes(public)
    return private, checking


def _subject(name: str, groups: Iterable[str]) -> x509.Name:
    organisations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organisations, x509.NameAttribute(NameOID.COMMON_NAME, name)])


Entry = dict[str, Any]


class _Context(NamedTuple):
    name: str
    """Name of the context and of its cluster."""
    cluster: Entry
    user: str
    credentials: Entry


def certificate_user(user: Credentials) -> Entry:
    """Returns the `user` entry of a kubeconfig with a client certificate."""
    return {
        "client-certificate-data": _base64(user.certificate.public_bytes(Encoding.PEM)),
        "client-key-data": _base64(keys.to_pem(user.key)),
    }


def write_kubeconfig(
    path: Path, cluster: str, url: str, authority: x509.Certificate, user: Entry
) -> Path:
    """Writes a kubeconfig with one context, named like its cluster."""
    trusted = _base64(authority.public_bytes(Encoding.PEM))
    entry = {"server": url, "certificate-authority-data": trusted}
    return _write_contexts(path, [_Context(cluster, entry, path.stem, user)])


def write_token_kubeconfig(administrator: Path, path: Path, user: str, token: str) -> Path:
    """Writes a kubeconfig for the same cluster with another user's token."""
    cluster, _ = _read_entries(administrator)
    return _write_contexts(
        path, [_Context(cluster["name"], cluster["cluster"], user, {"token": token})]
    )


def merge_kubeconfigs(administrators: Mapping[str, Path], path: Path) -> Path:
    """Writes a kubeconfig with one context per cluster, named like it. The first is the current context."""
    contexts = []
    for name, source in administrators.items():
        cluster, user = _read_entries(source)
        contexts.append(_Context(name, cluster["cluster"], f"{name}-admin", user["user"]))
    return _write_contexts(path, contexts)


def _write_contexts(path: Path, contexts: Sequence[_Context]) -> Path:
    """Writes the file, readable only by its owner because it contains keys."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": one.name, "cluster": one.cluster} for one in contexts],
        "users": [{"name": one.user, "user": one.credentials} for one in contexts],
        "contexts": [
            {"name": one.name, "context": {"cluster": one.name, "user": one.user}}
            for one in contexts
        ],
        "current-context": contexts[0].name,
    }
    text = yaml.safe_dump(content, sort_keys=False).encode()
    files.write_atomic(path, text, mode=files.PRIVATE_MODE, overwrite=True)
    return path


def _read_entries(path: Path) -> tuple[Entry, Entry]:
    """Returns the cluster and the user of a kubeconfig with one of each."""
    found = yaml.safe_load(path.read_text("utf-8"))
    [cluster], [user] = found["clusters"], found["users"]
    return cluster, user


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
