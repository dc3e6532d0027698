"""What a proxy passes on of a client's certificate (RFC 9440)."""

from __future__ import annotations

import base64
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

HEADER = "Client-Cert"


def passed_on(directory: Path, file: str = "tls.crt") -> dict[str, str]:
    """The header for the first certificate of a file."""
    certificate = x509.load_pem_x509_certificate((directory / file).read_bytes())
    der = certificate.public_bytes(Encoding.DER)
    return {HEADER: f":{base64.b64encode(der).decode()}:"}
