"""Requests: the same key gives the same reservation, those that may wait are queued, and lists have pages."""

import asyncio
import itertools
import json

import pytest
from multidict import CIMultiDict

import brokers
import make
from callers import request_body
from kubelend.stores.kubernetes import objects
from kubelend.stores.memory import MemoryStore


@pytest.fixture
async def borrower(broker):
    await broker.cluster("a").advertise("1000", "1000Gi")
    return broker.cluster("r")


async def reserved_cpu(broker):
    found = await broker.cluster("a").read("advertisements", "a")
    return found["resources"]["reserved"]["cpu"]


async def test_same_key_gives_the_same_reservation_whatever_became_of_it(broker, borrower):
    body = request_body("2", "1Gi", duration="1h")
    calls = (borrower.post("reservations", body, key="once") for _ in range(12))
    answers = await asyncio.gather(*calls)
    assert {answer.status for answer in answers} == {201}
    [made] = {answer.json["id"] for answer in answers}
    again = await borrower.reserve("2000m", "1024Mi", duration="60m", key="once")
    assert again["id"] == made, "the same in other words"
    assert await reserved_cpu(broker) == "2"
    other = await borrower.post("reservations", request_body("3"), key="once")
    assert other.refusal == (422, "KeyReused")
    assert other.problem.error.startswith("idempotency key 'once' was used for another request")
    await borrower.delete("reservations", made)
    over = await borrower.reserve("2", "1Gi", duration="1h", key="once")
    assert (over["id"], over["status"]["phase"]) == (made, "Released")
    assert await reserved_cpu(broker) == "0"


async def test_key_has_at_most_255_printable_ascii_characters(borrower):
    assert (await borrower.reserve(key="k" * 255)) == (await borrower.reserve(key="k" * 255))
    of_an_object = objects.request_key_for_uid("0b7c")
    for key in ("k" * 256, "a\u00a0b", "\u202e", "é", of_an_object):
        answer = await borrower.post("reservations", request_body(), key=key)
        assert answer.refusal == (400, "InvalidInput")
        assert answer.problem.detail == "Idempotency-Key: at most 255 printable ASCII characters"


async def test_two_keys_are_refused(broker, borrower):
    """A proxy could pass on either."""
    twice = [("Idempotency-Key", "k"), ("Idempotency-Key", "l")]
    content = json.dumps(request_body()).encode()
    answer = await borrower.call(
        "POST", "reservations", content=content, headers=CIMultiDict(twice)
    )
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.error == "Idempotency-Key: sent 2 times; send one key"
    assert await reserved_cpu(broker) == "0"


@pytest.fixture
async def a(broker):
    found = broker.cluster("a")
    await found.advertise("4", "8Gi")
    return found


async def test_queued_request_is_pending_and_pushed_to_both_sides_when_it_is_placed(broker, a, r):
    held = await broker.cluster("s").reserve("3")
    async with r.stream() as stream, a.stream() as holds:
        await stream.event()
        await holds.events(2)
        waiting = await r.queue("4", wait="30s", priority=3)
        assert waiting["targetClusterID"] == ""
        assert waiting["status"] == {
            "phase": "Pending",
            "message": "Waiting: 0/1 cluster fits: 1 InsufficientCPU",
            "reason": "Waiting",
            "waitUntil": "2026-01-01T12:00:30Z",
        }
        assert (await stream.event()).instruction == ("requester", "Wait", waiting["id"])
        broker.clock.pass_time(10 * make.SECOND)
        await broker.cluster("s").delete("reservations", held["id"])
        assert (await stream.event()).instruction == ("requester", "Use", waiting["id"])
        assert (await holds.event()).instruction == ("provider", "Withdraw", held["id"])
        assert (await holds.event()).instruction == ("provider", "Hold", waiting["id"])
    served = await r.read("reservations", waiting["id"])
    assert (served["targetClusterID"], served["status"]["phase"]) == ("a", "Reserved")
    # The hour that was asked for begins when it is had.
    assert served["status"]["expiresAt"] == "2026-01-01T13:00:10Z"


@pytest.mark.parametrize(
    "limits, problem",
    [
        ({"max_waiting": 2}, "2 requests are already waiting; retry later"),
        (
            {"max_waiting_per_requester": 2},
            "2 requests of r are already waiting; release one, or retry later",
        ),
    ],
)
async def test_no_more_wait_than_the_broker_keeps(start, limits, problem):
    broker = await start(**limits)
    r, other = broker.cluster("r"), request_body("99", wait="1m")
    for _ in range(2):
        await r.queue("99", wait="1m")
    answer = await r.post("reservations", request_body("99", wait="1m"))
    assert answer.refusal == (429, "QueueFull")
    assert answer.problem.error == problem
    is_for_all = "max_waiting" in limits
    assert (await broker.cluster("s").post("reservations", other)).status == (
        429 if is_for_all else 202
    )
    assert answer.headers["Retry-After"] == "1"
    assert answer.problem.retryable is True
    listed = await r.read("reservations", phase="Pending")
    assert len(listed["reservations"]) == 2


COUNT = 2345


def held(number):
    requester = "even" if number % 2 == 0 else "odd"
    return make.held(number, make.request("cpu=1m,memory=1Mi", requester, duration=24 * make.HOUR))


@pytest.fixture
async def long(start):
    """A broker with more reservations and clusters than fit a page."""
    store = MemoryStore()
    clusters = [make.cluster(f"c-{number:04d}") for number in range(COUNT)]
    store.commit(
        [make.cluster("a", "cpu=99,memory=99Gi"), *clusters, *map(held, range(COUNT))], COUNT
    )
    return await start(open_store=brokers.reopening(store))


async def pages(caller, noun, **query):
    """All pages of a list, following `next`."""
    found: list[list[str]] = []
    while True:
        page = await caller.read(noun, **query)
        found.append([one.get("id") or one["advertisement"]["clusterID"] for one in page[noun]])
        if "next" not in page:
            return found
        query["continue"] = page["next"]


async def test_following_next_gives_all_once_and_in_order(long):
    viewer = long.viewer()
    found = await pages(viewer, "reservations", limit="1000")
    assert [len(page) for page in found] == [1000, 1000, COUNT - 2000]
    assert [*itertools.chain(*found)] == [f"rsv-{number:04d}" for number in range(COUNT)]
    found = await pages(viewer, "clusters", limit="1000")
    assert [len(page) for page in found] == [1000, 1000, COUNT + 1 - 2000]
    assert [*itertools.chain(*found)] == ["a", *(f"c-{number:04d}" for number in range(COUNT))]
    for query, count in (({}, 100), ({"limit": "0"}, 1)):
        assert len((await viewer.read("reservations", **query))["reservations"]) == count
    after_all = {"continue": str(COUNT)}
    assert await viewer.read("reservations", **after_all) == {"reservations": []}


async def test_client_that_knows_no_pages_is_shown_all_that_is_open(long):
    """The published agents ask so, and take the answer for everything."""
    for role, name, numbers in (
        ("requester", "odd", range(1, COUNT, 2)),
        ("provider", "a", range(COUNT)),
    ):
        page = await long.cluster(name).read("reservations", role=role)
        assert [one["id"] for one in page["reservations"]] == [f"rsv-{n:04d}" for n in numbers]
        assert "next" not in page


async def test_such_a_client_is_shown_the_newest_that_are_over(broker):
    a, r = broker.cluster("a"), broker.cluster("r")
    await a.advertise("64", "64Gi")
    kept = await r.reserve("1m", "1Mi")
    over = [(await r.reserve("1m", "1Mi"))["id"] for _ in range(103)]
    for name in over:
        await r.delete("reservations", name)
    page = await r.read("reservations", role="requester")
    assert [one["id"] for one in page["reservations"]] == [kept["id"], *over[3:]]
    page = await r.read("reservations", role="requester", phase="Released", limit="2")
    assert [one["id"] for one in page["reservations"]] == over[:2]


@pytest.mark.parametrize(
    "noun, method, path, name",
    [
        ("members", "POST", "members/cluster/{}/revoke", lambda one: one["name"]),
        ("policies", "PUT", "clusters/{}/policy", lambda one: one["clusterID"]),
        ("quotas", "PUT", "quotas/{}", lambda one: one["clusterID"]),
    ],
    ids=["members", "policies", "quotas"],
)
async def test_what_an_admin_sets_is_listed_in_pages_by_name(
    broker, admin, noun, method, path, name
):
    content = b'{"deny": ["x"]}' if noun == "policies" else b"{}"
    for each in ("c", "a", "b"):
        answer = await admin.call(method, *path.format(each).split("/"), content=content)
        assert answer.status == 200
    first = await admin.read(noun, limit="2")
    rest = await admin.read(noun, **{"limit": "2", "continue": first["next"]})
    assert [[name(one) for one in page[noun]] for page in (first, rest)] == [["a", "b"], ["c"]]
    assert "next" not in rest


FILTERS = [
    ({}, ["Reserved", "Active", "Released", "Pending", "lent"]),
    ({"role": "requester"}, ["Reserved", "Active", "Released", "Pending"]),
    ({"role": "provider"}, ["lent"]),
    ({"phase": "Active"}, ["Active"]),
    ({"phase": "Pending,Released"}, ["Released", "Pending"]),
    ({"phase": "Reserved", "role": "requester"}, ["Reserved"]),
    ({"phase": "Failed"}, []),
    ({"phase": ""}, ["Reserved", "Active", "Released", "Pending", "lent"]),
    ({"cluster": "r", "role": "provider"}, ["lent"]),
]


async def test_list_holds_what_the_filters_say(broker):
    """One reservation in each phase but Failed, all of r's; and one that r lends."""
    a, r = broker.cluster("a"), broker.cluster("r")
    await a.advertise("8", "16Gi")
    await r.advertise("8", "16Gi")
    ids = {"Reserved": (await r.reserve())["id"]}
    ids["Active"] = (await r.reserve())["id"]
    await r.post("reservations", ids["Active"], "activate")
    ids["Released"] = (await r.reserve())["id"]
    await r.delete("reservations", ids["Released"])
    ids["Pending"] = (await r.queue("99", wait="1h"))["id"]
    ids["lent"] = (await a.reserve())["id"]
    for query, expected in FILTERS:
        for caller, more in ((r, {}), (broker.viewer(), {"cluster": "r"})):
            listed = await caller.read("reservations", **{**more, **query})
            found = [one["id"] for one in listed["reservations"]]
            assert found == [ids[name] for name in expected], query


NO_FILTERS = [
    ({"role": "boss"}, "role: 'boss' is neither requester nor provider"),
    ({"phase": "Active,Lost"}, "phase: ['Active', 'Lost'] contains an unknown phase"),
    ({"limit": "many"}, "limit: 'many' is not an integer from 0 to 1000"),
    ({"limit": "1001"}, "limit: '1001' is not an integer from 0 to 1000"),
    ({"limit": "-1"}, "limit: '-1' is not an integer from 0 to 1000"),
    ({"limit": "٣"}, "limit: '٣' is not an integer from 0 to 1000"),
    ({"continue": "x"}, "continue: 'x' is not an integer"),
    ({"continue": "9" * 30}, "continue: '" + "9" * 24),
]


async def test_invalid_filter_is_refused_by_name(broker, r):
    for query, detail in NO_FILTERS:
        answer = await r.get("reservations", **query)
        assert answer.refusal == (400, "InvalidInput")
        assert answer.problem.detail.startswith(detail)
    answer = await broker.viewer().get("reservations", role="provider")
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.error == "role: needs a cluster; add cluster=NAME"
