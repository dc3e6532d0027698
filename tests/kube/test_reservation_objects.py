"""Reservation objects as people apply, edit and delete them, on a real API server."""

import asyncio
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

import kube_broker
import make
from kube_broker import events_of, has_phase, quiet
from kubelend.core.models import ReservationId
from kubelend.wire.broker_objects import (
    RESERVATION_FINALIZER,
    ClusterAdvertisement,
    PlacementReview,
    Reservation,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.kube, pytest.mark.broker("objects")]


async def test_reserved_amounts_are_shown_until_nothing_fits(broker):
    """The example of the documents: 8950m, less 3, less 5, and 2 more do not fit."""
    await broker.advertise("lender", "8950m")
    await broker.reserve("first", "3")
    first = await broker.reserved("first")
    assert first.spec.target_cluster_id == first.status.target_cluster_id == "lender"
    assert first.status.message == "Resources locked in cluster lender"
    await broker.available("lender", "5950m")
    await broker.reserve("second", "5")
    await broker.reserved("second")
    await broker.available("lender", "950m")
    await broker.reserve("third", "2")
    third = await broker.failed("third")
    assert third.status.reason == "NoCapacity"
    assert third.status.message.startswith("no suitable cluster: 0/1 cluster fits")
    assert third.status.observed_generation == third.metadata.generation
    assert (third.metadata.finalizers, third.status.record) == ((), None)
    assert await events_of(broker, "third", 1) == [("Failed", third.status.message)]
    await broker.delete(Reservation, "third")
    await broker.gone(Reservation, "third")
    shown = await broker.shows(
        ClusterAdvertisement, "lender-adv", lambda one: one.status.reservations == 2
    )
    assert shown.spec.resources.reserved.cpu == "8"


async def test_review_shows_where_a_request_fits_and_reserves_nothing(broker):
    await broker.advertise("large", "8")
    await broker.advertise("small", "2")
    amounts = {"cpu": "4", "memory": "1Gi"}
    await broker.apply(PlacementReview, "fits", {"request": {"requestedResources": amounts}})
    invalid = {"request": {"requestedResources": amounts, "duration": "90000h"}}
    await broker.apply(PlacementReview, "invalid", invalid)
    await broker.apply(PlacementReview, "unknown", {"reservationName": "nobody"})

    async def answered(name):
        found = await broker.shows(PlacementReview, name, lambda one: one.status.conditions)
        [accepted] = found.status.conditions
        return found.status.explanation, (accepted.status, accepted.reason)

    explanation, accepted = await answered("fits")
    assert accepted == ("True", "Accepted")
    fits = {one.cluster_id: (one.fits, one.rejections) for one in explanation.candidates}
    assert fits == {"large": (True, []), "small": (False, ["InsufficientCPU"])}
    assert (await answered("invalid"))[1] == ("False", "InvalidInput")
    assert (await answered("unknown"))[1] == ("False", "NotFound")
    assert not broker.ledger.reservations
    broker.clock.pass_time(400 * 24 * make.HOUR)  # it is behind the API server's
    for name in ("fits", "invalid", "unknown"):
        await broker.gone(PlacementReview, name)


async def test_documented_review_is_answered(broker, kube, tmp_path):
    await broker.advertise("large", "16")
    page = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
    [text] = re.findall(r"```yaml\n(apiVersion: .*?kind: PlacementReview.*?)```", page, re.DOTALL)
    (tmp_path / "review.yaml").write_text(text)
    flags = f"--filename={tmp_path / 'review.yaml'}", f"--namespace={broker.namespace}"
    await asyncio.to_thread(kube.kubectl, "apply", *flags)
    found = await broker.shows(PlacementReview, "large", lambda one: one.status.conditions)
    assert found.status.explanation.rejections == {"LabelMismatch": 1}


async def test_reservation_expires_after_its_duration(broker):
    await broker.advertise("lender", "4")
    await broker.reserve("short", "3", duration="5m")
    held = await broker.reserved("short")
    assert held.status.expires_at - held.status.reserved_at == 5 * make.MINUTE
    broker.clock.pass_time(5 * make.MINUTE)
    over = await broker.shows(Reservation, "short", has_phase("Released"))
    assert over.status.reason == "Expired"
    await broker.available("lender", "4")
    assert [reason for reason, _ in await events_of(broker, "short", 2)] == ["Reserved", "Expired"]
    await broker.delete(Reservation, "short")
    await broker.gone(Reservation, "short")
    await broker.available("lender", "4")


async def test_waiting_request_is_pending_until_it_fits(broker):
    await broker.advertise("lender", "4")
    await broker.reserve("first", "3")
    await broker.reserved("first")
    await broker.reserve("patient", "3", wait="30m")
    await broker.shows(Reservation, "patient", has_phase("Pending"))
    await broker.delete(Reservation, "first")
    await broker.reserved("patient")


async def test_deletion_releases_exactly_once(broker):
    await broker.advertise("lender", "4")
    await broker.reserve("kept", "1")
    await broker.reserve("mine", "2")
    held = await broker.reserved("mine")
    assert held.metadata.finalizers == (RESERVATION_FINALIZER,)
    await broker.reserved("kept")
    await broker.available("lender", "1")
    await broker.delete(Reservation, "mine")
    await broker.gone(Reservation, "mine")
    await broker.available("lender", "3")
    assert list(broker.ledger.reservations) == ["kept"]
    message = "Released reserved resources because the Reservation was deleted"
    assert ("Released", message) in await events_of(broker, "mine", 2)
    await broker.reserve("mine", "3")  # the name again, which is another reservation
    await broker.reserved("mine")
    await broker.available("lender", "0")


async def test_name_reused_at_once_after_a_forced_deletion_is_another_reservation(broker):
    """Nobody has seen the first one go: the second one's is another UID."""
    await broker.advertise("lender", "4")
    await broker.reserve("mine", "3")
    first = await broker.reserved("mine")
    await broker.edit(Reservation, "mine", {"metadata": {"finalizers": None}})
    await broker.delete(Reservation, "mine")
    await broker.reserve("mine", "4")
    second = await broker.reserved("mine")
    assert second.metadata.uid != first.metadata.uid
    assert second.spec.requested_resources.cpu == "4"
    await broker.available("lender", "0")


async def test_conditions_of_the_requester_activate_and_release(broker):
    await broker.advertise("lender", "4")
    for name in ("used", "unused"):
        await broker.reserve(name, "1")
        await broker.reserved(name)
    await broker.condition("used", "RequesterActive")
    await broker.shows(Reservation, "used", has_phase("Active"))
    assert ("Activated", "Resources in use in cluster lender") in await events_of(broker, "used", 2)
    for name in ("used", "unused"):
        await broker.condition(name, "RequesterReleased")
        over = await broker.shows(Reservation, name, has_phase("Released"))
        assert over.status.reason == "ReleasedByRequester"
        assert [one.type for one in over.status.conditions] == ["RequesterReleased"]
    await broker.available("lender", "4")


async def test_deletion_by_force_is_a_release(broker):
    await broker.advertise("lender", "4")
    await broker.reserve("mine", "1")
    await broker.reserved("mine")
    await broker.available("lender", "3")
    await broker.edit(Reservation, "mine", {"metadata": {"finalizers": None}})
    await broker.delete(Reservation, "mine")
    await broker.available("lender", "4")
    await broker.gone(Reservation, "mine")
    assert not broker.ledger.reservations


async def test_edited_object_is_repaired(broker):
    await broker.advertise("lender", "4")
    await broker.reserve("mine", "1")
    held = await broker.reserved("mine")
    status = {"phase": "Failed", "expiresAt": None, "targetClusterID": "elsewhere", "record": None}
    await broker.edit(Reservation, "mine", {"status": status}, "status")
    change = {"metadata": {"finalizers": None}, "spec": {"targetClusterID": "elsewhere"}}
    await broker.edit(Reservation, "mine", change)
    right = await broker.shows(Reservation, "mine", lambda found: says(found) == says(held))
    assert right.status.record.data == held.status.record.data
    await broker.available("lender", "3")
    await broker.edit(Reservation, "mine", {"spec": {"released": True}})
    found = await events_of(broker, "mine", 2)
    assert [reason for reason, _ in found] == ["Reserved", "Released"], "none of the edits"


def says(found):
    status = replace(found.status, record=None, observed_generation=0)
    data = found.status.record and found.status.record.data
    return status, data, found.spec.target_cluster_id, found.metadata.finalizers


async def test_quiet_system_writes_nothing(broker):
    await broker.advertise("lender", "4")
    await broker.reserve("mine", "1")
    await broker.reserve("refused", "9")
    await broker.reserved("mine")
    await broker.failed("refused")
    await broker.available("lender", "3")
    await broker.shows(
        Reservation, "mine", lambda one: one.status.observed_generation == one.metadata.generation
    )
    await events_of(broker, "refused", 1)
    await quiet(broker)


async def test_objects_of_the_rest_interface_have_no_events_and_few_writes(broker):
    """Created, filled, and a share of the commit; what is shown of the provider comes once a second."""
    await broker.advertise("lender", "40", "40Gi")
    await quiet(broker)
    before = await broker.writes()
    await asyncio.gather(
        *(broker.service.reserve(make.request("cpu=1,memory=1Gi")) for _ in range(20))
    )
    await broker.available("lender", "20")
    await quiet(broker)
    assert await broker.writes() - before <= 3 * 20
    found = await broker.client.raw("GET", f"/api/v1/namespaces/{broker.namespace}/events")
    assert kube_broker.json(found)["items"] == []


async def test_restarted_broker_processes_what_it_missed(kube, namespace):
    async with kube_broker.running(kube, namespace) as first:
        await first.advertise("lender", "4")
        await first.reserve("stays", "1")
        await first.reserve("goes", "1")
        await first.reserved("stays")
        await first.reserved("goes")
    async with kube_broker.opened(kube, namespace) as meanwhile:
        await meanwhile.delete(Reservation, "goes")
        await meanwhile.reserve("comes", "2")
    async with kube_broker.running(kube, namespace) as second:
        await second.gone(Reservation, "goes")
        await second.reserved("comes")
        await second.available("lender", "1")
        assert sorted(second.ledger.reservations) == ["comes", "stays"]


async def test_record_whose_object_was_deleted_unseen_is_released(kube, namespace):
    """The broker was stopped before it wrote into the object, and somebody has deleted that since."""
    async with kube_broker.running(kube, namespace) as first:
        await first.advertise("lender", "4")
        await first.available("lender", "4")
        await first.service.reserve(make.request(key="object→gone"), ReservationId("orphan"))
    async with kube_broker.running(kube, namespace) as second:
        await second.until(lambda: not second.ledger.reservations)
        await second.reserve("mine", "4")
        await second.reserved("mine")
