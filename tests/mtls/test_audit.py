"""The audit log over the wire: every change and every refusal, with who, from where, before and after."""

import aiohttp
import pytest

import make
from callers import offer, request_body


async def log(broker, **query):
    answer = await broker.viewer().get("audit", **query)
    assert answer.status == 200, answer.content
    return answer.json["lines"]


@pytest.mark.broker(fails=True)
async def test_whole_life_is_logged_with_who_and_from_where(broker, store):
    await broker.cluster("a").post("advertisements", offer("a"))
    b = broker.cluster("b")
    made = (await b.post("reservations", request_body("1"))).json
    await b.post("reservations", made["id"], "activate")
    await broker.admin().delete("reservations", made["id"])
    released, activated, requested, advertised = await log(broker)
    digests = [line.digest.hex() for line in store.audit_lines(0, 10)]
    assert [advertised["digest"], requested["digest"]] == digests[:2]
    assert (advertised["action"], activated["action"]) == ("Advertised", "Activated")
    assert (requested["action"], released["action"]) == ("Requested", "Released")
    assert requested["actor"] == {"name": "b", "role": "cluster", "remote": "127.0.0.1"}
    assert requested["subject"] == f"reservation/{made['id']}"
    assert released["actor"]["role"] == "admin"
    assert released["before"] == {"phase": "Active", "reason": "InUse"}
    assert released["after"] == {"phase": "Released", "reason": "ReleasedByAdmin"}


async def test_end_that_nobody_asked_for_is_the_brokers(broker):
    await broker.cluster("a").post("advertisements", offer("a"))
    await broker.cluster("b").post("reservations", request_body("1", duration="1m"))
    broker.clock.pass_time(make.MINUTE)
    await broker.expire()
    ended = (await log(broker))[0]
    assert ended["actor"] == {"name": "broker", "role": "broker"}
    assert ended["after"]["reason"] == "Expired"


async def test_refusals_are_logged_and_change_nothing(broker):
    b = broker.cluster("b")
    await b.post("reservations", request_body("1"))
    await b.get("clusters")
    await b.post("advertisements", offer("a"))
    spoofed, forbidden, nothing = await log(broker, refused="true")
    assert (nothing["action"], nothing["code"]) == ("reserve", "NoCapacity")
    assert "no cluster has advertised yet" in nothing["message"]
    assert (forbidden["action"], forbidden["code"]) == ("list_clusters", "Forbidden")
    assert (spoofed["action"], spoofed["code"]) == ("publish", "Forbidden")
    assert await log(broker, refused="false") == []


async def test_reservation_that_is_hidden_is_logged_as_such(broker):
    await broker.cluster("a").post("advertisements", offer("a"))
    made = (await broker.cluster("b").post("reservations", request_body("1"))).json
    answer = await broker.cluster("c").get("reservations", made["id"])
    assert answer.refusal == (404, "NotFound")
    (hidden,) = await log(broker, refused="true")
    assert (hidden["actor"]["name"], hidden["action"]) == ("c", "get_reservation")
    assert hidden["code"] == "Hidden"
    assert hidden["subject"] == f"reservation/{made['id']}"


async def test_handshake_that_is_refused_is_logged(broker, certificates):
    with pytest.raises(aiohttp.ClientError):
        await broker.holder(certificates.stranger("mallory")).get("version")
    refused, *_ = await log(broker, refused="true")
    assert (refused["action"], refused["code"]) == ("handshake", "HandshakeRefused")
    assert refused["actor"] == {"name": "", "role": "unknown", "remote": "127.0.0.1"}


async def test_mistakes_are_no_refusals(broker):
    await broker.cluster("b").post("reservations", {"requestedResources": {}})
    await broker.cluster("b").get("reservations", "nobody")
    assert await log(broker) == []


async def test_lines_are_found_by_actor_action_subject_and_time(broker):
    await broker.cluster("a").post("advertisements", offer("a"))
    made = (await broker.cluster("b").post("reservations", request_body("1"))).json
    broker.clock.pass_time(40 * make.MINUTE)
    await broker.admin().post("clusters", "a", "cordon")

    async def actions(**query):
        return [line["action"] for line in await log(broker, **query)]

    assert await actions(actor="b") == ["Requested"]
    assert await actions(action="Cordoned") == ["Cordoned"]
    assert await actions(subject="a") == ["Cordoned", "Requested", "Advertised"]
    assert await actions(subject=made["id"]) == ["Requested"]
    assert await actions(since="2026-01-01T12:30:00Z") == ["Cordoned"]
    assert await actions(until="2026-01-01T14:30:00+02:00") == ["Requested", "Advertised"]


async def test_long_log_comes_in_pages(broker):
    admin = broker.admin()
    await broker.cluster("a").post("advertisements", offer("a"))
    for _ in range(3):
        await admin.post("clusters", "a", "cordon")
        await admin.post("clusters", "a", "uncordon")
    first = (await admin.get("audit", limit="4")).json
    rest = (await admin.get("audit", limit="4", **{"continue": first["next"]})).json
    numbers = [line["number"] for line in first["lines"] + rest["lines"]]
    assert numbers == [7, 6, 5, 4, 3, 2, 1]
    assert "next" not in rest


async def test_filter_that_cannot_be_read_is_refused(broker):
    for query in ({"since": "yesterday"}, {"until": "2026-01-01T12:00:00"}, {"refused": "perhaps"}):
        answer = await broker.viewer().get("audit", **query)
        assert answer.refusal == (400, "InvalidInput"), query


async def test_every_route_that_changes_something_is_logged_with_its_caller(broker):
    """Whoever adds a route with an effect does not have to think of the audit log."""
    a, b, admin = broker.cluster("a"), broker.cluster("b"), broker.admin()
    await a.post("advertisements", offer("a"))
    await broker.cluster("c").post("advertisements", offer("c", "1"))
    one = (await b.post("reservations", request_body("2"))).json["id"]
    await a.post("instructions", one, "acknowledge")
    await b.post("reservations", one, "renew", {"duration": "3h"})
    await b.post("reservations", one, "activate")
    await b.delete("reservations", one)
    two = (await b.post("reservations", request_body("2"))).json["id"]
    await a.post("instructions", two, "refuse")
    await admin.post("clusters", "a", "cordon")
    await admin.post("clusters", "a", "uncordon")
    await admin.delete("clusters", "a")
    lines = await log(broker, refused="false", limit="100")
    actions = [(line["actor"]["name"], line["action"]) for line in reversed(lines)]
    assert [" ".join(one) for one in actions] == [
        *("a Advertised", "c Advertised", "b Requested", "a Acknowledged", "b Renewed"),
        *("b Activated", "b Released", "b Requested", "a Failed", "alice Cordoned"),
        *("alice Uncordoned", "alice ClusterRemoved"),
    ]
