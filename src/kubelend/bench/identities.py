"""Issues a certificate for every cluster of a fleet, all with the same key.

A key for each would take minutes and would not change the results.
"""

from __future__ import annotations

import base64
import ssl
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from kubelend.apps.trials import TemporaryDeployment
from kubelend.core.models import ClusterId
from kubelend.kits import clock
from kubelend.pki import files, keys, profiles
from kubelend.pki.files import Credentials
from kubelend.transports import tls

_CERTIFICATE_LIFETIME = timedelta(days=1)


class FleetCertificates:
    """The certificates of clusters, in the forms that a client or a proxy presents."""

    def __init__(self, trial: TemporaryDeployment, names: Sequence[ClusterId]) -> None:
        self._names = names
        self._authority = trial.authority
        self._directory = trial.directory / "fleet"
        self._key = keys.generate(keys.Algorithm.P256)
        self._certificates: list[x509.Certificate] = []

    def issue(self) -> Iterator[int]:
        """Issues the certificates and yields the number issued so far, for progress output."""
        now, public = clock.utc_now(), self._key.public_key()
        for number, name in enumerate(self._names, 1):
            signed = self._authority.sign(
                profiles.client_profile(name), public, _CERTIFICATE_LIFETIME, now=now
            )
            self._certificates.append(signed)
            yield number

    def client_cert_header(self, number: int) -> bytes:
        """Returns the Client-Cert header value (RFC 9440) of a cluster."""
        return b":%s:" % base64.b64encode(self._certificates[number].public_bytes(Encoding.DER))

    def context(self, number: int) -> ssl.SSLContext:
        """Returns the TLS context of a cluster."""
        return tls.client_context(self.directory(number))

    def directory(self, number: int) -> Path:
        """Returns the directory with the certificate of a cluster."""
        directory = self._directory / self._names[number]
        if not directory.exists():
            shown = Credentials(
                self._certificates[number], self._key, (self._authority.certificate,)
            )
            files.save_credentials(directory, shown)
        return directory
