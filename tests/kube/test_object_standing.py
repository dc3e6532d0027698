"""Objects whose word does not count, or not yet: overruled, revoked, put off, nobody's. Real API server."""

from typing import Any

import pytest

import kube_broker
import make
from kube_broker import quiet, told
from kubelend.broker.service import BrokerRules
from kubelend.controllers import labels as controllers_labels
from kubelend.controllers import reconciler
from kubelend.controllers.events import EventRecorder
from kubelend.core import enrolment
from kubelend.core.lifecycle import Role
from kubelend.core.models import ClusterId
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation

pytestmark = [pytest.mark.timeout(120), pytest.mark.kube, pytest.mark.broker("objects")]

AMOUNTS = {"requestedResources": {"cpu": "1", "memory": "1Gi"}}
OWN = {"broker.fluidos.eu/managed-by": "broker"}


async def revoke(broker, cluster):
    def command(ledger, now):
        return enrolment.revoke_member(
            ledger, Role.CLUSTER, cluster, now=now, reason="stolen", by="admin", release=True
        )

    await broker.service.change(command, lambda _, done: done)


async def test_object_from_before_does_not_overrule_the_agent_after_a_restart(kube, namespace):
    async with kube_broker.running(kube, namespace) as first:
        await first.advertise("lender", "4", timestamp="2026-01-01T12:00:00Z")
        await first.available("lender", "4")
        later = make.advertisement("lender", "cpu=9,memory=16Gi", sent_at=make.T0)
        await first.service.advertise(later)
        await first.shows(
            ClusterAdvertisement,
            "lender-adv",
            lambda one: (
                one.spec.resources.available.cpu == "9"
                and one.status.observed_generation == one.metadata.generation
            ),
        )
    async with kube_broker.running(kube, namespace) as second:
        await quiet(second)
        assert second.ledger.clusters[ClusterId("lender")].advertisement == later
        earlier = {"spec": {"timestamp": "2026-01-01T11:00:00Z"}}
        await second.edit(ClusterAdvertisement, "lender-adv", earlier)
        assert [reason for reason, _ in await told(second, "lender-adv", 1)] == ["Outdated"]
        assert second.ledger.clusters[ClusterId("lender")].advertisement == later


async def test_revoked_cluster_neither_lends_nor_borrows_by_objects(broker):
    await broker.advertise("lender", "4")
    for cluster in ("out", "me"):
        await revoke(broker, cluster)
    await kube_broker.Objects.advertise(broker, "out", "9")
    shown = await broker.shows(
        ClusterAdvertisement, "out-adv", lambda found: found.status.message != ""
    )
    assert shown.status.message.startswith("Rejected: cluster out was revoked: stolen")
    assert list(broker.ledger.clusters) == ["lender"]
    await broker.reserve("mine")
    failed = await broker.failed("mine")
    assert failed.status.reason == "Revoked"
    assert failed.status.message.startswith("cluster me was revoked: stolen")


async def test_wish_that_has_to_wait_for_a_place_says_so(kube, namespace):
    rules = BrokerRules(max_waiting=1)
    async with kube_broker.running(kube, namespace, rules=rules) as broker:
        await broker.reserve("first", wait="30m")
        await broker.shows(Reservation, "first", kube_broker.has_phase("Pending"))
        await broker.reserve("second", wait="30m")
        shown = await broker.shows(
            Reservation, "second", lambda found: found.status.reason == "QueueFull"
        )
        assert (shown.status.phase, shown.status.record) == ("", None)
        assert shown.status.message.startswith("1 requests are already waiting")
        await quiet(broker)
        await broker.advertise("lender", "4")
        reserved = await broker.reserved("second")
        assert reserved.status.message == "Resources locked in cluster lender"


async def test_ghost_is_told_of_when_it_is_removed(broker):
    await broker.apply(Reservation, "ghost", AMOUNTS, labels=OWN)
    await broker.gone(Reservation, "ghost")
    [(reason, message)] = await told(broker, "ghost", 1)
    assert reason == "OrphanDeleted"
    assert "the broker, which has no record of it" in message


async def test_ghost_that_has_become_somebodys_is_not_deleted(kube, namespace):
    async with kube_broker.opened(kube, namespace) as objects:
        await objects.apply(Reservation, "mine", AMOUNTS, labels=OWN)
        seen: Any = await objects.find(Reservation, "mine")
        await objects.edit(Reservation, "mine", {"metadata": {"labels": None}})
        teller = EventRecorder(objects.client, lambda: make.T0)
        assert not await reconciler.delete_orphan(
            objects.client, controllers_labels.RESERVATION_RESOURCE, seen, teller
        )
        found: Any = await objects.find(Reservation, "mine")
        assert await reconciler.delete_orphan(
            objects.client, controllers_labels.RESERVATION_RESOURCE, found, teller
        )
        assert await objects.find(Reservation, "mine") is None


async def test_record_with_more_labels_than_an_object_has_room_for_is_no_end(broker):
    """As a broker took it in that did not count the region."""
    labels = {f"l{number}": "x" for number in range(65)}
    await broker.service.advertise(make.advertisement("lender", labels=labels))
    await broker.shows(ClusterAdvertisement, "lender-adv", lambda found: found.status.record)
    await broker.service.reserve(make.request(labels=labels))
    await broker.advertise("other", "40", "40Gi")
    await broker.reserve("mine", "30")
    await broker.reserved("mine")
    await quiet(broker)
