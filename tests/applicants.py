"""Applicants to a broker that issues certificates: a key each, a token, and calls as raw as HTTP.

    async with applicants.enrolling(certificates, tmp_path) as broker:
        answer = await Applicant("berlin").ask(broker, await applicants.token(broker))
        directory = await applicants.joined(broker, tmp_path / "paris", "paris")

Our own client is left out on purpose, as in `callers`: it could share a mistake with the server.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from cryptography import x509

import brokers
from callers import Answer, Caller
from certificates import Certificates
from clocks import Clock
from kubelend.core.lifecycle import Role
from kubelend.pki import csr, keys
from kubelend.pki import files as pki_files
from kubelend.pki.keys import Algorithm
from kubelend.wire import routes
from waiting import PATIENCE


@asynccontextmanager
async def enrolling(
    certificates: Certificates, root: Path, **settings: Any
) -> AsyncIterator[brokers.Running]:
    """A broker with the authority of `certificates`; its clock begins with the machine's."""
    issues: dict[str, Any] = {"ca_path": str(authority(certificates, root)), "enrol_port": 0}
    values = {"clock": Clock(datetime.now(UTC))} | issues | settings
    async with brokers.running(certificates, **values) as broker:
        yield broker


def authority(certificates: Certificates, root: Path) -> Path:
    """The directory of the authority that signed all others."""
    directory = root / "authority"
    if not directory.exists():
        certificates.authority.save(directory)
    return directory


async def token(broker: brokers.Running, **fields: Any) -> str:
    """The text of a new token."""
    answer = await broker.admin().post("tokens", fields)
    assert answer.status == 201, answer
    return str(answer.json["token"])


class Applicant:
    """Somebody with a key and no certificate."""

    def __init__(
        self, name: str, role: Role = Role.CLUSTER, algorithm: Algorithm = Algorithm.P256
    ) -> None:
        self.name = name
        self.role = role
        self.key = keys.generate(algorithm)
        self.request = csr.make_csr(name, role, self.key)

    async def ask(
        self, broker: brokers.Running, token: Any, *, source: str = "127.0.0.1", **fields: Any
    ) -> Answer:
        """Ask to be let in, from this address; `fields` replace those of the body."""
        body = {"token": token, "name": self.name, "request": self.request} | fields
        content = json.dumps(body).encode()
        return await call(broker, "POST", "/enrol/v1/join", content, source=source)

    async def join(self, broker: brokers.Running, token: str, directory: Path) -> Path:
        """Be let in at once; gives the directory, which holds the three files."""
        return self.save(await self.ask(broker, token), directory)

    def save(self, answer: Answer, directory: Path) -> Path:
        assert answer.status == 200, answer
        directory.mkdir()
        (directory / "tls.key").write_bytes(keys.to_pem(self.key))
        (directory / "tls.key").chmod(0o600)
        (directory / "tls.crt").write_text(answer.json["certificate"])
        (directory / "ca.crt").write_text(answer.json["authorities"])
        return directory


async def joined(
    broker: brokers.Running, directory: Path, name: str = "berlin", role: Role = Role.CLUSTER
) -> Path:
    """The directory of somebody who joined with a token bound to its name."""
    bound = await token(broker, name=name, role=role.value)
    return await Applicant(name, role).join(broker, bound, directory)


async def renewed(caller: Caller, directory: Path, role: Role = Role.CLUSTER) -> Path:
    """The directory of a certificate that a caller got for a new key."""
    applicant = Applicant(caller.name, role)
    answer = await caller.post("certificates", {"request": applicant.request})
    return applicant.save(answer, directory)


def certificate_in(directory: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((directory / "tls.crt").read_bytes())


async def call(
    broker: brokers.Running,
    method: str,
    path: str,
    content: bytes | None = None,
    *,
    source: str = "127.0.0.1",
) -> Answer:
    """A call to the enrolment listener, from this address; it shows no certificate."""
    trusted = pki_files.to_pem(broker.certificates.authority.trusted).decode()
    context = ssl.create_default_context(cadata=trusted)
    connector = aiohttp.TCPConnector(ssl=context, local_addr=(source, 0))
    url = f"https://localhost:{broker.process.ports['enrol']}{path}"
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        session.request(method, url, data=content) as response,
    ):
        answer = Answer(response.status, response.headers, await response.read())
    if answer.status >= 400:
        assert answer.problem.code in {kind.code for kind in routes.ENROLMENT_ERRORS}, answer
    return answer
