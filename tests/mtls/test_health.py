"""The broker's own state: probes, metrics, settings, warnings at the start, and no secret in its log."""

from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest

import brokers
import kubelend
import make
import waiting
from callers import Caller, offer, wish
from certificates import DAY, Certificates
from clocks import Clock
from kubelend.stores.memory import MemoryStore
from raw_connections import CLOSE, GET, connected, end_of


async def plain(port, path):
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}{path}"
        async with session.get(url) as response:
            return response.status, await response.text()


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_probes_say_ok_with_and_without_tls(broker, path):
    assert await plain(broker.process.ports["probes"], path) == (200, "ok")
    answer = await broker.cluster("a").get(path)
    assert (answer.status, answer.content) == (200, b"ok")
    assert await broker.cluster("a").read("version") == {"version": kubelend.__version__}


async def test_broker_that_cannot_load_is_alive_and_says_why_it_is_not_ready(certificates):
    def refuse():
        raise brokers.failure("the disk is on fire")

    async with brokers.listening(certificates, open_store=refuse) as broker:
        await waiting.until(lambda: "fire" in (broker.service.unready or ""))
        reason = "not ready: without its store: the disk is on fire"
        assert await plain(broker.process.ports["probes"], "/healthz") == (200, "ok")
        assert await plain(broker.process.ports["probes"], "/readyz") == (503, reason)
        a = broker.cluster("a")
        assert (await a.get("/healthz")).status == 200
        ready = await a.get("/readyz")
        assert (ready.status, ready.content.decode()) == (503, reason)
        refused = await a.post("advertisements", offer("a"))
        assert refused.refusal == (503, "NotReady")
        assert refused.problem.retryable is True
        assert int(refused.headers["Retry-After"]) >= 1
        assert (await a.get("version")).refusal == (503, "NotReady")
        assert "the disk is on fire" in refused.problem.error
        assert broker.metric("kubelend_store_up") == 0


async def test_plain_listeners_serve_nothing_else(broker):
    for listener in ("probes", "metrics"):
        port = broker.process.ports[listener]
        for path in ("/api/v1/version", "/api/v1/reservations", "/openapi.json", "/"):
            assert (await plain(port, path))[0] == 404
    assert (await plain(broker.process.ports["probes"], "/metrics"))[0] == 404


async def test_metrics_show_what_happened(broker):
    a, r = broker.cluster("a"), broker.cluster("r")
    await a.advertise("4", "8Gi")
    made = await r.reserve("1", "1Gi")
    await r.post("reservations", wish("99"))
    await r.delete("reservations", made["id"])
    await r.reserve("2", "2Gi")
    status, text = await plain(broker.process.ports["metrics"], "/metrics")
    assert status == 200
    for name, labels, value in (
        ("kubelend_cluster_reserved", {"cluster": "a", "resource": "cpu"}, 2),
        ("kubelend_cluster_available", {"cluster": "a", "resource": "cpu"}, 2),
        ("kubelend_reservations", {"phase": "Reserved", "reason": "Locked"}, 1),
        ("kubelend_reservations_finished_total", RELEASED, 1),
        ("kubelend_placement_failures_total", {"reason": "InsufficientCPU"}, 1),
        ("kubelend_http_requests_total", {**RESERVE, "method": "POST", "code": "201"}, 2),
        ("kubelend_http_requests_total", {**RESERVE, "method": "POST", "code": "409"}, 1),
        ("kubelend_http_requests_rejected_total", {**RESERVE, "code": "NoCapacity"}, 1),
        ("kubelend_placement_duration_seconds_count", {"outcome": "placed"}, 2),
        ("kubelend_store_up", {}, 1),
    ):
        assert brokers.series(text, name, **labels) == value, name


RELEASED = {"phase": "Released", "reason": "ReleasedByRequester"}

RESERVE = {"route": "reserve"}


async def test_settings_reach_their_place_in_the_process(certificates, tmp_path):
    """Each of these would otherwise be another answer."""
    settings: dict[str, Any] = {
        "max_body_bytes": "2048",
        "default_duration": "5m",
        "max_duration": "10m",
        "max_wait": "1m",
        "max_waiting": "1",
        "stale_after": "2h",
        "rate_limit": "1",
        "rate_burst": "20",
    }
    async with brokers.child(certificates, tmp_path, **settings) as broker:
        a, r = broker.cluster("a"), broker.cluster("r")
        assert (await a.post("advertisements", content=b" " * 2049)).status == 413
        await a.advertise(validFor="24h")
        status = (await a.read("clusters", "a"))["status"]
        assert moment(status["validUntil"]) - moment(status["lastUpdateTime"]) == 2 * make.HOUR
        made = await r.reserve()
        assert made["duration"] == "5m0s"
        assert (await r.post("reservations", wish(duration="11m"))).status == 400
        assert (await r.post("reservations", wish(wait="61s"))).status == 400
        await r.queue("99", wait="60s")
        assert (await r.post("reservations", wish("99", wait="60s"))).refusal == (429, "QueueFull")
        last = [await r.get("version") for _ in range(20)][-1]
        assert last.refusal == (429, "RateLimited")


async def test_process_serves_metrics_probes_and_ends_well(certificates, tmp_path):
    async with brokers.child(certificates, tmp_path) as broker:
        assert await broker.probe("/healthz") == (200, "ok")
        assert await broker.probe("/readyz") == (200, "ok")
        _, text = await broker.probe("/metrics", "metrics")
        assert "kubelend_certificate_expiry_timestamp_seconds" in text
        assert "process_resident_memory_bytes" in text
        assert await broker.stop() == 0
        assert broker.logged("Stopping")


async def test_brokers_with_one_store_cannot_run_side_by_side(certificates, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    store = str(tmp_path / "shared.db")
    async with brokers.child(certificates, first, store=store) as broker:
        await broker.cluster("a").advertise()
        async with brokers.child(certificates, second, store=store, ready=False) as other:
            await waiting.until(lambda: bool(other.logged("Loading the store failed, will retry")))
            status, why = await other.probe("/readyz")
            assert status == 503
            assert f"the store {store} is in use by another broker" in why
            assert (await other.cluster("a").get("instructions")).refusal == (503, "NotReady")
            assert await broker.stop() == 0
            await other.wait_until_ready()
            assert (await other.cluster("a").get("advertisements", "a")).status == 200


async def test_ready_broker_keeps_its_state_over_a_restart(certificates):
    store = MemoryStore()
    async with brokers.running(certificates, open_store=brokers.reopening(store)) as broker:
        await broker.cluster("a").advertise()
        made = await broker.cluster("r").reserve(key="k")
    async with brokers.running(certificates, open_store=brokers.reopening(store)) as broker:
        r: Caller = broker.cluster("r")
        assert await r.read("reservations", made["id"]) == made
        assert await r.reserve(key="k") == made


def moment(text):
    return datetime.fromisoformat(text)


@pytest.fixture
async def broken(certificates, store):
    """A broker that knows of a revoked cluster and loses its store then."""
    clock = Clock(datetime.now(UTC))
    async with brokers.running(certificates, open_store=lambda: store, clock=clock) as broker:
        answer = await broker.admin().post("members", "cluster", "berlin", "revoke", {})
        assert answer.status == 200
        store.broken = brokers.failure("the disk is on fire")
        await broker.admin().post("members", "cluster", "paris", "revoke", {})
        assert broker.service.unready is not None
        yield broker


@pytest.mark.parametrize("path", ["version", "keys", "audit", "/openapi.json", "members", "x"])
async def test_nobody_is_answered_without_the_store(broken, path):
    for caller in (broken.cluster("berlin"), broken.admin()):
        assert (await caller.get(path)).refusal == (503, "NotReady")
    assert (await broken.cluster("berlin").get("/healthz")).status == 200
    assert (await broken.cluster("berlin").get("/readyz")).content.startswith(b"not ready: ")


async def test_who_was_put_out_is_refused_again_once_the_store_is_back(broken, store):
    store.broken = None
    await waiting.until(lambda: broken.service.unready is None)
    for path in ("version", "/healthz"):
        assert (await broken.cluster("berlin").get(path)).refusal == (403, "Revoked")


TOKEN = "kl1.abcdefghij.abcdefghijklmnopqrstuvwxyz234567"

SECRET = TOKEN.rpartition(".")[2]

# In two pieces, so that no scanner takes this file for a leak.
PEM = "-----BEGIN " + "PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\n-----END PRIVATE KEY-----"

NOWHERE = GET.replace(b"version", b"nowhere").replace(b"\r\n\r\n", CLOSE)


@pytest.fixture
def own(tmp_path):
    """Certificates whose modes a test may change."""
    return Certificates(tmp_path / "certificates")


@pytest.fixture
def store_path(tmp_path):
    """The path of a store_path that is there, in a directory of its own."""
    directory = tmp_path / "store"
    directory.mkdir(mode=0o700)
    path = directory / "kubelend.db"
    path.touch(mode=0o600)
    return path


@pytest.mark.parametrize(
    "which, mode, warning",
    [
        ("key", 0o600, ""),
        (
            "key",
            0o644,
            "{} holds a private key and has mode 0644, so other users can access it; chmod 600 {}",
        ),
        (
            "store",
            0o640,
            "{} holds the ledger and has mode 0640, so other users can access it; chmod 600 {}*",
        ),
        ("store directory", 0o777, "{} has mode 0777, so other users can replace files in it;"),
        ("certificates", 0o777, "{} has mode 0777, so other users can replace files in it;"),
    ],
    ids=["private", "key", "store", "store directory", "certificates"],
)
async def test_mode_that_lets_others_in_is_a_warning_at_the_start(
    own, store_path, log, which, mode, warning
):
    path = {
        "key": own.server() / "tls.key",
        "store": store_path,
        "store directory": store_path.parent,
        "certificates": own.server(),
    }[which]
    path.chmod(mode)
    async with brokers.running(own, store=str(store_path)):
        warnings = [line["event"] for line in log.all if line["level"] == "warning"]
    assert len(warnings) == (1 if warning else 0)
    assert "".join(warnings).startswith(warning.format(path, path))


async def test_secrets_that_somebody_sends_are_in_no_line(broker, log):
    a = broker.cluster("a")
    for secret in (TOKEN, PEM):
        assert (await a.post("advertisements", offer(secret))).status in (400, 403)
        await a.call("GET", "/nowhere", headers={"Authorization": f"Bearer {SECRET}"})
        await a.get("clusters", secret)
    async with connected(a) as (reader, writer):
        writer.write(b"GET /%s HTTP/x\r\n\r\n" % TOKEN.encode())
        assert (await end_of(reader)).startswith(b"HTTP/1.0 400 ")
    assert log.lines("Request rejected") != []
    assert "kl1.abcdefghij.[redacted]" in log.text
    for secret in (SECRET, "MIGHAgEA"):
        assert secret not in log.text


async def test_calls_of_a_certificate_that_has_ended_make_one_line(broker, log):
    caller = broker.cluster("a")
    await caller.get("version")
    broker.clock.pass_time(1000 * DAY)
    for _ in range(20):
        assert (await caller.get("version")).refusal == (403, "InvalidIdentity")
    assert [line["code"] for line in log.lines("Request rejected")] == ["InvalidIdentity"]


@pytest.mark.parametrize(
    "sent, status",
    [
        pytest.param(GET.replace(b"\r\n\r\n", CLOSE), b"200", id="answer"),
        pytest.param(NOWHERE, b"404", id="nowhere"),
        pytest.param(b"no HTTP at all\r\n\r\n", b"400", id="no HTTP"),
    ],
)
async def test_no_answer_says_which_software_gave_it(broker, sent, status):
    async with connected(broker.cluster("a")) as (reader, writer):
        writer.write(sent)
        answer = await end_of(reader)
    assert answer.split(b" ")[1] == status
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert b"server:" not in head
    assert b"python" not in head
    assert b"aiohttp" not in head
    async with broker.cluster("a").stream() as stream:
        assert "Server" not in stream.response.headers
