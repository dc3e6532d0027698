"""The JSON bodies with which a holder renews its certificate."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kubelend.wire import patterns
from kubelend.wire.bodies import Body

Pem = Annotated[str, Meta(max_length=64 * 1024, description="PEM text")]


class CertificateRequest(Body, frozen=True):
    """Only the key in it counts: who asks, and so for whom, says the caller's certificate."""

    request: Annotated[
        str,
        Meta(max_length=16 * 1024, description="PEM text"),
        Meta(extra_json_schema=patterns.CERTIFICATE_REQUEST),
    ]


class IssuedCertificate(Body, frozen=True):
    """What the holder shows from now on, and whom it trusts."""

    certificate: Pem
    """The holder's first, and behind it what leads to an authority."""

    authorities: Pem
