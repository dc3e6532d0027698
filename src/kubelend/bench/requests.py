"""HTTP requests as bytes, built before the measurement starts. Pure.

A client library would need more CPU for a request than the broker for its response, and distort the result.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kubelend.core.models import Cluster, Request
from kubelend.core.resources import NOTHING
from kubelend.pki import forwarding
from kubelend.wire import bodies, conversion, quantities, route, routes

_HOST_HEADER = b"Host: localhost\r\n"


def healthz_request() -> bytes:
    """Returns a GET of /healthz."""
    return b"GET %s HTTP/1.1\r\n%s\r\n" % (
        routes.ROUTES_BY_NAME["healthz"].path.encode(),
        _HOST_HEADER,
    )


def advertisement_request(cluster: Cluster, client_cert: bytes = b"") -> bytes:
    """Returns a POST of an advertisement, with a Client-Cert header if a proxy sends it."""
    request = _post_request("publish", conversion.from_cluster(cluster, NOTHING))
    return (
        _with_header(request, forwarding.CLIENT_CERT_HEADER, client_cert)
        if client_cert
        else request
    )


def reservation_requests(request: Request, keys: str) -> Callable[[int], bytes]:
    """Returns a function that builds the same request with a different idempotency key for each number."""
    body = bodies.ReservationRequest(
        requested_resources=quantities.to_quantities(request.resources),
        duration=f"{round(request.duration.total_seconds())}s",
    )
    before, after = _with_header(
        _post_request("reserve", body), route.IDEMPOTENCY_KEY, b"%s-#" % keys.encode()
    ).split(b"#", 1)

    def numbered(number: int) -> bytes:
        return b"%s%d%s" % (before, number, after)

    return numbered


def _post_request(route: str, body: bodies.Body) -> bytes:
    text = msgspec.json.encode(body)
    return (
        b"POST %s HTTP/1.1\r\n%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (
            routes.ROUTES_BY_NAME[route].path.encode(),
            _HOST_HEADER,
            len(text),
            text,
        )
    )


def _with_header(request: bytes, name: str, value: bytes) -> bytes:
    line, _, rest = request.partition(b"\r\n")
    return b"%s\r\n%s: %s\r\n%s" % (line, name.encode(), value, rest)
