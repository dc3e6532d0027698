"""How a newcomer joins: its key made here, the broker recognised by its pin, and only then the token sent.

The key is written before anything is asked, so that whoever loses the answer, or waits for an administrator,
asks again with the same one: `kubelend join`, said again, goes on where it was.
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
    """What an administrator gave: where to join, with what, and how to recognise the broker."""

    url: str
    token: str
    pin: Pin
    name: str
    role: Role = Role.CLUSTER

    def __repr__(self) -> str:
        return f"Invitation({self.url}, {self.role} {self.name})"


class Welcome(NamedTuple):
    """What came of it."""

    credentials: Credentials
    port: int
    """Where the broker is called from now on, on the same host."""


async def join(
    invitation: Invitation,
    directory: Path,
    *,
    wait: timedelta,
    algorithm: Algorithm = Algorithm.P256,
    waits: Callable[[JoinWaits], None] = lambda _: None,
) -> Welcome:
    """Be let in, and have the three files in the directory; `waits` is told, once, that it takes a yes."""
    tokens.parse(invitation.token)  # what is mistaken is said before a key is made
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
    """The key of an earlier try, or a new one, which is written at once. What others put there stays."""
    certificate, path = directory / keyfiles.CERTIFICATE, directory / keyfiles.KEY
    if certificate.exists():
        raise InvalidSettings(
            f"{certificate} is there already", hint="it renews itself; or choose another directory"
        )
    _check_authorities(directory, pin)
    if path.exists():
        return _earlier(path)
    files.make_directory(directory)
    key = keys.generate(algorithm)
    keyfiles.write(path, keys.to_pem(key), mode=keyfiles.PRIVATE)
    return key


def _check_authorities(directory: Path, pin: Pin) -> None:
    """An earlier try may have left a `ca.crt`, which names our authority; no other is overwritten."""
    key, path = directory / files.AUTHORITY_KEY, directory / keyfiles.AUTHORITIES
    if key.exists() or (path.exists() and not pins.pinned(files.load_certificates(path), pin)):
        raise InvalidSettings(
            f"{directory} holds the files of another authority", hint="choose another directory"
        )


def _earlier(path: Path) -> PrivateKey:
    if complaint := keyfiles.exposure(path):
        raise InvalidSettings(complaint, hint="delete it, and a new one is made")
    return files.load_key(path)


async def recognise(invitation: Invitation) -> str:
    """The authorities of the pinned key, in PEM form. Whoever shows none is not our broker."""
    text = await enrolling.authorities(invitation.url)
    try:
        shown = x509.load_pem_x509_certificates(text.encode())
    except ValueError as error:
        raise UnexpectedAnswer(
            f"{invitation.url} shows no authority", hint="check address and port"
        ) from error
    pinned = pins.pinned(shown, invitation.pin)
    if not pinned:
        seen = " and ".join(dict.fromkeys(pins.pin(each) for each in shown))
        raise InvalidInput(
            f"the broker at {invitation.url} shows an authority with hash {seen},"
            f" not {invitation.pin}; nothing was sent",
            hint="ask for a new `kubelend join` command; somebody may be in between",
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
            # A certificate that is not trusted now will not be in a second.
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
                f"{name} has not been accepted yet",
                hint=f"let an administrator run `kubelend approve {name}`, then run the same again",
            ) from error
        raise error
    await asyncio.sleep(delay)


def _save(directory: Path, credentials: Credentials) -> None:
    """The certificate last: where it is, all is."""
    contents = renewals.contents(credentials)
    for name in (keyfiles.AUTHORITIES, keyfiles.CERTIFICATE):
        keyfiles.write(directory / name, contents[name], mode=keyfiles.PUBLIC, overwrite=True)
