"""The broker's own state: probes, metrics, settings, warnings at the start, and no secret in its log."""

from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest

import brokers
import kubelend
import make
import waiting
from callers import offer, request_body
from certificates import DAY, Certificates
from clocks import Clock
from kubelend.core.events import StoreLag
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
    answer = await broker.cluster("a").call("HEAD", path)
    assert (answer.status, answer.content) == (200, b"")
    assert await broker.cluster("a").read("version") == {"version": kubelend.__version__}


async def test_readiness_says_how_far_objects_lag(certificates, store):
    async with brokers.listening(certificates, open_store=lambda: store) as broker:
        await waiting.until(lambda: broker.service.unready is None)
        store.shown = StoreLag(committed=3, written=2, changes=12, seconds=0.34)
        expected = "ok: objects lag 12 changes, 0.3 s"
        assert await plain(broker.process.ports["probes"], "/readyz") == (200, expected)
        assert (await broker.cluster("a").get("/readyz")).content.decode() == expected
        assert broker.metric("kubelend_store_lag_changes") == 12
        assert broker.metric("kubelend_store_lag_seconds") == 0.34
        store.shown = StoreLag()


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
    await r.reserve("1", "1Gi")
    await r.post("reservations", request_body("99"))
    status, text = await plain(broker.process.ports["metrics"], "/metrics")
    assert status == 200
    route = {"route": "reserve"}
    for name, labels in (
        ("kubelend_cluster_reserved", {"cluster": "a", "resource": "cpu"}),
        ("kubelend_reservations", {"phase": "Reserved", "reason": "Locked"}),
        ("kubelend_placement_failures_total", {"reason": "InsufficientCPU"}),
        ("kubelend_http_requests_total", {**route, "method": "POST", "code": "201"}),
        ("kubelend_http_requests_total", {**route, "method": "POST", "code": "409"}),
        ("kubelend_http_requests_rejected_total", {**route, "code": "NoCapacity"}),
        ("kubelend_placement_duration_seconds_count", {"outcome": "placed"}),
        ("kubelend_store_up", {}),
    ):
        assert brokers.series(text, name, **labels) == 1, name


async def test_process_has_its_settings_metrics_and_probes_and_ends_well(certificates, tmp_path):
    """Each setting would otherwise be another answer."""
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
        received, until = (
            datetime.fromisoformat(status[name]) for name in ("lastUpdateTime", "validUntil")
        )
        assert until - received == 2 * make.HOUR
        made = await r.reserve()
        assert made["duration"] == "5m0s"
        assert (await r.post("reservations", request_body(duration="11m"))).status == 400
        assert (await r.post("reservations", request_body(wait="61s"))).status == 400
        await r.queue("99", wait="60s")
        assert (await r.post("reservations", request_body("99", wait="60s"))).refusal == (
            429,
            "QueueFull",
        )
        last = [await r.get("version") for _ in range(20)][-1]
        assert last.refusal == (429, "RateLimited")
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


async def test_nobody_is_answered_without_the_store_and_the_revoked_are_refused_again_with_it(
    certificates, store
):
    clock = Clock(datetime.now(UTC))
    async with brokers.running(certificates, open_store=lambda: store, clock=clock) as broker:
        berlin, admin = broker.cluster("berlin"), broker.admin()
        answer = await admin.post("members", "cluster", "berlin", "revoke", {})
        assert answer.status == 200
        store.broken = brokers.failure("the disk is on fire")
        await admin.post("members", "cluster", "paris", "revoke", {})
        assert broker.service.unready is not None
        for path in ("version", "keys", "audit", "/openapi.json", "members", "x"):
            for caller in (berlin, admin):
                assert (await caller.get(path)).refusal == (503, "NotReady")
        assert (await berlin.get("/healthz")).status == 200
        assert (await berlin.get("/readyz")).content.startswith(b"not ready: ")
        store.broken = None
        await waiting.until(lambda: broker.service.unready is None)
        for path in ("version", "/healthz"):
            assert (await berlin.get(path)).refusal == (403, "Revoked")


@pytest.mark.parametrize(
    "which, mode, warning",
    [
        ("certificates/tls.key", 0o600, ""),
        ("certificates/tls.key", 0o644, "{} holds a private key and has mode 0644, so other users"),
        ("store/kubelend.db", 0o640, "{} holds the ledger and has mode 0640, so other users can"),
        ("store", 0o777, "{} has mode 0777, so other users can replace files in it;"),
        ("certificates", 0o777, "{} has mode 0777, so other users can replace files in it;"),
    ],
    ids=["private", "key", "store", "store directory", "certificates"],
)
async def test_mode_that_lets_others_in_is_a_warning_at_the_start(
    tmp_path, log, which, mode, warning
):
    own, directory = Certificates(tmp_path / "pki"), tmp_path / "store"
    (tmp_path / "certificates").symlink_to(own.server())
    directory.mkdir(mode=0o700)
    (directory / "kubelend.db").touch(mode=0o600)
    path = (tmp_path / which).resolve()
    path.chmod(mode)
    async with brokers.running(own, store=str(directory / "kubelend.db")):
        warnings = [line["event"] for line in log.all if line["level"] == "warning"]
    assert len(warnings) == (1 if warning else 0)
    assert "".join(warnings).startswith(warning.format(path))
    assert f"; chmod 600 {path}" in "".join(warnings) or mode in {0o600, 0o777}


TOKEN = "kl1.abcdefghij.abcdefghijklmnopqrstuvwxyz234567"

SECRET = TOKEN.rpartition(".")[2]

# In two pieces, so that no scanner takes this file for a leak.
PEM = "-----BEGIN " + "PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\n-----END PRIVATE KEY-----"


async def test_every_line_of_the_log_is_json_and_none_has_a_secret(broker, log):
    """After keys, rejections, and names that try to break lines."""
    a, b = broker.cluster("a"), broker.cluster('line\\break"x')
    await a.advertise()
    made = await b.reserve(key="idempotency-secret-1")
    await b.post("reservations", request_body("3"), key="idempotency-secret-1")
    await b.delete("reservations", made["id"])
    for text in (TOKEN, PEM, '\n{"level":"fake"}\x1b[31m'):
        assert (await b.post("advertisements", offer(text))).status in (400, 403)
        await a.get("clusters", text)
    await a.call("GET", "/nowhere", headers={"Authorization": f"Bearer {SECRET}"})
    async with connected(a) as (reader, writer):
        writer.write(b"GET /%s HTTP/x\r\n\r\n" % TOKEN.encode())
        assert (await end_of(reader)).startswith(b"HTTP/1.0 400 ")
    assert log.lines("Request rejected") != []
    assert {line["level"] for line in log.all} <= {"info", "warning"}
    assert "kl1.abcdefghij.[redacted]" in log.text
    key = (broker.certificates.cluster("a") / "tls.key").read_text().splitlines()[1]
    for secret in (SECRET, "MIGHAgEA", "idempotency-secret-1", key, "\x1b"):
        assert secret not in log.text


async def test_calls_of_a_certificate_that_has_ended_make_one_line(broker, log):
    caller = broker.cluster("a")
    await caller.get("version")
    broker.clock.pass_time(1000 * DAY)
    for _ in range(20):
        assert (await caller.get("version")).refusal == (403, "InvalidIdentity")
    assert [line["code"] for line in log.lines("Request rejected")] == ["InvalidIdentity"]


async def test_no_answer_says_which_software_gave_it(broker):
    version = GET.replace(b"\r\n\r\n", CLOSE)
    nowhere = version.replace(b"version", b"nowhere")
    for sent, status in ((version, b"200"), (nowhere, b"404"), (b"no HTTP\r\n\r\n", b"400")):
        async with connected(broker.cluster("a")) as (reader, writer):
            writer.write(sent)
            answer = await end_of(reader)
        assert answer.split(b" ")[1] == status
        head = answer.partition(b"\r\n\r\n")[0].lower()
        assert not any(word in head for word in (b"server:", b"python", b"aiohttp"))
    async with broker.cluster("a").stream() as stream:
        assert "Server" not in stream.response.headers
