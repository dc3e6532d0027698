"""Certificates for a whole fleet at once, each cluster its own, all with one key.

The name is what makes an identity; a key for each would take minutes and change nothing that is measured.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from kubelend.apps.trials import Trial
from kubelend.core.models import ClusterId
from kubelend.kits import clock, keyfiles
from kubelend.pki import keys, profiles
from kubelend.transports import tls

_LIFETIME = timedelta(days=1)


class Identities:
    """The certificates of these clusters, below a trial's directory."""

    def __init__(self, trial: Trial, names: Sequence[ClusterId]) -> None:
        self._names = names
        self._authority = trial.authority
        self._directory = trial.directory / "fleet"
        self._key = keys.generate(keys.Algorithm.P256)
        self._directory.mkdir()
        self._shared(keyfiles.KEY).write_bytes(keys.to_pem(self._key))
        root = trial.authority.certificate.public_bytes(Encoding.PEM)
        self._shared(keyfiles.AUTHORITIES).write_bytes(root)

    def issue(self) -> Iterator[int]:
        """Make them one after the other; gives the number of those made, for whoever waits."""
        now = clock.utc_now()
        for number, name in enumerate(self._names, 1):
            profile = profiles.client(name)
            certificate = self._authority.sign(profile, self._key.public_key(), _LIFETIME, now=now)
            directory = self._directory / name
            directory.mkdir()
            (directory / keyfiles.CERTIFICATE).write_bytes(certificate.public_bytes(Encoding.PEM))
            for shared in (keyfiles.KEY, keyfiles.AUTHORITIES):
                os.link(self._shared(shared), directory / shared)
            yield number

    def context(self, number: int) -> ssl.SSLContext:
        """With which the cluster of this number connects."""
        return tls.client_context(self._directory / self._names[number])

    def _shared(self, name: str) -> Path:
        return self._directory / name
