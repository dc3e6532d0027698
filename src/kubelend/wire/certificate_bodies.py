"""JSON bodies of certificate renewal."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kubelend.wire import patterns
from kubelend.wire.bodies import Body

Pem = Annotated[str, Meta(max_length=64 * 1024, description="PEM text")]


class CertificateRequest(Body, frozen=True):
    """Certificate signing request. Only its key is used: name and role come from the caller's certificate."""

    request: Annotated[
        str,
        Meta(max_length=16 * 1024, description="PEM text"),
        Meta(extra_json_schema=patterns.CERTIFICATE_REQUEST),
    ]


class IssuedCertificate(Body, frozen=True):
    """A new certificate and the trusted authorities."""

    certificate: Pem
    """Certificate chain: the holder's certificate first, then the intermediates up to an authority."""

    authorities: Pem
