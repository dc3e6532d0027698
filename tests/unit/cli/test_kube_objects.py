"""Objects of a cluster, told in the broker's words."""

from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from kubelend.cli import clusters, kube_backend, kube_objects
from kubelend.cli.reservation_views import details, summary
from kubelend.wire import bodies
from kubelend.wire.broker_objects import (
    AdvertisedResources,
    ClusterAdvertisement,
    ClusterAdvertisementSpec,
    ClusterAdvertisementStatus,
    Condition,
    Reservation,
    ReservationSpec,
    ReservationStatus,
)
from kubelend.wire.objects import (
    AgentRequest,
    BrokerResponse,
    Metadata,
    ProviderInstruction,
    ProviderInstructionSpec,
    ProviderInstructionStatus,
    ResourceRequest,
    ResourceRequestSpec,
    ResourceRequestStatus,
)

NOW = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)
LATER = datetime(2026, 1, 2, 13, 0, tzinfo=UTC)
METADATA = Metadata("mine", "team", creation_timestamp=NOW)
AMOUNTS = bodies.Quantities("500m", "256Mi")
ASKED = bodies.ReservationRequest(
    requested_resources=bodies.Quantities("2", "4Gi", "1", "10Gi", {"example.org/fpga": "1"}),
    priority=7,
    duration="1h",
    wait="5m",
    policy="cost",
    target_cluster_id="lender",
    constraints=bodies.Constraints(region="eu"),
)


def request(**status):
    spec = ResourceRequestSpec(requested_cpu="500m", requested_memory="256Mi")
    return ResourceRequest(METADATA, spec, ResourceRequestStatus(**status))


def reservation(**status):
    return Reservation(METADATA, ReservationSpec(AMOUNTS), ReservationStatus(**status))


@pytest.mark.parametrize(
    "side", [kube_objects.RESOURCE_REQUESTS, kube_objects.RESERVATIONS], ids=["agent", "broker"]
)
def test_nothing_that_was_asked_for_is_lost_on_the_way_into_an_object(side):
    told = side.to_body(side.build(METADATA, ASKED))
    spec = side.build(METADATA, ASKED).spec
    assert told.requested_resources == ASKED.requested_resources
    assert (told.priority, told.duration, told.target_cluster_id) == (7, "1h", "lender")
    assert (spec.wait, spec.policy, spec.constraints.region) == ("5m", "cost", "eu")


def test_request_is_shown_by_its_own_name_and_with_the_brokers():
    told = kube_objects.body_from_request(
        request(
            phase="Reserved", target_cluster_id="b", reservation_name="rsv-a-1", expires_at=LATER
        )
    )
    assert summary(told, NOW) == "mine is Reserved on b for 60m"
    assert "Reservation:  rsv-a-1" in details(told, NOW)


def test_expired_request_is_released_as_the_broker_has_it():
    told = kube_objects.body_from_request(
        request(phase="Expired", message="over", expires_at=NOW, last_update_time=NOW)
    )
    assert (told.status.phase, told.status.reason) == ("Released", "Expired")
    assert summary(told, LATER) == "mine is Released: over"


@pytest.mark.parametrize(
    "told, whom",
    [
        (kube_objects.body_from_request(request()), "an agent"),
        (kube_objects.body_from_reservation(reservation()), "a broker"),
    ],
    ids=["request", "reservation"],
)
def test_what_nobody_has_seen_is_pending_and_says_so(told, whom):
    assert told.status.phase == "Pending"
    assert told.status.message == f"Not reconciled by {whom} yet"


def test_reservation_without_a_requester_is_its_namespaces():
    assert kube_objects.body_from_reservation(reservation()).requester_id == "team"


def test_reservation_in_a_mailbox_is_not_its_namespaces():
    assert (
        kube_objects.body_from_reservation(reservation(response=BrokerResponse())).requester_id
        == ""
    )


@pytest.mark.parametrize(
    "phase, told",
    [("", "Reserved"), ("Held", "Reserved"), ("Withdrawn", "Released"), ("Refused", "Failed")],
)
def test_what_a_cluster_lends_is_named_by_the_reservation(phase, told):
    spec = ProviderInstructionSpec(
        reservation_name="rsv-a-1",
        requester_cluster_id="a",
        requested_cpu="1",
        requested_memory="1Gi",
    )
    found = kube_objects.body_from_instruction(
        ProviderInstruction(METADATA, spec, ProviderInstructionStatus(phase=phase))
    )
    assert (found.id, found.requester_id, found.status.phase) == ("rsv-a-1", "a", told)


def cluster(**status):
    none = bodies.Quantities("0", "0")
    amounts = AdvertisedResources(capacity=AMOUNTS, allocated=none, available=AMOUNTS)
    return kube_objects.body_from_advertisement(
        ClusterAdvertisement(
            METADATA,
            ClusterAdvertisementSpec("b", amounts),
            ClusterAdvertisementStatus(**status),
        )
    )


def test_cluster_is_shown_as_the_broker_shows_it():
    told = cluster(phase="Active", active=True, score="92.08", reservations=2, last_update_time=NOW)
    assert clusters.cluster_table([told], LATER).splitlines()[1].split() == (
        ["b", "Active", "500m", "256Mi", "-", "92.08", "2", "60m"]
    )
    assert told.status.rating == "Excellent"
    assert told.advertisement.resources.allocatable == AMOUNTS


@pytest.mark.parametrize("phase, shown", [("Active", "Cordoned"), ("Stale", "Stale,Cordoned")])
def test_closed_cluster_is_cordoned(phase, shown):
    told = cluster(phase=phase, conditions=(Condition("Ready", "False", "ClusterCordoned"),))
    assert shown in clusters.cluster_table([told], NOW)


def test_cluster_that_no_broker_has_seen_can_be_shown():
    assert "not rated yet" in clusters.cluster_details(cluster(), NOW)


@pytest.mark.parametrize(
    "found, is_answered",
    [
        (request(), False),
        (request(phase="Pending", reason="BrokerUnreachable"), False),
        (request(phase="Pending", reservation_name="rsv-a-1"), True),
        (request(phase="Failed"), True),
    ],
    ids=["unseen", "broker-away", "waits", "failed"],
)
def test_agents_trouble_with_its_broker_is_no_answer(found, is_answered):
    assert kube_objects.RESOURCE_REQUESTS.is_decided(found) is is_answered


def test_questions_in_mailboxes_are_no_reservations():
    plain = reservation()
    asked = replace(plain, spec=replace(plain.spec, request=AgentRequest("1", "reserve")))
    assert [kube_objects.RESERVATIONS.is_listed(one) for one in (plain, asked)] == [True, False]


@pytest.mark.parametrize(
    "filters, matches",
    [
        (("", "", ""), True),
        (("Reserved,Active", "", ""), True),
        (("Active", "", ""), False),
        (("", "", "a"), True),
        (("", "requester", "a"), True),
        (("", "provider", "a"), False),
        (("", "provider", "b"), True),
        (("", "", "c"), False),
    ],
)
def test_lists_are_narrowed_by_phase_and_cluster(filters, matches):
    status = bodies.ReservationStatus("Reserved", "")
    found = bodies.Reservation("r", "a", "b", AMOUNTS, status, NOW)
    assert kube_backend.matches_filter(found, *filters) is matches
