"""Alive and ready, over TLS and without; what monitoring reads; and that every setting reaches its place."""

from datetime import datetime
from typing import Any

import aiohttp
import pytest

import brokers
import kubelend
import make
import waiting
from callers import Caller, offer, wish
from kubelend.stores.memory import MemoryStore


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


async def test_version_is_told(broker):
    found = await broker.cluster("a").read("version")
    assert found == {"version": kubelend.__version__}


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
