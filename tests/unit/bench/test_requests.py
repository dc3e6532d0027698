"""The bytes which the load generators send are requests that the broker's types can read."""

import msgspec
import pytest

import make
from kubelend.bench import fixtures
from kubelend.wire import bodies, route, routes


def split(request):
    head, _, body = request.partition(b"\r\n\r\n")
    line, *fields = head.decode().split("\r\n")
    return line, dict(field.split(": ", 1) for field in fields), body


def test_the_constant_is_a_request_without_a_body():
    line, headers, body = split(fixtures.healthz_request())
    assert line == "GET /healthz HTTP/1.1"
    assert headers == {"Host": "localhost"}
    assert body == b""


def test_an_advertisement_is_the_body_of_its_route():
    (cluster,) = fixtures.make_clusters(1, make.T0)
    line, headers, body = split(fixtures.advertisement_request(cluster))
    assert line == f"POST {routes.ROUTES_BY_NAME['publish'].path} HTTP/1.1"
    assert headers["Content-Length"] == str(len(body))
    assert headers["Content-Type"] == "application/json"
    assert msgspec.json.decode(body, type=bodies.Advertisement).cluster_id == cluster.id


def test_a_proxy_passes_a_certificate_on():
    (cluster,) = fixtures.make_clusters(1, make.T0)
    _, plain, body = split(fixtures.advertisement_request(cluster))
    _, headers, same = split(fixtures.advertisement_request(cluster, b":AAAA:"))
    assert headers == {**plain, "Client-Cert": ":AAAA:"}
    assert body == same


def test_each_reservation_has_its_own_key_and_the_same_body():
    numbered = fixtures.reservation_requests(make.request("cpu=500m,memory=1Gi"), "bench-3")
    line, headers, body = split(numbered(1))
    _, others, same = split(numbered(2))
    assert line == f"POST {routes.ROUTES_BY_NAME['reserve'].path} HTTP/1.1"
    assert (headers[route.IDEMPOTENCY_KEY], others[route.IDEMPOTENCY_KEY]) == (
        "bench-3-1",
        "bench-3-2",
    )
    assert body == same
    assert headers["Content-Length"] == str(len(body))
    asked = msgspec.json.decode(body, type=bodies.ReservationRequest)
    assert asked.requested_resources == bodies.Quantities("500m", "1Gi")
    assert asked.duration == "3600s"


@pytest.mark.parametrize("number", [0, 7, 123456])
def test_a_request_ends_with_its_body(number):
    request = fixtures.reservation_requests(make.request(), "k")(number)
    assert request.endswith(b"}")
