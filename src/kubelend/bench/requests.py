"""Requests as the bytes that go over the wire, made before the clock runs. Pure.

A client library would spend more on a request than the broker does on the answer, and be what is
measured. These are the bytes which such a library would send.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kubelend.core.models import Cluster, Request
from kubelend.core.resources import NOTHING
from kubelend.pki import forwarding
from kubelend.wire import bodies, conversion, quantities, route, routes

_HOST = b"Host: localhost\r\n"


def healthz() -> bytes:
    """What the broker answers without thinking."""
    return b"GET %s HTTP/1.1\r\n%s\r\n" % (routes.BY_NAME["healthz"].path.encode(), _HOST)


def advertisement(cluster: Cluster, passed_on: bytes = b"") -> bytes:
    """What an agent sends for this cluster, or a proxy with the certificate that it passes on."""
    request = _post("publish", conversion.from_cluster(cluster, NOTHING))
    return _with_header(request, forwarding.HEADER, passed_on) if passed_on else request


def reservations(request: Request, keys: str) -> Callable[[int], bytes]:
    """Makes the same request again and again, each with an idempotency key of its own."""
    body = bodies.ReservationRequest(
        requested_resources=quantities.of(request.resources),
        duration=f"{round(request.duration.total_seconds())}s",
    )
    before, after = _with_header(
        _post("reserve", body), route.IDEMPOTENCY_KEY, b"%s-#" % keys.encode()
    ).split(b"#", 1)

    def numbered(number: int) -> bytes:
        return b"%s%d%s" % (before, number, after)

    return numbered


def _post(route: str, body: bodies.Body) -> bytes:
    text = msgspec.json.encode(body)
    return (
        b"POST %s HTTP/1.1\r\n%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (
            routes.BY_NAME[route].path.encode(),
            _HOST,
            len(text),
            text,
        )
    )


def _with_header(request: bytes, name: str, value: bytes) -> bytes:
    line, _, rest = request.partition(b"\r\n")
    return b"%s\r\n%s: %s\r\n%s" % (line, name.encode(), value, rest)
