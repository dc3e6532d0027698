"""A seal that somebody has spoilt is mended by the broker that leads, before another one starts with it."""

import asyncio
from contextlib import closing

import pytest

import kube_broker
from kube_broker import quiet
from kubelend.kube import config
from kubelend.kube.client import Client
from kubelend.stores.kubernetes import head as kubernetes_head
from kubelend.stores.kubernetes import objects
from kubelend.stores.kubernetes.objects import (
    HEAD_NAME,
    LEDGER_RECORDS,
    STORED_ADVERTISEMENTS,
)
from kubelend.stores.kubernetes.store import KubernetesStore
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation

pytestmark = [pytest.mark.timeout(120), pytest.mark.kube, pytest.mark.broker("objects")]

SPOILT = [
    pytest.param({"checksum": "7"}, id="the checksum"),
    pytest.param({"revision": 10**6}, id="the revision"),
]
OBJECTS = [
    pytest.param(Reservation, "reservation", "mine", id="reservation"),
    pytest.param(ClusterAdvertisement, "cluster", "lender-adv", id="advertisement"),
]


@pytest.fixture
async def broker(broker):
    await broker.advertise("lender")
    await broker.reserve("mine")
    await broker.reserved("mine")
    return broker


@pytest.mark.parametrize("kind, record, name", OBJECTS)
@pytest.mark.parametrize("change", SPOILT)
async def test_spoilt_seal_is_mended_once(kube, broker, kind, record, name, change):
    await quiet(broker)
    before = (await broker.find(kind, name)).status.record
    writes = await broker.writes()
    await broker.edit(kind, name, {"status": {"record": change}}, "status")
    key = await seal_key(broker.client, broker.namespace)
    mended = await broker.shows(
        kind, name, lambda found: objects.verify(key, record, name, found.status.record)
    )
    assert mended.status.record.data == before.data
    await quiet(broker)
    # The one that spoilt it, the commit, and the object; this at second try, for somebody has written it.
    assert await broker.writes() == writes + 4
    await asyncio.to_thread(check_that_another_can_start, kube, broker.namespace)


async def test_seals_of_a_store_that_was_begun_anew_are_judged_by_its_own_key(kube, namespace):
    """By an office that has known another one."""
    from kubelend.controllers.reconciler import RecordVerifier

    async with Client.open(config.config_from_kubeconfig(kube.admin_kubeconfig)) as client:
        inspector = RecordVerifier(client, namespace)
        for _ in range(2):
            async with kube_broker.running(kube, namespace) as broker:
                await broker.advertise("lender")
                found = await broker.shows(
                    ClusterAdvertisement, "lender-adv", lambda one: one.status.record is not None
                )
                assert await inspector.verified(found) is found
            await client.delete(STORED_ADVERTISEMENTS, "lender-adv", namespace)
            await client.delete(LEDGER_RECORDS, HEAD_NAME, namespace)


async def seal_key(client: Client, namespace: str) -> str:
    head = await client.find(LEDGER_RECORDS, HEAD_NAME, namespace)
    assert head is not None
    return kubernetes_head.state_from_object(head).key


def check_that_another_can_start(cluster, namespace):
    found = config.config_from_kubeconfig(cluster.admin_kubeconfig)
    with closing(KubernetesStore.open_readonly(found, namespace)) as store:
        assert len(store.load().reservations) == 1
