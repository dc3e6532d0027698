"""While the store is not read nobody knows who was put out, so nobody is answered but probes."""

from datetime import UTC, datetime

import pytest

import brokers
import waiting
from clocks import Clock


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


async def test_probes_are(broken):
    assert (await broken.cluster("berlin").get("/healthz")).status == 200
    assert (await broken.cluster("berlin").get("/readyz")).content.startswith(b"not ready: ")


async def test_who_was_put_out_is_refused_again_once_the_store_is_back(broken, store):
    store.broken = None
    await waiting.until(lambda: broken.service.unready is None)
    for path in ("version", "/healthz"):
        assert (await broken.cluster("berlin").get(path)).refusal == (403, "Revoked")


async def test_nobody_is_answered_before_the_store_was_ever_read(certificates):
    def refuse():
        raise brokers.failure("the disk is on fire")

    async with brokers.listening(certificates, open_store=refuse) as broker:
        assert (await broker.cluster("a").get("version")).refusal == (503, "NotReady")
        assert (await broker.cluster("a").get("/healthz")).status == 200
