"""Writes kubeconfigs with embedded credentials of one user for one cluster."""

from __future__ import annotations

import base64
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from kubelend.kits import keyfiles
from kubelend.pki import keys
from kubelend.pki.files import Credentials


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
    keyfiles.write_atomic(path, text, mode=keyfiles.PRIVATE_MODE, overwrite=True)
    return path


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
