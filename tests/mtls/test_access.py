"""Who may do what: every route, tried by every kind of caller."""

import pytest

import callers
from callers import offer, wish
from kubelend.wire import routes

CALLERS = ("requester", "provider", "stranger", "viewer", "admin")

OPEN = (200, 200, 200, 200, 200)
CLUSTERS_ONLY = (200, 200, 200, 403, 403)
OWN_CLUSTER = (403, 200, 403, 200, 200)
OWN_RESERVATION = (200, 200, 404, 200, 200)
ITS_REQUESTER = (200, 403, 404, 403, 200)
ITS_PROVIDER = (403, 200, 404, 403, 403)
PEOPLE_ONLY = (403, 403, 403, 200, 200)
ADMINS_ONLY = (403, 403, 403, 403, 200)

ACCESS = {
    "publish": CLUSTERS_ONLY,
    "get_advertisement": OWN_CLUSTER,
    "reserve": (201, 201, 201, 403, 403),
    "list_reservations": OPEN,
    "get_reservation": OWN_RESERVATION,
    "release": ITS_REQUESTER,
    "activate": ITS_REQUESTER,
    "renew": ITS_REQUESTER,
    "explain_reservation": OWN_RESERVATION,
    "explain": CLUSTERS_ONLY,
    "instructions": CLUSTERS_ONLY,
    "stream": CLUSTERS_ONLY,
    "acknowledge": ITS_PROVIDER,
    "refuse": ITS_PROVIDER,
    "list_clusters": PEOPLE_ONLY,
    "get_cluster": OWN_CLUSTER,
    "cordon": ADMINS_ONLY,
    "uncordon": ADMINS_ONLY,
    "drain": ADMINS_ONLY,
    "remove_cluster": (403, 403, 403, 403, 204),
    "version": OPEN,
    "openapi": OPEN,
    "healthz": OPEN,
    "readyz": OPEN,
}
"""The status for each of CALLERS: `provider` is the cluster in the path, and lends the reservation there."""


def test_every_route_has_its_row():
    assert set(ACCESS) == set(routes.BY_NAME)


@pytest.mark.parametrize("route", routes.ROUTES, ids=lambda route: route.name)
async def test_each_caller_gets_what_is_documented_and_a_refused_one_changes_nothing(broker, route):
    admin, viewer = broker.admin(), broker.viewer()
    clusters = {name: broker.cluster(name) for name in ("requester", "provider", "stranger")}
    everybody = clusters | {"viewer": viewer, "admin": admin}
    await clusters["provider"].advertise("100", "100Gi")
    await clusters["stranger"].advertise("4", "8Gi")
    made = await clusters["requester"].reserve("1", "1Gi", targetClusterID="provider")
    if route.name == "remove_cluster":
        await clusters["requester"].delete("reservations", made["id"])
    statuses = []
    for caller in CALLERS:
        before = await snapshot(viewer)
        status = await attempt(everybody[caller], route, made["id"])
        statuses.append(status)
        assert status < 400 or await snapshot(viewer) == before, caller
    assert dict(zip(CALLERS, statuses, strict=True)) == dict(
        zip(CALLERS, ACCESS[route.name], strict=True)
    )


async def attempt(caller, route, reservation):
    path = route.path.format(cluster="provider", reservation=reservation)
    if route.name == "stream":
        async with caller.stream() as stream:
            return stream.response.status
    body = {"publish": offer(caller.name), "reserve": wish(), "explain": wish()}.get(route.name)
    if body is not None:
        return (await caller.post(path, body)).status
    return (await caller.call(route.method, path)).status


async def snapshot(viewer):
    """All that anybody can see."""
    return await viewer.read("reservations"), await viewer.read("clusters")


async def test_cluster_lists_only_what_concerns_it(broker):
    a, b, c = (broker.cluster(name) for name in "abc")
    await a.advertise("100", "100Gi")
    mine, others = await b.reserve(), await c.reserve()
    assert ids(await b.read("reservations")) == [mine["id"]]
    assert ids(await c.read("reservations")) == [others["id"]]
    assert ids(await a.read("reservations")) == [mine["id"], others["id"]]
    assert ids(await broker.viewer().read("reservations")) == [mine["id"], others["id"]]
    assert (await b.get("reservations", cluster="c")).refusal == (403, "Forbidden")
    assert ids(await b.read("reservations", cluster="b")) == [mine["id"]]


async def test_stranger_cannot_tell_a_reservation_from_none(broker):
    await broker.cluster("a").advertise()
    made = await broker.cluster("b").reserve()
    stranger = broker.cluster("stranger")
    real = await stranger.get("reservations", made["id"])
    invented = await stranger.get("reservations", "rsv-b-invented")
    assert real.problem.detail.replace(made["id"], "X") == invented.problem.detail.replace(
        "rsv-b-invented", "X"
    )


async def test_another_clusters_advertisement_is_refused_whether_it_exists_or_not(broker):
    await broker.cluster("a").advertise()
    for name in ("a", "nobody"):
        answer = await broker.cluster("b").get("advertisements", name)
        assert answer.refusal == (403, "Forbidden")
    assert (await broker.admin().get("advertisements", "nobody")).refusal == (404, "NotFound")


async def test_person_named_like_a_cluster_is_not_that_cluster(broker):
    a = broker.cluster("a")
    await a.advertise()
    namesake = broker.admin("a")
    assert (await namesake.post("advertisements", offer("a", "1"))).refusal == (403, "Forbidden")
    assert (await a.read("advertisements", "a"))["resources"]["capacity"]["cpu"] == "4"


def ids(listed: callers.Json) -> list[str]:
    return [found["id"] for found in listed["reservations"]]
