"""From Reserved to the end: use it, keep it, give it back; long after, what became of it is still known."""

import pytest

import make
from callers import wish


@pytest.fixture
async def a(broker):
    found = broker.cluster("a")
    await found.advertise("8", "16Gi")
    return found


@pytest.fixture
def r(broker):
    return broker.cluster("r")


async def available(a):
    return (await a.read("advertisements", "a"))["resources"]["available"]["cpu"]


async def test_release_gives_back_exactly_once_however_often(a, r):
    made = await r.reserve("3")
    assert await available(a) == "5"
    answers = [await r.delete("reservations", made["id"]) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert answers[0].json["status"] == {
        "phase": "Released",
        "message": "Released by requester r",
        "reason": "ReleasedByRequester",
        "reservedAt": "2026-01-01T12:00:00Z",
        "expiresAt": "2026-01-01T13:00:00Z",
        "finishedAt": "2026-01-01T12:00:00Z",
    }
    assert answers[1].json == answers[2].json == answers[0].json
    assert await available(a) == "8"


async def test_release_by_an_admin_says_so(broker, a, r):
    made = await r.reserve()
    answer = await broker.admin().delete("reservations", made["id"])
    assert answer.json["status"]["reason"] == "ReleasedByAdmin"
    assert answer.json["status"]["message"] == "Released by an administrator"
    assert await r.phase_of(made["id"]) == "Released"


async def test_release_is_idempotent_long_after_it_was_archived(start):
    broker = await start(retention=make.MINUTE)
    await broker.cluster("a").advertise()
    r = broker.cluster("r")
    made = await r.reserve()
    first = await r.delete("reservations", made["id"])
    broker.clock.pass_time(24 * make.HOUR)
    await broker.expire()
    assert (await r.read("reservations"))["reservations"] == []
    again = await r.delete("reservations", made["id"])
    assert (again.status, again.json) == (200, first.json)
    assert await r.read("reservations", made["id"]) == first.json
    assert (await broker.cluster("s").get("reservations", made["id"])).status == 404
    assert (await broker.cluster("s").delete("reservations", made["id"])).status == 404


@pytest.mark.parametrize("step", ["activate", "renew"])
async def test_what_is_over_cannot_be_used_or_kept_also_long_after(start, step):
    broker = await start(retention=make.MINUTE)
    await broker.cluster("a").advertise()
    r = broker.cluster("r")
    made = await r.reserve()
    await r.delete("reservations", made["id"])
    assert (await r.post("reservations", made["id"], step)).refusal == (409, "WrongPhase")
    broker.clock.pass_time(24 * make.HOUR)
    await broker.expire()
    answer = await r.post("reservations", made["id"], step)
    assert answer.refusal == (409, "WrongPhase")
    assert answer.problem.detail == f"{made['id']} is Released"
    assert answer.problem.hint == "the reservation is finished; request a new one"


async def test_archived_reservation_can_still_be_explained(start):
    broker = await start(retention=make.MINUTE)
    r, a = broker.cluster("r"), broker.cluster("a")
    await a.advertise()
    made = await r.reserve()
    await r.delete("reservations", made["id"])
    broker.clock.pass_time(24 * make.HOUR)
    await broker.expire()
    found = await r.read("reservations", made["id"], "explain")
    assert found["total"] == 1


async def test_activation_is_shown_and_saying_it_twice_changes_nothing(broker, a, r):
    made = await r.reserve()
    broker.clock.pass_time(make.MINUTE)
    first = await r.post("reservations", made["id"], "activate")
    assert first.status == 200
    assert first.json["status"]["phase"] == "Active"
    assert first.json["status"]["message"] == "Resources in use in cluster a"
    assert first.json["status"]["activatedAt"] == "2026-01-01T12:01:00Z"
    broker.clock.pass_time(make.MINUTE)
    assert (await r.post("reservations", made["id"], "activate")).json == first.json
    assert await available(a) == "7"
    assert await a.read("instructions") == []


async def test_renewal_counts_from_now_and_never_shortens(broker, a, r):
    made = await r.reserve(duration="1h")
    broker.clock.pass_time(30 * make.MINUTE)
    renew = ("reservations", made["id"], "renew")
    assert expiry(await r.post(*renew, {"duration": "10m"})) == "2026-01-01T13:00:00Z"
    assert expiry(await r.post(*renew)) == "2026-01-01T13:30:00Z"
    assert expiry(await r.post(*renew, {})) == "2026-01-01T13:30:00Z"
    assert expiry(await r.post(*renew, {"duration": "2h"})) == "2026-01-01T14:30:00Z"
    assert expiry(await r.post(*renew, {"duration": "720h"})) == "2026-01-31T12:30:00Z"
    too_long = await r.post(*renew, {"duration": "721h"})
    assert too_long.refusal == (400, "InvalidInput")
    assert too_long.problem.detail.startswith("duration: ")
    assert (await r.read("reservations", made["id"]))["status"]["expiresAt"] == (
        "2026-01-31T12:30:00Z"
    )


async def test_renewed_reservation_outlives_its_first_end(broker, a, r):
    made = await r.reserve("3", duration="1h")
    await r.post("reservations", made["id"], "activate")
    broker.clock.pass_time(59 * make.MINUTE)
    await r.post("reservations", made["id"], "renew")
    broker.clock.pass_time(30 * make.MINUTE)
    assert await r.phase_of(made["id"]) == "Active"
    broker.clock.pass_time(30 * make.MINUTE)
    await a.advertise("8", "16Gi")
    assert await r.phase_of(made["id"]) == "Released"
    assert await available(a) == "8"


async def test_expiry_is_seen_at_once_by_whoever_asks(broker, a, r):
    """Not only after the second in which the broker ends what has expired."""
    made = await r.reserve("8", duration="10s")
    broker.clock.pass_time(10 * make.SECOND)
    assert (await r.reserve("8"))["targetClusterID"] == "a"
    status = (await r.read("reservations", made["id"]))["status"]
    assert (status["phase"], status["reason"]) == ("Released", "Expired")
    assert status["message"] == "Duration elapsed"


async def test_broker_ends_what_is_over_by_itself(broker, a, r):
    """Nobody asks about it; a stream reports it."""
    async with r.stream() as stream:
        made = await r.reserve(duration="10s")
        await stream.events(2)
        broker.clock.pass_time(10 * make.SECOND)
        ended = await stream.event()
        assert ended.told == ("requester", "Stop", made["id"])
        assert ended.data["reservation"]["status"]["reason"] == "Expired"


async def test_what_nobody_knows_is_not_found(r):
    assert (await r.get("reservations", "rsv-r-nothing")).refusal == (404, "NotFound")
    assert (await r.delete("reservations", "rsv-r-nothing")).refusal == (404, "NotFound")
    for step in ("activate", "renew"):
        answer = await r.post("reservations", "rsv-r-nothing", step)
        assert answer.refusal == (404, "NotFound")


async def test_waiting_request_can_be_given_back(a, r):
    waiting = await r.queue("99", wait="1h")
    assert (await r.post("reservations", waiting["id"], "activate")).refusal == (409, "WrongPhase")
    assert (await r.post("reservations", waiting["id"], "renew")).refusal == (409, "WrongPhase")
    assert (await r.delete("reservations", waiting["id"])).status == 200
    await a.advertise("99", "99Gi")
    assert await r.phase_of(waiting["id"]) == "Released"
    assert await a.read("instructions") == []


async def test_renewal_of_an_ended_reservation_takes_nothing(broker, a, r):
    made = await r.reserve("8", duration="10s")
    broker.clock.pass_time(10 * make.SECOND)
    assert (await r.post("reservations", made["id"], "renew")).refusal == (409, "WrongPhase")
    assert (await r.post("reservations", wish("8"))).status == 201


def expiry(answer):
    assert answer.status == 200
    return answer.json["status"]["expiresAt"]
