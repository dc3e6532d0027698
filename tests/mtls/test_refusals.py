"""Whoever is kept out is logged and counted, and the log gives away no secret."""

import json
from datetime import timedelta

import aiohttp
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from callers import offer, wish
from kubelend.pki.identity import BROKER_NAME, Profile


def refused(broker, route, code):
    return broker.metric("kubelend_http_requests_rejected_total", route=route, code=code)


async def test_forbidden_call_is_logged_with_who_and_what_and_counted(broker, log):
    b = broker.cluster("b")
    assert (await b.post("advertisements", offer("a"))).status == 403
    (line,) = log.lines("Request rejected")
    assert line["level"] == "warning"
    assert line["route"] == "publish"
    assert line["caller"] == "b"
    assert line["code"] == "Forbidden"
    assert line["remote"] == "127.0.0.1"
    assert line["error"] == "clusterID 'a' is not the certificate's 'b'"
    assert refused(broker, "publish", "Forbidden") == 1


async def test_wrong_role_is_logged_and_counted(broker, log):
    await broker.viewer("victor").post("clusters", "a", "drain")
    (line,) = log.lines("Request rejected")
    assert (line["route"], line["caller"], line["code"]) == ("drain", "victor", "Forbidden")
    assert refused(broker, "drain", "Forbidden") == 1


async def test_brokers_own_name_is_logged_and_counted(broker, certificates, log):
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, BROKER_NAME)])
    profile = Profile(subject, ExtendedKeyUsageOID.CLIENT_AUTH)
    own = broker.holder(certificates.write("own-name", profile))
    assert (await own.get("version")).status == 403
    (line,) = log.lines("Request rejected")
    assert (line["code"], line["route"]) == ("InvalidIdentity", "version")
    assert refused(broker, "version", "InvalidIdentity") == 1


async def test_too_many_calls_are_logged_and_counted(start, log):
    broker = await start(rate_limit=1, rate_burst=1)
    r = broker.cluster("r")
    for _ in range(3):
        await r.get("version")
    assert [line["caller"] for line in log.lines("Request rejected")] == ["r"]
    assert refused(broker, "version", "RateLimited") == 2


async def test_body_over_the_limit_is_logged_and_counted(broker, log):
    await broker.cluster("r").post("reservations", content=b" " * 300_000)
    (line,) = log.lines("Request rejected")
    assert (line["route"], line["code"]) == ("reserve", "BodyTooLarge")


@pytest.mark.parametrize("path", ["/nowhere", "/api/v1/%1b%5b31mred"])
async def test_unknown_route_is_counted_under_one_name(broker, path):
    """A caller cannot make up series."""
    await broker.cluster("r").get(path)
    assert refused(broker, "unknown", "NotFound") == 1


async def test_what_merely_does_not_fit_is_counted_and_not_logged(broker, log):
    r = broker.cluster("r")
    await r.post("reservations", wish())
    await r.post("reservations", wish("no"))
    assert log.lines("Request rejected") == []
    assert refused(broker, "reserve", "NoCapacity") == 1
    assert refused(broker, "reserve", "InvalidQuantity") == 1


async def test_every_line_of_the_log_is_json_and_none_has_a_secret(broker, log):
    """After a life with keys, names that try to break lines, and refusals."""
    a, b = broker.cluster("a"), broker.cluster('line\\break"x')
    await a.advertise()
    made = await b.reserve(key="idempotency-secret-1")
    await b.post("reservations", wish("3"), key="idempotency-secret-1")
    await b.post("advertisements", offer('\n{"level":"fake"}\x1b[31m'))
    await b.delete("reservations", made["id"])
    await a.call("GET", "/nowhere", headers={"Authorization": "Bearer very-secret"})
    for line in log.text.splitlines():
        assert json.loads(line)["level"] in {"info", "warning"}
    key = (broker.certificates.cluster("a") / "tls.key").read_text().splitlines()[1]
    for secret in ("very-secret", "idempotency-secret-1", "PRIVATE KEY", key, "\x1b"):
        assert secret not in log.text


async def test_failure_inside_the_broker_is_logged_and_told_without_details(broker, log):
    """A clock that gives no time stands for whatever we did not foresee."""
    a = broker.cluster("a")
    broker.clock.now = "not a time"
    answer = await a.post("advertisements", offer("a"))
    assert answer.refusal == (500, "Internal")
    assert answer.problem.error == "internal error; see the log of the broker"
    (line,) = log.lines("Request failed")
    assert line["route"] == "publish"
    assert "Traceback" in line["exception"]


@pytest.mark.parametrize("kind", ["stranger", "expired"])
async def test_a_handshake_that_is_refused_is_logged_and_counted(broker, certificates, log, kind):
    with pytest.raises(aiohttp.ClientError):
        await broker.holder(getattr(certificates, kind)("a")).get("version")
    text = "TLS handshake rejected: client certificate not trusted or expired"
    (line,) = log.lines(text)  # however often the client tried
    assert line["remote"] == "127.0.0.1"
    assert "CERTIFICATE" in line["reason"]
    assert refused(broker, "handshake", "HandshakeRefused") >= 1


async def test_a_certificate_that_ends_on_an_open_connection_is_refused(broker):
    caller = broker.cluster("a")
    assert (await caller.get("version")).status == 200
    broker.clock.pass_time(timedelta(days=3 * 365))
    assert (await caller.get("version")).refusal == (403, "InvalidIdentity")
