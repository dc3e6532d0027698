"""The backend of `kubectl lend`: objects as bodies of the broker, and requests that get no decision."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml
from aiohttp import web
from msgspec.structs import replace

import object_samples
import scripted_api
from kubelend.cli import clusters, kube_backend, kube_objects
from kubelend.cli.kube_backend import KubeBackend
from kubelend.cli.options import KubeTarget
from kubelend.cli.reservations import details, summary
from kubelend.core.errors import (
    Forbidden,
    NotFound,
    Unauthenticated,
    Unavailable,
    UnexpectedResponse,
)
from kubelend.kits.backoff import Backoff
from kubelend.kube.client import Client
from kubelend.wire import bodies, broker_objects, cluster_namespaces, objects
from kubelend.wire.broker_objects import Reservation, ReservationSpec
from kubelend.wire.objects import Condition, Metadata, ProviderInstruction, ResourceRequest
from scripted_api import event, found, page, status, watch
from waiting import until

NOW = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)
METADATA = Metadata("mine", "team", creation_timestamp=NOW)
AMOUNTS = bodies.Quantities("500m", "256Mi")
AGENT, BROKER = kube_objects.RESOURCE_REQUESTS, kube_objects.RESERVATIONS


def request(**fields):
    spec = objects.ResourceRequestSpec(requested_cpu="500m", requested_memory="256Mi")
    return ResourceRequest(METADATA, spec, objects.ResourceRequestStatus(**fields))


def reservation(**fields):
    status = broker_objects.ReservationStatus(**fields)
    return Reservation(METADATA, ReservationSpec(AMOUNTS), status)


# -- objects as bodies


@pytest.mark.parametrize("adapter", [AGENT, BROKER], ids=["agent", "broker"])
def test_an_object_has_all_of_its_request(adapter):
    wanted = bodies.ReservationRequest(
        requested_resources=bodies.Quantities("2", "4Gi", "1", "10Gi", {"example.org/fpga": "1"}),
        priority=7,
        duration="1h",
        wait="5m",
        policy="cost",
        target_cluster_id="lender",
        constraints=bodies.Constraints(region="eu"),
    )
    made = adapter.build(METADATA, wanted)
    body = adapter.to_body(made)
    assert body.requested_resources == wanted.requested_resources
    assert (body.priority, body.duration, body.target_cluster_id) == (7, "1h", "lender")
    assert (made.spec.wait, made.spec.policy, made.spec.constraints.region) == ("5m", "cost", "eu")


def test_a_request_is_shown_by_its_own_name_and_that_of_its_reservation():
    placed = {"phase": "Reserved", "target_cluster_id": "b", "reservation_name": "rsv-a-1"}
    body = AGENT.to_body(request(**placed, expires_at=LATER))
    assert summary(body, NOW) == "mine is Reserved on b for 60m"
    assert "Reservation:  rsv-a-1" in details(body, NOW)


def test_an_expired_request_is_released_as_at_the_broker():
    times = {"expires_at": NOW, "last_update_time": NOW}
    body = AGENT.to_body(request(phase="Expired", message="over", **times))
    assert (body.status.phase, body.status.reason) == ("Released", "Expired")
    assert summary(body, LATER) == "mine is Released: over"


@pytest.mark.parametrize(
    "body, controller",
    [(AGENT.to_body(request()), "an agent"), (BROKER.to_body(reservation()), "a broker")],
    ids=["request", "reservation"],
)
def test_an_object_that_is_not_reconciled_is_pending(body, controller):
    assert body.status.phase == "Pending"
    assert body.status.message == f"Not reconciled by {controller} yet"


def test_a_reservation_keeps_its_times_and_its_requester_is_its_namespace():
    body = BROKER.to_body(reservation(phase="Active", reason="Used", activated_at=NOW))
    assert (body.status.reason, body.status.activated_at) == ("Used", NOW)
    assert body.requester_id == "team"
    in_cluster_namespace = reservation(instruction=object_samples.INSTRUCTION)
    assert BROKER.to_body(in_cluster_namespace).requester_id == ""


@pytest.mark.parametrize(
    "phase, shown",
    [("", "Reserved"), ("Held", "Reserved"), ("Withdrawn", "Released"), ("Refused", "Failed")],
)
def test_an_instruction_is_the_reservation_that_is_lent(phase, shown):
    names: dict[str, Any] = {"reservation_name": "rsv-a-1", "requester_cluster_id": "a"}
    spec = objects.ProviderInstructionSpec(**names, requested_cpu="1", requested_memory="1Gi")
    status = objects.ProviderInstructionStatus(phase=phase)
    instruction = ProviderInstruction(METADATA, spec, status)
    body = kube_objects.body_from_instruction(instruction)
    assert (body.id, body.requester_id, body.status.phase) == ("rsv-a-1", "a", shown)


def cluster(**fields):
    amounts = {"capacity": AMOUNTS, "allocated": bodies.Quantities("0", "0"), "available": AMOUNTS}
    resources = broker_objects.AdvertisedResources(**amounts)
    spec = broker_objects.ClusterAdvertisementSpec("b", resources)
    status = broker_objects.ClusterAdvertisementStatus(**fields)
    advertisement = broker_objects.ClusterAdvertisement(METADATA, spec, status)
    return kube_objects.body_from_advertisement(advertisement)


CORDONED = (Condition("Ready", "False", "ClusterCordoned"),)


def test_a_cluster_is_shown_as_at_the_broker():
    body = cluster(phase="Active", active=True, score="92.08", reservations=2, last_update_time=NOW)
    row = clusters.CLUSTERS.table([body], LATER).splitlines()[1]
    assert row.split() == ["b", "Active", "500m", "256Mi", "-", "92.08", "2", "60m"]
    assert body.status.rating == "Excellent"
    assert body.advertisement.resources.allocatable == AMOUNTS
    for phase, shown in (("Active", "Cordoned"), ("Stale", "Stale,Cordoned")):
        text = clusters.CLUSTERS.table([cluster(phase=phase, conditions=CORDONED)], NOW)
        assert text.splitlines()[1].split()[1] == shown
    assert "not rated yet" in clusters.cluster_details(cluster(), NOW)


@pytest.mark.parametrize(
    "made, is_decided",
    [
        (request(), False),
        (request(phase="Pending"), False),
        (request(phase="Pending", reservation_name="rsv-1"), True),
        (request(phase="Failed"), True),
    ],
    ids=["new", "not sent", "queued", "failed"],
)
def test_a_pending_request_is_decided_once_it_has_a_reservation(made, is_decided):
    assert AGENT.is_decided(made) is is_decided


def test_requests_of_agents_are_not_listed():
    plain = reservation()
    annotations = {cluster_namespaces.IDEMPOTENCY_ANNOTATION: "k"}
    call = replace(plain, metadata=replace(plain.metadata, annotations=annotations))
    assert [BROKER.is_listed(one) for one in (plain, call)] == [True, False]


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
def test_lists_are_filtered_by_phase_and_cluster(filters, matches):
    body = bodies.Reservation("r", "a", "b", AMOUNTS, bodies.ReservationStatus("Reserved", ""), NOW)
    assert kube_backend.matches_filter(body, *filters) is matches


# -- requests without a decision

WANTED = bodies.ReservationRequest(bodies.Quantities("1", "1Gi"))
MADE = {
    "metadata": {"name": "lend-1", "namespace": "team", "uid": "u", "resourceVersion": "11"},
    "spec": {"requestedCPU": "1", "requestedMemory": "1Gi"},
}
RESERVED = MADE | {"status": {"phase": "Reserved", "reservationName": "rsv-1"}}
HANG_UP = web.Response()


@pytest.fixture
async def server(certificates):
    async with scripted_api.running(certificates.server()) as running:
        yield running


@pytest.fixture
async def backend(server, monkeypatch):
    quick = Backoff(retries=100, first=timedelta(milliseconds=10))
    monkeypatch.setattr(kube_backend, "WATCH_BACKOFF", quick)
    target = KubeTarget(namespace="team", timeout=timedelta(seconds=0.3))
    async with Client.open(server.access(), backoff=Backoff(retries=0)) as client:
        yield KubeBackend(client, target, frozenset({ResourceRequest}))


def script(server, *lists, create=None, delete=None, events=()):
    """`lists`: answers to lists, the last one called for each further one; `events` of the watch."""
    reading = iter(lists[:-1])
    by_method = {
        "POST": lambda: create or found(MADE),
        "GET": lambda: next(reading, None) or lists[-1](),
        "DELETE": lambda: delete or found({}),
    }

    async def answer(request):
        if "watch" in request.query:
            return await watch(*(event("MODIFIED", one) for one in events))(request)
        if (response := by_method[request.method]()) is not HANG_UP:
            return response
        request.transport.abort()
        return web.Response()

    server.answers += [answer] * 1000


def methods(server):
    return [request.method for request in server.asked]


@pytest.mark.parametrize(
    "code, kind",
    [
        (403, Forbidden),
        (401, Unauthenticated),
        (429, Unavailable),
        (503, Unavailable),
        (418, UnexpectedResponse),
    ],
)
async def test_an_object_whose_decision_cannot_be_read_is_deleted(server, backend, code, kind):
    script(server, lambda: status(code, "the reason"))
    with pytest.raises(kind, match=r"the reason.*; it was deleted") as caught:
        await backend.reserve(WANTED)
    assert type(caught.value) is kind
    assert methods(server)[-1] == "DELETE"
    assert (await server.asked[-1].json())["preconditions"] == {"uid": "u"}


async def test_an_object_that_cannot_be_deleted_is_reported(server, backend):
    script(server, lambda: status(401, "who?"), delete=status(401, "who?"))
    with pytest.raises(Unauthenticated, match=r"who\?; it could not be deleted: .*who\?; check"):
        await backend.reserve(WANTED)


@pytest.mark.parametrize(
    "read, create, kind, calls",
    [
        (page(), None, NotFound, ["POST", "GET"]),
        (page(RESERVED), status(403), Forbidden, ["POST"]),
    ],
    ids=["deleted by another client", "not created"],
)
async def test_an_object_that_does_not_exist_is_not_deleted(
    server, backend, read, create, kind, calls
):
    script(server, lambda: read, create=create)
    with pytest.raises(kind):
        await backend.reserve(WANTED)
    assert methods(server) == calls


async def test_errors_that_may_pass_are_retried(server, backend):
    script(server, status(503), HANG_UP, lambda: page(RESERVED))
    assert (await backend.reserve(WANTED)).status.phase == "Reserved"
    assert methods(server) == ["POST", *["GET"] * 3]


async def test_the_decision_is_watched_for(server, backend):
    script(server, lambda: page(MADE), events=[MADE, RESERVED])
    assert (await backend.reserve(WANTED)).status.phase == "Reserved"
    assert methods(server) == ["POST", "GET", "GET"]
    assert server.asked[-1].query["fieldSelector"] == "metadata.name=lend-1"


@pytest.mark.parametrize("key, is_deleted", [("", True), ("deploy-7", False)])
async def test_an_object_that_may_have_been_created_is_deleted_unless_a_key_names_it(
    server, backend, key, is_deleted
):
    script(server, lambda: page(RESERVED), create=HANG_UP)
    with pytest.raises(Unavailable):
        await backend.reserve(WANTED, key=key)
    assert methods(server) == ["POST", "DELETE"][: 1 + is_deleted]


async def test_an_interrupted_command_deletes_its_object(server, backend):
    script(server, lambda: page(MADE))
    task = asyncio.create_task(backend.reserve(WANTED))
    await until(lambda: "GET" in methods(server))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert methods(server)[-1] == "DELETE"


# -- manifests of a cluster namespace


def test_the_manifests_of_a_cluster_namespace_are_for_kubectl(kubelend):
    code, out, _ = kubelend("create clusternamespace --cluster-id Rome")
    namespace, *rest = yaml.safe_load_all(out)
    assert code == 0
    assert namespace["metadata"]["name"] == "cluster-rome"
    assert namespace["metadata"]["labels"] == {"broker.fluidos.eu/cluster-id": "Rome"}
    assert [one["kind"] for one in rest] == [
        *("ClusterSession", "ServiceAccount", "Role", "RoleBinding")
    ]


@pytest.mark.parametrize(
    "flags, problem",
    [
        ("--cluster-id 'a b'", "cannot have a cluster namespace"),
        ("--cluster-id a --namespace No", "'No' is not a valid namespace"),
    ],
)
def test_invalid_names_make_no_manifests(kubelend, flags, problem):
    code, out, err = kubelend(f"create clusternamespace {flags}")
    assert (code, out) == (2, "")
    assert problem in err
