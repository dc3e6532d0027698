"""The join flow: creates a key, verifies the broker by the pinned CA hash, then sends the token and a CSR.

The key is written before the first request, so that `kubelend join` can be repeated with the same key after
a lost response or while the request waits for approval.

`renew` renews a certificate through the broker before it expires. Commands check that after each call.
The agent runs `kubelend certificate renew` (`apps.agent_launcher`); open sessions reload the files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec
from cryptography import x509

from kubelend.core.errors import (
    InvalidInput,
    InvalidSettings,
    KubelendError,
    LimitExceeded,
    Unavailable,
    UnexpectedResponse,
)
from kubelend.core.lifecycle import Role
from kubelend.kits import backoff, clock, files
from kubelend.kits.backoff import Backoff
from kubelend.kits.files import AtomicDirectory
from kubelend.pki import csr, identity, keys, tokens
from kubelend.pki import files as pki_files
from kubelend.pki import x509 as pki_x509
from kubelend.pki.files import Credentials
from kubelend.pki.identity import Caller
from kubelend.pki.keys import Algorithm, PrivateKey
from kubelend.pki.tokens import Pin
from kubelend.transports import client
from kubelend.transports.client import BrokerClient
from kubelend.wire import admin_bodies
from kubelend.wire.admin_bodies import JoinPending, JoinRequest, JoinResult

APPROVAL_BACKOFF = Backoff(retries=2**31, first=timedelta(seconds=1), longest=timedelta(seconds=5))
CONNECT_BACKOFF = Backoff(retries=3)


class JoinParameters(msgspec.Struct, frozen=True):
    """The parameters of the `kubelend join` command: enrolment URL, token, pinned CA hash and own name."""

    url: str
    token: str
    pin: Pin
    name: str
    role: Role = Role.CLUSTER

    def __repr__(self) -> str:
        return f"JoinParameters({self.url}, {self.role} {self.name})"


class JoinOutcome(NamedTuple):
    """The result of a successful join."""

    credentials: Credentials
    port: int
    """Port of the REST interface, on the same host."""


async def join_broker(
    invitation: JoinParameters,
    directory: Path,
    *,
    wait: timedelta,
    algorithm: Algorithm = Algorithm.P256,
    on_pending: Callable[[JoinPending], None] = lambda _: None,
) -> JoinOutcome:
    """Joins and writes the three files to the directory; calls `on_pending` once if approval is required."""
    tokens.parse_token(invitation.token)  # validated before a key is created
    identity.client_profile(invitation.name, invitation.role)
    key = prepare_key(directory, algorithm, invitation.pin)
    body = JoinRequest(
        token=invitation.token.strip(),
        name=invitation.name,
        request=csr.make_csr(invitation.name, invitation.role, key),
        role=invitation.role.value,
    )
    trusted = await verify_broker(invitation)
    answer = await _request_certificate(invitation.url, body, trusted, wait, on_pending)
    caller = Caller(invitation.name, invitation.role)
    credentials = csr.verify_issued(
        key, caller, answer.certificate, answer.authorities, clock.utc_now()
    )
    contents = csr.credential_files(credentials)
    # The certificate last: if it exists, the directory is complete.
    for name in (files.CA_CERTIFICATES, files.TLS_CERTIFICATE):
        files.write_atomic(directory / name, contents[name], mode=files.PUBLIC_MODE, overwrite=True)
    return JoinOutcome(credentials, answer.port)


def prepare_key(directory: Path, algorithm: Algorithm, pin: Pin) -> PrivateKey:
    """Returns the key of an earlier attempt, or creates and writes one. Never overwrites other files."""
    certificate, path = directory / files.TLS_CERTIFICATE, directory / files.TLS_KEY
    if certificate.exists():
        raise InvalidSettings(
            f"{certificate} already exists",
            hint="certificates are renewed automatically; to join again, use another directory",
        )
    _check_directory(directory, pin)
    if path.exists():
        if complaint := files.mode_problem(path):
            raise InvalidSettings(complaint, hint="delete it; a new key is created")
        return pki_files.load_key(path)
    pki_files.make_private_directory(directory)
    key = keys.generate(algorithm)
    files.write_atomic(path, keys.to_pem(key), mode=files.PRIVATE_MODE)
    return key


def _check_directory(directory: Path, pin: Pin) -> None:
    """Allows the `ca.crt` that an earlier attempt has left, if it contains the pinned CA, and no other."""
    key, path = directory / pki_files.CA_KEY, directory / files.CA_CERTIFICATES
    if key.exists() or (
        path.exists() and not tokens.pinned_certificates(pki_files.load_certificates(path), pin)
    ):
        raise InvalidSettings(
            f"{directory} contains files of another CA", hint="use another directory"
        )


async def verify_broker(invitation: JoinParameters) -> str:
    """Returns the CA certificates that match the pin in PEM form; raises if the broker presents none."""
    text = await client.fetch_authorities(invitation.url)
    try:
        shown = x509.load_pem_x509_certificates(text.encode())
    except ValueError as error:
        raise UnexpectedResponse(
            f"{invitation.url} presents no CA certificate", hint="check address and port"
        ) from error
    pinned = tokens.pinned_certificates(shown, invitation.pin)
    if not pinned:
        seen = " and ".join(dict.fromkeys(tokens.ca_pin(each) for each in shown))
        raise InvalidInput(
            f"the broker at {invitation.url} presents a CA with hash {seen},"
            f" not {invitation.pin}; the token was not sent",
            hint="request a new `kubelend join` command; the connection may be intercepted",
        )
    return pki_files.to_pem(pinned).decode()


async def _request_certificate(
    url: str,
    body: JoinRequest,
    trusted: str,
    wait: timedelta,
    on_pending: Callable[[JoinPending], None],
) -> JoinResult:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait.total_seconds()
    delays, is_pending = CONNECT_BACKOFF.delays(), False
    while True:
        error: KubelendError | None = None
        try:
            answer = await client.send_join_request(url, body, trusted)
        except KubelendError as problem:
            # Retrying does not make an untrusted certificate trusted.
            if not problem.retryable or isinstance(problem.__cause__, aiohttp.ClientSSLError):
                raise
            error = problem
        else:
            if isinstance(answer, JoinResult):
                return answer
            if not is_pending:
                on_pending(answer)
                is_pending, delays = True, APPROVAL_BACKOFF.delays()
        await _wait_or_raise(
            error, next(delays, None), deadline, is_pending=is_pending, name=body.name
        )


async def _wait_or_raise(
    error: KubelendError | None,
    delay: float | None,
    deadline: float,
    *,
    is_pending: bool,
    name: str,
) -> None:
    retry_after = error.retry_after if isinstance(error, LimitExceeded) else 0.0
    if error is not None and delay is None:
        raise error
    delay = max(delay or 0.0, retry_after)
    if asyncio.get_running_loop().time() + delay > deadline:
        if is_pending or error is None:
            raise Unavailable(
                f"the join request of {name} has not been accepted yet",
                hint=f"ask an administrator to run `kubelend approve {name}`, then run this command again",
            ) from error
        raise error
    await asyncio.sleep(delay)


RequestCertificate = Callable[[str], Awaitable[admin_bodies.IssuedCertificate]]
"""Sends a CSR to the broker over a connection authenticated with the old certificate."""

VerifyCredentials = Callable[[Path], Awaitable[object]]
"""Calls the broker with the certificate in another directory; raises if that fails."""


async def renew_with_client(
    client: BrokerClient,
    url: str,
    directory: Path,
    timeout: timedelta,
    now: datetime,
    *,
    force: bool = False,
) -> Credentials | None:
    """Renews through an open client."""

    async def verify(staged: Path) -> None:
        async with BrokerClient(url, staged, timeout=timeout, backoff=backoff.NO_RETRIES) as fresh:
            await fresh.version()

    return await renew(directory, client.certificates.renew, verify, now, force=force)


async def renew(
    directory: Path,
    request: RequestCertificate,
    verify: VerifyCredentials,
    now: datetime,
    *,
    force: bool = False,
) -> Credentials | None:
    """Renews and installs the credentials of a directory; returns the new ones.

    None if they are not due (unless `force` is set), or if another process is renewing them.
    """
    target = AtomicDirectory(directory, files.CREDENTIAL_FILES)
    if reason := target.write_problem():
        raise InvalidSettings(reason, hint="renew the files with the tool that manages them")
    with target.try_lock() as is_ours:
        if not is_ours:
            return None
        old = pki_files.load_credentials(directory)
        if not force and now < pki_x509.renewal_time(old.certificate):
            return None
        # In a thread: creating an RSA key and writing to disk take time.
        key, text = await asyncio.to_thread(csr.begin_renewal, old)
        answer = await request(text)
        holder = identity.caller_from_certificate(old.certificate)
        new = csr.verify_issued(key, holder, answer.certificate, answer.authorities, now)
        try:
            staged = await asyncio.to_thread(target.stage, csr.credential_files(new))
            # Only files that work are installed: broken ones would lock the client out.
            await verify(staged)
            await asyncio.to_thread(target.switch_to, staged)
        finally:
            target.remove_unused()
        return new
