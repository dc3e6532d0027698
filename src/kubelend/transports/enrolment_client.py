"""Client of the enrolment listener, for processes without a certificate.

`fetch_authorities` fetches the CA certificates over an unverified connection; the caller checks them against
a pin. `send_join_request` sends the token over a connection that is verified with those CAs.
"""

from __future__ import annotations

import ssl
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path

import aiohttp
import msgspec
import yarl

from kubelend.core.errors import BrokerUnreachable, UnexpectedResponse
from kubelend.transports import errors, tls
from kubelend.transports import session as transports_session
from kubelend.transports.session import Response
from kubelend.wire import routes
from kubelend.wire.admin_bodies import JoinPending, JoinRequest, JoinResult
from kubelend.wire.routes import EnrolmentRoute

MAX_RESPONSE_BYTES = 1 << 20
"""Maximum bytes of a response, which comes from an unverified server."""


async def fetch_authorities(
    url: str, timeout: timedelta = transports_session.REQUEST_TIMEOUT
) -> str:
    """Fetches the CA certificates (PEM), unverified."""
    answer = await _send_request(url, routes.AUTHORITIES_ROUTE, tls.enrolment_context(), timeout)
    try:
        return answer.body.decode("ascii")
    except UnicodeDecodeError as error:
        raise UnexpectedResponse(
            f"{url}: not a response of a broker", hint="check address and port"
        ) from error


async def send_join_request(
    url: str,
    body: JoinRequest,
    trusted: str,
    timeout: timedelta = transports_session.REQUEST_TIMEOUT,
) -> JoinResult | JoinPending:
    """Sends a join request to a broker whose certificate these CAs (PEM) have signed."""
    context, content = tls.enrolment_context(trusted), msgspec.json.encode(body)
    answer = await _send_request(url, routes.JOIN_ROUTE, context, timeout, content)
    if answer.status == HTTPStatus.ACCEPTED:
        return answer.decode(JoinPending)
    return answer.decode(JoinResult)


async def _send_request(
    url: str,
    route: EnrolmentRoute,
    context: ssl.SSLContext,
    timeout: timedelta,
    content: bytes | None = None,
) -> Response:
    address = yarl.URL(url.rstrip("/") + route.path)
    with _UnverifiedEndpoint(url, Path()).translate_errors(timeout):
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
            text = await transports_session.read_response(response, MAX_RESPONSE_BYTES)
    if response.status not in (HTTPStatus.OK, HTTPStatus.ACCEPTED):
        raise transports_session.response_error(response, text)
    return Response(response.status, text)


class _UnverifiedEndpoint(errors.BrokerEndpoint):
    """A broker of which only the address is known, called without a client certificate."""

    def _verification_error(self, text: str) -> BrokerUnreachable:
        return BrokerUnreachable(
            f"the certificate of {self.url} is not signed by the CA with that hash: {text}",
            hint="the connection may be intercepted: no token was sent; check with `kubelend ca show`",
        )

    def _disconnect_error(self, error: Exception) -> BrokerUnreachable:
        return BrokerUnreachable(
            f"the broker at {self.url} closed the connection ({type(error).__name__})",
            hint="check address and port: join at the broker's --enrol-port, 8444 by default",
        )
