"""A request that is sent again reserves nothing again: the same key gives the same reservation."""

import asyncio
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import make
from callers import wish
from kubelend.stores.kubernetes import objects

NUMBERS = itertools.count()


@pytest.fixture
async def r(broker):
    await broker.cluster("a").advertise("1000", "1000Gi")
    return broker.cluster("r")


async def reserved_cpu(broker):
    found = await broker.cluster("a").read("advertisements", "a")
    return found["resources"]["reserved"]["cpu"]


async def test_same_key_gives_the_same_reservation(broker, r):
    first = await r.reserve("2", key="once")
    assert await r.reserve("2", key="once") == first
    assert await reserved_cpu(broker) == "2"


async def test_same_request_in_other_words_is_the_same(r):
    first = await r.reserve("2", "1Gi", duration="1h", key="once")
    assert (await r.reserve("2000m", "1024Mi", duration="60m", key="once"))["id"] == first["id"]


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
async def test_same_key_for_another_request_is_refused(broker, r, other):
    await r.reserve("2", key="once")
    answer = await r.post("reservations", wish(**{"cpu": "2"} | other), key="once")
    assert answer.refusal == (422, "KeyReused")
    assert answer.problem.error.startswith("idempotency key 'once' was used for another request")
    assert await reserved_cpu(broker) == "2"


async def test_without_a_key_every_request_is_its_own(broker, r):
    assert len({(await r.reserve("2"))["id"] for _ in range(3)}) == 3
    assert await reserved_cpu(broker) == "6"


async def test_key_belongs_to_its_requester(broker, r):
    mine = await r.reserve("2", key="once")
    others = await broker.cluster("s").reserve("3", key="once")
    assert mine["id"] != others["id"]
    assert others["requesterID"] == "s"


async def test_answer_is_what_became_of_it(broker, r):
    made = await r.reserve("2", key="once")
    await r.delete("reservations", made["id"])
    again = await r.reserve("2", key="once")
    assert (again["id"], again["status"]["phase"]) == (made["id"], "Released")
    assert await reserved_cpu(broker) == "0"


async def test_refused_request_may_be_sent_again_with_its_key(broker, r):
    refused = await r.post("reservations", wish("2000"), key="once")
    assert refused.refusal == (409, "NoCapacity")
    await broker.cluster("a").advertise("3000", "1000Gi")
    assert (await r.reserve("2000", key="once"))["status"]["phase"] == "Reserved"


async def test_waiting_request_is_found_by_its_key_and_queued_once(broker, r):
    body = wish("2000", wait="1h")
    answers = [await r.post("reservations", body, key="once") for _ in range(3)]
    assert [answer.status for answer in answers] == [202, 202, 202]
    assert len({answer.json["id"] for answer in answers}) == 1
    await broker.cluster("a").advertise("3000", "1000Gi")
    placed = await r.post("reservations", body, key="once")
    assert (placed.status, placed.json["id"]) == (201, answers[0].json["id"])


async def test_key_is_known_until_its_reservation_is_archived(start):
    broker = await start(retention=make.HOUR)
    a, r = broker.cluster("a"), broker.cluster("r")
    await a.advertise()
    made = await r.reserve(key="once", duration="1h")
    broker.clock.pass_time(2 * make.HOUR - make.SECOND)
    assert (await r.reserve(key="once", duration="1h"))["id"] == made["id"]
    broker.clock.pass_time(make.HOUR)
    await broker.expire()
    await a.advertise()
    assert (await r.reserve(key="once", duration="1h"))["id"] != made["id"]


@pytest.mark.parametrize(
    "key",
    [
        *("k" * 256, "a\u00a0b", "\u202e", "é"),
        objects.request_key_for_uid("0b7c"),  # under which the ledger knows what an object asks for
    ],
    ids=ascii,
)
async def test_key_that_is_too_long_or_not_printable_ascii_is_refused(r, key):
    answer = await r.post("reservations", wish(), key=key)
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.detail == "Idempotency-Key: at most 255 printable ASCII characters"


async def test_longest_key_works(r):
    assert (await r.reserve(key="k" * 255)) == (await r.reserve(key="k" * 255))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rounds=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    waits=st.booleans(),
    released=st.booleans(),
)
async def test_same_key_gives_one_reservation_however_often_and_however_concurrently(
    broker, r, rounds, waits, released
):
    """Rounds of calls at once, over connections of their own; perhaps it is given back in between."""
    key = f"key-{next(NUMBERS)}"
    body = wish("1", "1Gi", **({"wait": "1m"} if waits else {}))
    before = await count(broker)
    ids = set()
    for calls in rounds:
        answers = await asyncio.gather(
            *(r.post("reservations", body, key=key) for _ in range(calls))
        )
        assert {answer.status for answer in answers} == {201}
        ids |= {answer.json["id"] for answer in answers}
        if released:
            await r.delete("reservations", min(ids))
    assert len(ids) == 1
    assert await count(broker) == before + (not released)


async def count(broker):
    return int(await reserved_cpu(broker))
