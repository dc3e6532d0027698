"""Objects over time: outdated, rejected, revoked, orphaned, deleted unseen, or edited all the time."""

from typing import Any

import pytest

import kube_broker
import make
from clocks import Clock
from kube_broker import events_of, quiet
from kubelend.broker.service import BrokerRules
from kubelend.controllers import labels as controllers_labels
from kubelend.core import enrolment
from kubelend.core.commands import WaitLimits
from kubelend.core.lifecycle import Role
from kubelend.core.models import ClusterId, ReservationId
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


async def test_outdated_object_does_not_replace_a_newer_advertisement_after_a_restart(
    kube, namespace
):
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
        assert [reason for reason, _ in await events_of(second, "lender-adv", 1)] == ["Outdated"]
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


async def test_request_that_waits_for_the_queue_shows_the_reason(kube, namespace):
    rules = BrokerRules(waiting=WaitLimits(1))
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


async def test_orphan_is_deleted_with_an_event(broker):
    await broker.apply(Reservation, "orphan", AMOUNTS, labels=OWN)
    await broker.gone(Reservation, "orphan")
    [(reason, message)] = await events_of(broker, "orphan", 1)
    assert reason == "OrphanDeleted"
    assert "the broker, which has no record of it" in message


async def test_orphan_that_has_changed_is_not_deleted(kube, namespace):
    async with kube_broker.opened(kube, namespace) as objects:
        await objects.apply(Reservation, "mine", AMOUNTS, labels=OWN)
        seen: Any = await objects.find(Reservation, "mine")
        await objects.edit(Reservation, "mine", {"metadata": {"labels": None}})
        resource = controllers_labels.RESERVATION_RESOURCE
        assert not await controllers_labels.delete_if_unchanged(objects.client, resource, seen)
        found: Any = await objects.find(Reservation, "mine")
        assert await controllers_labels.delete_if_unchanged(objects.client, resource, found)
        assert await objects.find(Reservation, "mine") is None


async def test_record_with_more_labels_than_an_object_allows(broker):
    """As a broker took it in that did not count the region."""
    labels = {f"l{number}": "x" for number in range(65)}
    await broker.service.advertise(make.advertisement("lender", labels=labels))
    await broker.shows(ClusterAdvertisement, "lender-adv", lambda found: found.status.record)
    await broker.service.reserve(make.request(labels=labels))
    await broker.advertise("other", "40", "40Gi")
    await broker.reserve("mine", "30")
    await broker.reserved("mine")
    await quiet(broker)


RETENTION = make.HOUR
"""The default."""


# -- refused


async def test_rejected_requests_are_deleted_after_the_retention(kube, namespace):
    """One after the other, also by another broker than the one that has rejected them."""
    clock = Clock()
    async with kube_broker.running(kube, namespace, clock) as first:
        await first.advertise("lender", "4")
        await first.reserve("mine", "1", duration="3h")
        await first.reserved("mine")
        for name in ("early", "late"):
            clock.pass_time(RETENTION / 2)
            await first.reserve(name, "9")
            await first.failed(name)
    clock.pass_time(RETENTION / 2)
    async with kube_broker.running(kube, namespace, clock) as second:
        await second.gone(Reservation, "early")
        assert await second.find(Reservation, "late") is not None
        clock.pass_time(RETENTION / 2)
        await second.gone(Reservation, "late")
        assert (await second.reserved("mine")).status.target_cluster_id == "lender"


# -- gone while nobody was watching


async def test_advertisement_deleted_while_the_broker_started_is_withdrawn(kube, namespace):
    async with kube_broker.running(kube, namespace) as first:
        await first.advertise("goes")
        await first.advertise("stays")
        await first.available("goes", "10")

    async def meanwhile(objects):
        await objects.delete(ClusterAdvertisement, "goes-adv")

    async with kube_broker.running(kube, namespace, meanwhile=meanwhile) as second:
        await second.until(lambda: "goes" not in second.ledger.clusters)
        await second.reserve("mine", "1")
        assert (await second.reserved("mine")).status.target_cluster_id == "stays"
        assert list(second.ledger.clusters) == ["stays"]


async def test_reservation_of_rest_deleted_by_force_while_the_broker_started_is_released(
    kube, namespace
):
    async with kube_broker.running(kube, namespace) as first:
        await first.advertise("lender", "4")
        gone, kept = [await first.service.reserve(make.request(key=key)) for key in ("1", "2")]
        await first.reserved(gone.id)

    async def meanwhile(objects):
        await objects.edit(Reservation, gone.id, {"metadata": {"finalizers": None}})
        await objects.delete(Reservation, gone.id)

    async with kube_broker.running(kube, namespace, meanwhile=meanwhile) as second:
        await second.until(lambda: gone.id not in second.ledger.reservations)
        assert list(second.ledger.reservations) == [kept.id]


async def test_finished_reservation_needs_no_object(broker):
    """A REST client finds it by its ID, whatever was done to the object."""
    await broker.advertise("lender", "4")
    over = await broker.service.reserve(make.request())
    await broker.reserved(over.id)
    await broker.delete(Reservation, over.id)
    await broker.gone(Reservation, over.id)
    for listener in broker.service.listeners:
        listener(None)  # look at everything
    await broker.reserve("mine", "1")
    await broker.reserved("mine")
    assert list(broker.ledger.reservations) == [over.id, "mine"]
    released = await broker.service.reservation(over.id)
    assert (released.phase, released.reason) == ("Released", "Deleted")


async def test_archive_label_does_not_release_a_reservation(broker):
    await broker.advertise("lender", "4")
    await broker.reserve("mine", "1")
    await broker.reserved("mine")
    label = {"broker.fluidos.eu/archived": "true"}
    await broker.edit(Reservation, "mine", {"metadata": {"labels": label}})
    found = await broker.shows(Reservation, "mine", lambda one: not one.metadata.labels)
    assert found.status.phase == "Reserved"
    assert broker.ledger.reservations[ReservationId("mine")].is_live
