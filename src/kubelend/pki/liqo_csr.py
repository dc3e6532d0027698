"""Certificate signing request with Liqo's key of a cluster, as a program of its own.

    python -m kubelend.pki.liqo_csr CLUSTER_ID < key

The key is base64 of its PEM text, as in Liqo's Secret; so is the request on standard output. The agent runs
it as a child process, because `cryptography` would cost it 11 MB of memory.
"""

from __future__ import annotations

import base64
import sys

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

ORGANIZATION = "liqo.io"
"""The group of all clusters that Liqo authenticates."""


def signing_request(key: bytes, cluster_id: str) -> bytes:
    """Takes and returns PEM."""
    private = serialization.load_pem_private_key(key, password=None)
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, ORGANIZATION),
            x509.NameAttribute(NameOID.COMMON_NAME, cluster_id),
        ]
    )
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    if not isinstance(private, Ed25519PrivateKey):
        raise ValueError("not an Ed25519 key")
    return builder.sign(private, None).public_bytes(serialization.Encoding.PEM)


if __name__ == "__main__":
    request = signing_request(base64.b64decode(sys.stdin.buffer.read()), sys.argv[1])
    sys.stdout.write(base64.b64encode(request).decode())
