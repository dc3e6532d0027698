"""A client's directory whose certificate a test exchanges while the client lives.

holder = Holder(tmp_path, certificates)
async with holder.client(broker.url) as client:
    holder.renew()
"""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path

import tls_peers
from certificates import Certificates
from kubelend.core.errors import InvalidSettings
from kubelend.kits import backoff
from kubelend.pki import files, identity
from kubelend.pki.files import Credentials
from kubelend.transports.client import BrokerClient

SOON = timedelta(milliseconds=5)
LATER = timedelta(hours=1)


class Holder:
    """A cluster, `a` unless told otherwise."""

    def __init__(self, root: Path, certificates: Certificates, name: str = "a") -> None:
        self.certificates = certificates
        self.name = name
        self.directory = root / f"live-{name}"
        self.reports: list[InvalidSettings] = []
        shutil.copytree(certificates.cluster(name), self.directory)

    @property
    def serial(self) -> int:
        return tls_peers.serial_in(self.directory)

    def issue(self) -> Credentials:
        """A new certificate of the same authority, nowhere yet."""
        profile = identity.client_profile(self.name)
        return self.certificates.authority.issue(profile, now=self.certificates.now)

    def renew(self) -> None:
        """As `kubelend ca issue --overwrite` does it: one file after the other."""
        files.save_credentials(self.directory, self.issue(), overwrite=True)

    def put(self, source: Path, *names: str) -> None:
        """In place, as somebody writes who does not rename."""
        for name in names:
            (self.directory / name).write_bytes((source / name).read_bytes())

    def client(self, url: str, check_every: timedelta = SOON) -> BrokerClient:
        return BrokerClient(
            url,
            self.directory,
            backoff=backoff.NO_RETRIES,
            check_every=check_every,
            report=self.reports.append,
        )
