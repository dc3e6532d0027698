"""Whose is it: what a cluster sees and may touch, beside the walk over all routes in `test_roles`."""

import callers
from callers import offer


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
