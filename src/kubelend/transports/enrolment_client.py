"""Client of the enrolment listener, for processes without a certificate.

`fetch_authorities` fetches the CA certificates over an unverified connection; the caller checks them against
a pin. `send_join_request` sends the token over a connection that is verified with those CAs.
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

from kubelend.core.errors import BrokerUnreachable, KubelendError, LimitExceeded, UnexpectedAnswer
from kubelend.transports import errors, tls
from kubelend.transports import session as transports_session
from kubelend.wire import problems, routes
from kubelend.wire.admin_bodies import JoinPending, JoinRequest, JoinResult
from kubelend.wire.routes import EnrolmentRoute

MAX_RESPONSE_BYTES = 1 << 20
"""Maximum bytes of a response, which comes from an unverified server."""

Read = TypeVar("Read")


async def fetch_authorities(
    url: str, timeout: timedelta = transports_session.REQUEST_TIMEOUT
) -> str:
    """Fetches the CA certificates (PEM), unverified."""
    answer = await _send_request(
        url, routes.AUTHORITIES_ROUTE, tls.enrolment_context(), timeout=timeout
    )
    if answer.status != HTTPStatus.OK:
        raise answer.error
    try:
        return answer.content.decode("ascii")
    except UnicodeDecodeError as error:
        raise UnexpectedAnswer(
            f"{url}: not a response of a broker", hint="check address and port"
        ) from error


async def send_join_request(
    url: str,
    body: JoinRequest,
    trusted: str,
    timeout: timedelta = transports_session.REQUEST_TIMEOUT,
) -> JoinResult | JoinPending:
    """Sends a join request to a broker whose certificate these CAs (PEM) have signed."""
    context = tls.enrolment_context(trusted)
    answer = await _send_request(
        url, routes.JOIN_ROUTE, context, msgspec.json.encode(body), timeout=timeout
    )
    if answer.status == HTTPStatus.OK:
        return answer.decode(JoinResult)
    if answer.status == HTTPStatus.ACCEPTED:
        return answer.decode(JoinPending)
    raise answer.error


class _EnrolmentResponse(NamedTuple):
    status: int
    content: bytes
    retry_after: str

    def decode(self, kind: type[Read]) -> Read:
        try:
            return msgspec.json.decode(self.content, type=kind)
        except msgspec.MsgspecError as error:
            raise UnexpectedAnswer(f"cannot decode the response of the broker: {error}") from error

    @property
    def error(self) -> KubelendError:
        found = problems.error_from_response(self.status, self.content)
        if isinstance(found, LimitExceeded) and self.retry_after.isdecimal():
            found.retry_after = float(self.retry_after)
        return found


async def _send_request(
    url: str,
    route: EnrolmentRoute,
    context: ssl.SSLContext,
    content: bytes | None = None,
    *,
    timeout: timedelta,
) -> _EnrolmentResponse:
    address = yarl.URL(url.rstrip("/") + route.path)
    with _UnverifiedEndpoint(url).translate_errors(timeout):
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
            text = await response.content.read(MAX_RESPONSE_BYTES)
            while not response.content.at_eof() and len(text) < MAX_RESPONSE_BYTES:
                text += await response.content.read(MAX_RESPONSE_BYTES - len(text))
            return _EnrolmentResponse(
                response.status, text, response.headers.get("Retry-After", "")
            )


class _UnverifiedEndpoint(errors.BrokerEndpoint):
    """A broker of which only the address is known, called without a client certificate."""

    def __init__(self, url: str) -> None:
        super().__init__(url, Path())

    def _untrusted_error(self, error: Exception) -> BrokerUnreachable:
        text = getattr(error, "verify_message", "") or str(error)
        if "mismatch" in text or "not valid for" in text:
            return BrokerUnreachable(
                f"the certificate of {self.url} is not valid for that name",
                hint="use a name or address in the broker's certificate (`kubelend ca issue --dns/--ip`)",
            )
        return BrokerUnreachable(
            f"the certificate of {self.url} is not signed by the CA with that hash: {text}",
            hint="the connection may be intercepted: no token was sent; check with `kubelend ca show`",
        )

    def _disconnect_error(self, error: Exception) -> BrokerUnreachable:
        return BrokerUnreachable(
            f"the broker at {self.url} closed the connection ({type(error).__name__})",
            hint="check address and port: join at the broker's --enrol-port, 8444 by default",
        )
