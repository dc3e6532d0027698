"""A newcomer's calls to the enrolment listener. It has no certificate, and at first trusts nobody.

`authorities` asks a stranger for what is public. `join` sends the token, and only over a connection that an
authority vouches for which the newcomer chose among those by its pin. `kubelend.apps.joining` calls both.
"""

from __future__ import annotations

import ssl
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple, TypeVar

import aiohttp
import msgspec
import yarl

from kubelend.core.errors import (
    BrokerUnreachable,
    KubelendError,
    LimitExceeded,
    UnexpectedAnswer,
)
from kubelend.transports import failures, sessions, tls
from kubelend.wire import enrolment, problems
from kubelend.wire.enrolment import EnrolmentRoute
from kubelend.wire.membership_bodies import Joined, JoinRequest, JoinWaits

LONGEST = 1 << 20
"""Bytes of an answer. It comes from anybody."""

Read = TypeVar("Read")


async def authorities(url: str, timeout: timedelta = sessions.TIMEOUT) -> str:
    """Whom the broker says to trust, in PEM form. Nothing vouches for it but what it says."""
    answer = await _call(url, enrolment.AUTHORITIES, tls.newcomer_context(), timeout=timeout)
    if answer.status != HTTPStatus.OK:
        raise answer.error
    try:
        return answer.content.decode("ascii")
    except UnicodeDecodeError as error:
        raise UnexpectedAnswer(
            f"{url} does not answer as a broker does", hint="check address and port"
        ) from error


async def join(
    url: str, body: JoinRequest, trusted: str, timeout: timedelta = sessions.TIMEOUT
) -> Joined | JoinWaits:
    """Ask to be let in, of a broker that these authorities (in PEM form) vouch for."""
    context = tls.newcomer_context(trusted)
    answer = await _call(url, enrolment.JOIN, context, msgspec.json.encode(body), timeout=timeout)
    if answer.status == HTTPStatus.OK:
        return answer.read(Joined)
    if answer.status == HTTPStatus.ACCEPTED:
        return answer.read(JoinWaits)
    raise answer.error


class _Answer(NamedTuple):
    status: int
    content: bytes
    retry_after: str

    def read(self, kind: type[Read]) -> Read:
        try:
            return msgspec.json.decode(self.content, type=kind)
        except msgspec.MsgspecError as error:
            raise UnexpectedAnswer(f"the broker's answer cannot be read: {error}") from error

    @property
    def error(self) -> KubelendError:
        found = problems.from_answer(self.status, self.content)
        if isinstance(found, LimitExceeded) and self.retry_after.isdecimal():
            found.retry_after = float(self.retry_after)
        return found


async def _call(
    url: str,
    route: EnrolmentRoute,
    context: ssl.SSLContext,
    content: bytes | None = None,
    *,
    timeout: timedelta,
) -> _Answer:
    address = yarl.URL(url.rstrip("/") + route.path)
    with _Stranger(url).translated(timeout):
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=context),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=timeout.total_seconds()),
            ) as session,
            session.request(
                route.method,
                address,
                data=content,
                headers={"Content-Type": "application/json"} if content else None,
                allow_redirects=False,
            ) as response,
        ):
            text = await response.content.read(LONGEST)
            while not response.content.at_eof() and len(text) < LONGEST:
                text += await response.content.read(LONGEST - len(text))
            return _Answer(response.status, text, response.headers.get("Retry-After", ""))


class _Stranger(failures.Peer):
    """A broker of which we know the address only; we have no certificate that it could refuse."""

    def __init__(self, url: str) -> None:
        super().__init__(url, Path())

    def _distrusted(self, error: Exception) -> BrokerUnreachable:
        text = getattr(error, "verify_message", "") or str(error)
        if "mismatch" in text or "not valid for" in text:
            return BrokerUnreachable(
                f"the certificate of {self.url} is not for that name",
                hint="use a name or address of the broker's certificate (`kubelend ca issue --dns/--ip`)",
            )
        return BrokerUnreachable(
            f"the authority of that hash does not vouch for {self.url}: {text}",
            hint="somebody may be in between: nothing was sent; compare the hash with `kubelend ca show`",
        )

    def _cut_off(self, error: Exception) -> BrokerUnreachable:
        return BrokerUnreachable(
            f"the broker at {self.url} closed the connection ({type(error).__name__})",
            hint="check address and port: newcomers join at --enrol-port, 8444 if not told otherwise",
        )
