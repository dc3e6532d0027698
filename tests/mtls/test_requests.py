"""Requests: the same key gives the same reservation, those that may wait are queued, and lists have pages."""

import asyncio
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import brokers
import make
from callers import wish
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import ClusterId
from kubelend.stores.kubernetes import objects
from kubelend.stores.memory import MemoryStore

NUMBERS = itertools.count()


@pytest.fixture
async def borrower(broker):
    await broker.cluster("a").advertise("1000", "1000Gi")
    return broker.cluster("r")


async def reserved_cpu(broker):
    found = await broker.cluster("a").read("advertisements", "a")
    return found["resources"]["reserved"]["cpu"]


async def test_same_key_gives_the_same_reservation(broker, borrower):
    first = await borrower.reserve("2", key="once")
    assert await borrower.reserve("2", key="once") == first
    assert await reserved_cpu(broker) == "2"


async def test_same_request_in_other_words_is_the_same(borrower):
    first = await borrower.reserve("2", "1Gi", duration="1h", key="once")
    assert (await borrower.reserve("2000m", "1024Mi", duration="60m", key="once"))["id"] == first[
        "id"
    ]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"cpu": "3"}, id="amount"),
        pytest.param({"duration": "2h"}, id="duration"),
        pytest.param({"priority": 1}, id="priority"),
        pytest.param({"policy": "binpack"}, id="policy"),
        pytest.param({"targetClusterID": "a"}, id="target"),
        pytest.param({"constraints": {"region": "eu"}}, id="constraints"),
    ],
)
async def test_same_key_for_another_request_is_refused(broker, borrower, other):
    await borrower.reserve("2", key="once")
    answer = await borrower.post("reservations", wish(**{"cpu": "2"} | other), key="once")
    assert answer.refusal == (422, "KeyReused")
    assert answer.problem.error.startswith("idempotency key 'once' was used for another request")
    assert await reserved_cpu(broker) == "2"


async def test_without_a_key_every_request_is_its_own(broker, borrower):
    assert len({(await borrower.reserve("2"))["id"] for _ in range(3)}) == 3
    assert await reserved_cpu(broker) == "6"


async def test_key_belongs_to_its_requester(broker, borrower):
    mine = await borrower.reserve("2", key="once")
    others = await broker.cluster("s").reserve("3", key="once")
    assert mine["id"] != others["id"]
    assert others["requesterID"] == "s"


async def test_answer_is_what_became_of_it(broker, borrower):
    made = await borrower.reserve("2", key="once")
    await borrower.delete("reservations", made["id"])
    again = await borrower.reserve("2", key="once")
    assert (again["id"], again["status"]["phase"]) == (made["id"], "Released")
    assert await reserved_cpu(broker) == "0"


async def test_refused_request_may_be_sent_again_with_its_key(broker, borrower):
    refused = await borrower.post("reservations", wish("2000"), key="once")
    assert refused.refusal == (409, "NoCapacity")
    await broker.cluster("a").advertise("3000", "1000Gi")
    assert (await borrower.reserve("2000", key="once"))["status"]["phase"] == "Reserved"


async def test_waiting_request_is_found_by_its_key_and_queued_once(broker, borrower):
    body = wish("2000", wait="1h")
    answers = [await borrower.post("reservations", body, key="once") for _ in range(3)]
    assert [answer.status for answer in answers] == [202, 202, 202]
    assert len({answer.json["id"] for answer in answers}) == 1
    await broker.cluster("a").advertise("3000", "1000Gi")
    placed = await borrower.post("reservations", body, key="once")
    assert (placed.status, placed.json["id"]) == (201, answers[0].json["id"])


async def test_key_is_known_until_its_reservation_is_archived(start):
    broker = await start(retention=make.HOUR)
    a, borrower = broker.cluster("a"), broker.cluster("r")
    await a.advertise()
    made = await borrower.reserve(key="once", duration="1h")
    broker.clock.pass_time(2 * make.HOUR - make.SECOND)
    assert (await borrower.reserve(key="once", duration="1h"))["id"] == made["id"]
    broker.clock.pass_time(make.HOUR)
    await broker.expire()
    await a.advertise()
    assert (await borrower.reserve(key="once", duration="1h"))["id"] != made["id"]


@pytest.mark.parametrize(
    "key",
    [
        *("k" * 256, "a\u00a0b", "\u202e", "é"),
        objects.request_key_for_uid("0b7c"),  # under which the ledger knows what an object asks for
    ],
    ids=ascii,
)
async def test_key_that_is_too_long_or_not_printable_ascii_is_refused(borrower, key):
    answer = await borrower.post("reservations", wish(), key=key)
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.detail == "Idempotency-Key: at most 255 printable ASCII characters"


async def test_longest_key_works(borrower):
    assert (await borrower.reserve(key="k" * 255)) == (await borrower.reserve(key="k" * 255))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rounds=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    waits=st.booleans(),
    released=st.booleans(),
)
async def test_same_key_gives_one_reservation_however_often_and_however_concurrently(
    broker, borrower, rounds, waits, released
):
    """Rounds of calls at once, over connections of their own; perhaps it is given back in between."""
    key = f"key-{next(NUMBERS)}"
    body = wish("1", "1Gi", **({"wait": "1m"} if waits else {}))
    before = await count(broker)
    ids = set()
    for calls in rounds:
        answers = await asyncio.gather(
            *(borrower.post("reservations", body, key=key) for _ in range(calls))
        )
        assert {answer.status for answer in answers} == {201}
        ids |= {answer.json["id"] for answer in answers}
        if released:
            await borrower.delete("reservations", min(ids))
    assert len(ids) == 1
    assert await count(broker) == before + (not released)


async def count(broker):
    return int(await reserved_cpu(broker))


@pytest.fixture
async def a(broker):
    found = broker.cluster("a")
    await found.advertise("4", "8Gi")
    return found


async def test_request_that_may_wait_is_pending(a, r):
    waiting = await r.queue("6", wait="30s", priority=3)
    assert waiting["targetClusterID"] == ""
    assert waiting["status"] == {
        "phase": "Pending",
        "message": "Waiting: 0/1 cluster fits: 1 InsufficientCPU",
        "reason": "Waiting",
        "waitUntil": "2026-01-01T12:00:30Z",
    }
    assert await r.read("reservations", waiting["id"]) == waiting
    assert await a.read("instructions") == []


async def test_request_that_may_wait_is_placed_at_once_where_it_fits(a, r):
    assert (await r.reserve("4", wait="30s"))["status"]["phase"] == "Reserved"


async def test_waiter_is_served_when_another_gives_back(broker, a, r):
    held = await broker.cluster("s").reserve("3")
    waiting = await r.queue("4", wait="1m")
    broker.clock.pass_time(10 * make.SECOND)
    await broker.cluster("s").delete("reservations", held["id"])
    served = await r.read("reservations", waiting["id"])
    assert served["targetClusterID"] == "a"
    assert served["status"]["phase"] == "Reserved"
    assert served["status"]["message"] == "Resources locked in cluster a"
    # The hour that was asked for begins when it is had.
    assert served["status"]["expiresAt"] == "2026-01-01T13:00:10Z"
    assert [found["id"] for found in await a.read("instructions")] == [waiting["id"]]


@pytest.mark.parametrize("how", ["advertise", "uncordon", "expire"])
async def test_waiter_is_served_however_capacity_appears(broker, a, r, how):
    if how == "uncordon":
        await broker.admin().post("clusters", "a", "cordon")
        waiting = await r.queue("4", wait="1m")
        await broker.admin().post("clusters", "a", "uncordon")
    elif how == "advertise":
        waiting = await r.queue("6", wait="1m")
        await broker.cluster("b").advertise("6", "8Gi")
    else:
        await broker.cluster("s").reserve("3", duration="10s")
        waiting = await r.queue("4", wait="1m")
        broker.clock.pass_time(10 * make.SECOND)
    assert await r.phase_of(waiting["id"]) == "Reserved"


async def test_waiter_whose_time_is_over_fails_and_is_not_served_later(broker, a, r):
    waiting = await r.queue("6", wait="30s")
    broker.clock.pass_time(30 * make.SECOND)
    failed = (await r.read("reservations", waiting["id"]))["status"]
    assert (failed["phase"], failed["reason"]) == ("Failed", "WaitTimedOut")
    assert failed["message"] == ("No cluster fitted in time: 0/1 cluster fits: 1 InsufficientCPU")
    assert failed["finishedAt"] == "2026-01-01T12:00:30Z"
    await a.advertise("99", "99Gi")
    assert await r.phase_of(waiting["id"]) == "Failed"
    assert (await a.read("advertisements", "a"))["resources"]["reserved"]["cpu"] == "0"


async def test_waiters_are_served_by_priority_then_by_age(broker, a, r):
    first = await r.queue("6", wait="1m")
    second = await r.queue("6", wait="1m")
    urgent = await r.queue("6", wait="1m", priority=5)
    for served in (urgent, first, second):
        await a.advertise("6", "8Gi")
        phases = {await r.phase_of(served["id"])}
        assert phases == {"Reserved"}
        await r.delete("reservations", served["id"])


async def test_big_waiter_is_not_starved_by_small_requests(broker, a, r):
    """What comes free adds up for it, although small ones would fit there."""
    held = [await broker.cluster("s").reserve("2") for _ in range(2)]
    big = await r.queue("4", wait="1m")
    await broker.cluster("s").delete("reservations", held[0]["id"])
    small = await broker.cluster("s").post("reservations", wish("1"))
    assert small.refusal == (409, "NoCapacity")
    assert "HeldForWaiter" in small.problem.error
    await broker.cluster("s").delete("reservations", held[1]["id"])
    assert await r.phase_of(big["id"]) == "Reserved"


async def test_no_more_wait_than_the_broker_keeps(start):
    broker = await start(max_waiting=2)
    r = broker.cluster("r")
    for _ in range(2):
        await r.queue("99", wait="1m")
    answer = await r.post("reservations", wish("99", wait="1m"))
    assert answer.refusal == (429, "QueueFull")
    assert answer.headers["Retry-After"] == "1"
    assert answer.problem.retryable is True
    listed = await r.read("reservations", phase="Pending")
    assert len(listed["reservations"]) == 2


@pytest.mark.parametrize(
    "wait, limit, detail",
    [
        pytest.param(
            "1h0m1s",
            make.HOUR,
            "wait: 1h0m1s exceeds the broker's maximum",
            id="longer than allowed",
        ),
        pytest.param(
            "1s", make.HOUR * 0, "wait: 1s exceeds the broker's maximum", id="none may wait"
        ),
        pytest.param("soon", make.HOUR, "wait: ", id="no duration"),
        pytest.param("-1s", make.HOUR, "wait: ", id="negative"),
    ],
)
async def test_wait_that_is_not_possible_is_refused(start, wait, limit, detail):
    broker = await start(max_wait=limit)
    answer = await broker.cluster("r").post("reservations", wish(wait=wait))
    assert answer.status == 400
    assert answer.problem.detail.startswith(detail)


async def test_stream_tells_the_requester_to_wait_and_then_what_became_of_it(broker, a, r):
    async with r.stream() as stream, a.stream() as holds:
        await stream.event()
        waiting = await r.queue("6", wait="1m")
        assert (await stream.event()).told == ("requester", "Wait", waiting["id"])
        await a.advertise("6", "8Gi")
        assert (await stream.event()).told == ("requester", "Use", waiting["id"])
        await holds.event()
        assert (await holds.event()).told == ("provider", "Hold", waiting["id"])


COUNT = 2345


def held(number):
    requester = "even" if number % 2 == 0 else "odd"
    return make.reservation(
        f"rsv-{number:04d}",
        make.request("cpu=1m,memory=1Mi", requester, duration=24 * make.HOUR),
        phase=Phase.RESERVED,
        reason=Reason.LOCKED,
        target=ClusterId("a"),
        reserved_at=make.T0,
        expires_at=make.T0 + 24 * make.HOUR,
        ticket=number + 1,
        revision=number + 1,
    )


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


def joined(found):
    return list(itertools.chain.from_iterable(found))


async def test_following_next_gives_all_reservations_once_and_in_order(long):
    found = await pages(long.viewer(), "reservations", limit="1000")
    assert [len(page) for page in found] == [1000, 1000, COUNT - 2000]
    assert joined(found) == [f"rsv-{number:04d}" for number in range(COUNT)]


async def test_page_has_a_hundred_unless_told_otherwise(long):
    page = await long.viewer().read("reservations")
    assert len(page["reservations"]) == 100


@pytest.mark.parametrize("role, name", [("requester", "odd"), ("provider", "a")])
async def test_client_that_knows_no_pages_is_shown_all_that_is_open(long, role, name):
    """The published agents ask so, and take the answer for everything."""
    page = await long.cluster(name).read("reservations", role=role)
    numbers = range(1, COUNT, 2) if name == "odd" else range(COUNT)
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


async def test_pages_of_one_cluster_hold_only_its_own(long):
    odd = long.cluster("odd")
    found = joined(await pages(odd, "reservations", limit="500"))
    assert found == [f"rsv-{number:04d}" for number in range(1, COUNT, 2)]
    a = long.cluster("a")
    assert len(joined(await pages(a, "reservations", limit="1000", role="provider"))) == COUNT
    assert await pages(a, "reservations", role="requester") == [[]]


async def test_page_that_ends_exactly_at_the_end_has_no_next(long):
    viewer = long.viewer()
    last = await viewer.read("reservations", limit="345", **{"continue": "2000"})
    assert len(last["reservations"]) == 345
    assert "next" not in last
    assert await viewer.read("reservations", **{"continue": str(COUNT)}) == {"reservations": []}


async def test_what_changes_between_pages_is_neither_lost_nor_repeated(long):
    viewer, even = long.viewer(), long.cluster("even")
    first = await viewer.read("reservations", limit="1000")
    for number in (0, 1500):
        await even.delete("reservations", f"rsv-{number:04d}")
    made = await even.reserve("1m", "1Mi")
    rest = await pages(viewer, "reservations", limit="1000", **{"continue": first["next"]})
    ids = [found["id"] for found in first["reservations"]] + joined(rest)
    assert ids == [*(f"rsv-{number:04d}" for number in range(COUNT)), made["id"]]


async def test_following_next_gives_all_clusters_once_and_in_order(long):
    found = await pages(long.admin(), "clusters", limit="1000")
    assert [len(page) for page in found] == [1000, 1000, COUNT + 1 - 2000]
    assert joined(found) == ["a", *(f"c-{number:04d}" for number in range(COUNT))]


@pytest.fixture
async def mixed(broker):
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
    return broker, {found: name for name, found in ids.items()}


@pytest.mark.parametrize(
    "query, expected",
    [
        ({}, ["Reserved", "Active", "Released", "Pending", "lent"]),
        ({"role": "requester"}, ["Reserved", "Active", "Released", "Pending"]),
        ({"role": "provider"}, ["lent"]),
        ({"phase": "Active"}, ["Active"]),
        ({"phase": "Pending,Released"}, ["Released", "Pending"]),
        ({"phase": "Reserved", "role": "requester"}, ["Reserved"]),
        ({"phase": "Failed"}, []),
        ({"phase": ""}, ["Reserved", "Active", "Released", "Pending", "lent"]),
        ({"cluster": "r", "role": "provider"}, ["lent"]),
    ],
    ids=str,
)
async def test_list_holds_what_the_filters_say(mixed, query, expected):
    broker, names = mixed
    for caller, more in ((broker.cluster("r"), {}), (broker.viewer(), {"cluster": "r"})):
        listed = await caller.read("reservations", **{**more, **query})
        assert [names[found["id"]] for found in listed["reservations"]] == expected


@pytest.mark.parametrize(
    "query, detail",
    [
        ({"role": "boss"}, "role: 'boss' is neither requester nor provider"),
        ({"phase": "Active,Lost"}, "phase: ['Active', 'Lost'] contains an unknown phase"),
        ({"limit": "many"}, "limit: 'many' is not an integer from 0 to 1000"),
        ({"limit": "1001"}, "limit: '1001' is not an integer from 0 to 1000"),
        ({"limit": "-1"}, "limit: '-1' is not an integer from 0 to 1000"),
        ({"limit": "٣"}, "limit: '٣' is not an integer from 0 to 1000"),
        ({"continue": "x"}, "continue: 'x' is not an integer"),
        ({"continue": "9" * 30}, "continue: '" + "9" * 24),
    ],
    ids=str,
)
async def test_filter_that_cannot_be_is_refused_by_name(broker, query, detail):
    answer = await broker.cluster("r").get("reservations", **query)
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.detail.startswith(detail)


async def test_person_who_filters_by_role_has_to_say_whose(broker):
    answer = await broker.viewer().get("reservations", role="provider")
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.error == "role: needs a cluster; add cluster=NAME"


async def test_limit_of_zero_is_one(mixed):
    broker, _ = mixed
    page = await broker.cluster("r").read("reservations", limit="0")
    assert len(page["reservations"]) == 1
