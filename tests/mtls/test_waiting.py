"""Requests that would rather wait than hear no: queued, served when capacity appears, or failed in time."""

import pytest

import make
from callers import wish


@pytest.fixture
async def a(broker):
    found = broker.cluster("a")
    await found.advertise("4", "8Gi")
    return found


@pytest.fixture
def r(broker):
    return broker.cluster("r")


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
