"""The join flow: creates a key, verifies the broker by the pinned CA hash, then sends the token and a CSR.

The key is written before the first request, so that `kubelend join` can be repeated with the same key after
a lost response or while the request waits for approval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
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
    UnexpectedAnswer,
)
from kubelend.core.roles import Role
from kubelend.kits import clock, keyfiles
from kubelend.kits.backoff import Backoff
from kubelend.pki import files, keys, pins, profiles, renewals, requests, tokens
from kubelend.pki.files import Credentials
from kubelend.pki.identities import Caller
from kubelend.pki.keys import Algorithm, PrivateKey
from kubelend.pki.pins import Pin
from kubelend.transports import enrolling
from kubelend.wire.membership_bodies import Joined, JoinRequest, JoinWaits

POLL = Backoff(retries=2**31, first=timedelta(seconds=1), longest=timedelta(seconds=5))
FIRST = Backoff(retries=3)


class Invitation(msgspec.Struct, frozen=True):
    """The parameters of the `kubelend join` command: enrolment URL, token, pinned CA hash and own name."""

    url: str
    token: str
    pin: Pin
    name: str
    role: Role = Role.CLUSTER

    def __repr__(self) -> str:
        return f"Invitation({self.url}, {self.role} {self.name})"


class Welcome(NamedTuple):
    """The result of a successful join."""

    credentials: Credentials
    port: int
    """Port of the REST interface, on the same host."""


async def join(
    invitation: Invitation,
    directory: Path,
    *,
    wait: timedelta,
    algorithm: Algorithm = Algorithm.P256,
    waits: Callable[[JoinWaits], None] = lambda _: None,
) -> Welcome:
    """Joins and writes the three files to the directory; calls `waits` once if approval is required."""
    tokens.parse(invitation.token)  # validated before a key is created
    profiles.client(invitation.name, invitation.role)
    key = prepare(directory, algorithm, invitation.pin)
    body = JoinRequest(
        token=invitation.token.strip(),
        name=invitation.name,
        request=requests.make(invitation.name, invitation.role, key),
        role=invitation.role.value,
    )
    trusted = await recognise(invitation)
    answer = await _let_in(invitation.url, body, trusted, wait, waits)
    asked = Caller(invitation.name, invitation.role)
    credentials = renewals.checked(
        key, asked, answer.certificate, answer.authorities, clock.utc_now()
    )
    _save(directory, credentials)
    return Welcome(credentials, answer.port)


def prepare(directory: Path, algorithm: Algorithm, pin: Pin) -> PrivateKey:
    """Returns the key of an earlier attempt, or creates and writes one. Never overwrites other files."""
    certificate, path = directory / keyfiles.CERTIFICATE, directory / keyfiles.KEY
    if certificate.exists():
        raise InvalidSettings(
            f"{certificate} already exists",
            hint="certificates are renewed automatically; to join again, use another directory",
        )
    _check_authorities(directory, pin)
    if path.exists():
        return _earlier(path)
    files.make_directory(directory)
    key = keys.generate(algorithm)
    keyfiles.write(path, keys.to_pem(key), mode=keyfiles.PRIVATE)
    return key


def _check_authorities(directory: Path, pin: Pin) -> None:
    """Allows the `ca.crt` that an earlier attempt has left, if it contains the pinned CA, and no other."""
    key, path = directory / files.AUTHORITY_KEY, directory / keyfiles.AUTHORITIES
    if key.exists() or (path.exists() and not pins.pinned(files.load_certificates(path), pin)):
        raise InvalidSettings(
            f"{directory} contains files of another CA", hint="use another directory"
        )


def _earlier(path: Path) -> PrivateKey:
    if complaint := keyfiles.exposure(path):
        raise InvalidSettings(complaint, hint="delete it; a new key is created")
    return files.load_key(path)


async def recognise(invitation: Invitation) -> str:
    """Returns the CA certificates that match the pin in PEM form; raises if the broker presents none."""
    text = await enrolling.authorities(invitation.url)
    try:
        shown = x509.load_pem_x509_certificates(text.encode())
    except ValueError as error:
        raise UnexpectedAnswer(
            f"{invitation.url} presents no CA certificate", hint="check address and port"
        ) from error
    pinned = pins.pinned(shown, invitation.pin)
    if not pinned:
        seen = " and ".join(dict.fromkeys(pins.pin(each) for each in shown))
        raise InvalidInput(
            f"the broker at {invitation.url} presents a CA with hash {seen},"
            f" not {invitation.pin}; the token was not sent",
            hint="request a new `kubelend join` command; the connection may be intercepted",
        )
    return files.to_pem(pinned).decode()


async def _let_in(
    url: str,
    body: JoinRequest,
    trusted: str,
    wait: timedelta,
    waits: Callable[[JoinWaits], None],
) -> Joined:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait.total_seconds()
    delays, told = FIRST.delays(), False
    while True:
        error: KubelendError | None = None
        try:
            answer = await enrolling.join(url, body, trusted)
        except KubelendError as problem:
            # Retrying does not make an untrusted certificate trusted.
            if not problem.retryable or isinstance(problem.__cause__, aiohttp.ClientSSLError):
                raise
            error = problem
        else:
            if isinstance(answer, Joined):
                return answer
            if not told:
                waits(answer)
                told, delays = True, POLL.delays()
        await _pause(error, next(delays, None), deadline, told=told, name=body.name)


async def _pause(
    error: KubelendError | None, delay: float | None, deadline: float, *, told: bool, name: str
) -> None:
    asked = error.retry_after if isinstance(error, LimitExceeded) else 0.0
    if error is not None and delay is None:
        raise error
    delay = max(delay or 0.0, asked)
    if asyncio.get_running_loop().time() + delay > deadline:
        if told or error is None:
            raise Unavailable(
                f"the join request of {name} has not been accepted yet",
                hint=f"ask an administrator to run `kubelend approve {name}`, then run this command again",
            ) from error
        raise error
    await asyncio.sleep(delay)


def _save(directory: Path, credentials: Credentials) -> None:
    """Writes the certificate last: if it exists, the directory is complete."""
    contents = renewals.contents(credentials)
    for name in (keyfiles.AUTHORITIES, keyfiles.CERTIFICATE):
        keyfiles.write(directory / name, contents[name], mode=keyfiles.PUBLIC, overwrite=True)
