"""Credentials of test clusters: temporary CAs, client certificates and kubeconfigs.

Kubernetes uses the common name of a certificate as the user and its organisations as the groups.
"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Iterable, Mapping
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

    def server_directory(self) -> Path:
        """Returns the directory with the server certificate, its key and the CA certificate."""
        names = (*map(x509.DNSName, _SERVER_NAMES), x509.IPAddress(_LOOPBACK))
        subject = _subject("kube-apiserver", ())
        return self._issue("server", Profile(subject, ExtendedKeyUsageOID.SERVER_AUTH, names))

    def client_credentials(self, name: str, groups: Iterable[str] = ()) -> pki_files.Credentials:
        """Returns client credentials to embed in a kubeconfig."""
        profile = Profile(_subject(name, groups), ExtendedKeyUsageOID.CLIENT_AUTH)
        return self._authority.issue(profile, _CERTIFICATE_LIFETIME, now=clock.utc_now())

    def client_directory(self, name: str, groups: Iterable[str] = ()) -> Path:
        """Returns a directory with client credentials as three files."""
        directory = self._directory / name
        if not directory.exists():
            pki_files.save_credentials(directory, self.client_credentials(name, groups))
        return directory

    def _issue(self, name: str, profile: Profile) -> Path:
        directory = self._directory / name
        issued = self._authority.issue(profile, _CERTIFICATE_LIFETIME, now=clock.utc_now())
        pki_files.save_credentials(directory, issued)
        return directory


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


def certificate_user(user: Credentials) -> dict[str, str]:
    """Returns the `user` entry of a kubeconfig with a client certificate."""
    return {
        "client-certificate-data": _base64(user.certificate.public_bytes(Encoding.PEM)),
        "client-key-data": _base64(keys.to_pem(user.key)),
    }


def token_user(token: str) -> dict[str, str]:
    """Returns the `user` entry of a kubeconfig with a bearer token."""
    return {"token": token}


def write_kubeconfig(
    path: Path, cluster: str, url: str, authority: x509.Certificate, user: dict[str, str]
) -> Path:
    """Writes the file, readable only by its owner because it contains a key."""
    trusted = _base64(authority.public_bytes(Encoding.PEM))
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": cluster, "cluster": {"server": url, "certificate-authority-data": trusted}}
        ],
        "users": [{"name": path.stem, "user": user}],
        "contexts": [{"name": cluster, "context": {"cluster": cluster, "user": path.stem}}],
        "current-context": cluster,
    }
    text = yaml.safe_dump(content, sort_keys=False).encode()
    files.write_atomic(path, text, mode=files.PRIVATE_MODE, overwrite=True)
    return path


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


ConfigDict = dict[str, Any]


class _ContextEntry(NamedTuple):
    name: str
    cluster: ConfigDict
    user: str
    credentials: ConfigDict


def write_token_kubeconfig(administrator: Path, path: Path, user: str, token: str) -> Path:
    """Writes a kubeconfig for the same cluster with another user's token."""
    name, cluster = _cluster_entry(administrator)
    return _write_contexts(path, [_ContextEntry(name, cluster, user, {"token": token})])


def merge_kubeconfigs(administrators: Mapping[str, Path], path: Path) -> Path:
    """Writes a kubeconfig with one context per cluster, named like it. The first is the current context."""
    return _write_contexts(
        path,
        [
            _ContextEntry(name, _cluster_entry(source)[1], f"{name}-admin", _user_entry(source))
            for name, source in administrators.items()
        ],
    )


def _write_contexts(path: Path, parts: Iterable[_ContextEntry]) -> Path:
    parts = tuple(parts)
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": part.name, "cluster": part.cluster} for part in parts],
        "users": [{"name": part.user, "user": part.credentials} for part in parts],
        "contexts": [
            {"name": part.name, "context": {"cluster": part.name, "user": part.user}}
            for part in parts
        ],
        "current-context": parts[0].name,
    }
    text = yaml.safe_dump(content, sort_keys=False).encode()
    files.write_atomic(path, text, mode=files.PRIVATE_MODE, overwrite=True)
    return path


def _cluster_entry(path: Path) -> tuple[str, ConfigDict]:
    [found] = _read_kubeconfig(path)["clusters"]
    return found["name"], found["cluster"]


def _user_entry(path: Path) -> ConfigDict:
    [found] = _read_kubeconfig(path)["users"]
    user: ConfigDict = found["user"]
    return user


def _read_kubeconfig(path: Path) -> ConfigDict:
    found: ConfigDict = yaml.safe_load(path.read_text("utf-8"))
    return found
