"""What providers answer to what they have to hold: acknowledged, or refused and tried elsewhere."""

import pytest

import make


@pytest.fixture
def r(broker):
    return broker.cluster("r")


@pytest.fixture
async def a(broker):
    found = broker.cluster("a")
    await found.advertise("8", "16Gi")
    return found


@pytest.fixture
async def b(broker):
    found = broker.cluster("b")
    await found.advertise("4", "8Gi")
    return found


async def test_acknowledgement_is_seen_by_the_requester(broker, a, r):
    made = await r.reserve()
    broker.clock.pass_time(5 * make.SECOND)
    first = await a.post("instructions", made["id"], "acknowledge")
    assert first.status == 200
    assert first.json["status"]["acknowledgedAt"] == "2026-01-01T12:00:05Z"
    assert first.json["status"]["phase"] == "Reserved"
    broker.clock.pass_time(5 * make.SECOND)
    assert (await a.post("instructions", made["id"], "acknowledge")).json == first.json
    assert await r.read("reservations", made["id"]) == first.json
    assert await a.read("instructions") == [first.json]


async def test_refused_reservation_moves_to_the_next_best(broker, a, b, r):
    made = await r.reserve("3")
    assert made["targetClusterID"] == "a"
    await a.post("instructions", made["id"], "acknowledge")
    broker.clock.pass_time(make.MINUTE)
    answer = await a.post("instructions", made["id"], "refuse", {"reason": "maintenance"})
    assert answer.status == 200
    moved = answer.json
    assert moved["targetClusterID"] == "b"
    assert moved["previousClusterIDs"] == ["a"]
    assert moved["status"] == {
        "phase": "Reserved",
        "message": "Resources locked in cluster b",
        "reason": "Moved",
        "reservedAt": "2026-01-01T12:01:00Z",
        "expiresAt": "2026-01-01T13:00:00Z",
    }
    assert await r.read("reservations", made["id"]) == moved
    assert await a.read("instructions") == []
    assert await b.read("instructions") == [moved]
    assert (await a.read("advertisements", "a"))["resources"]["available"]["cpu"] == "8"
    assert (await b.read("advertisements", "b"))["resources"]["available"]["cpu"] == "1"


async def test_refusal_is_pushed_to_all_three(broker, a, b, r):
    made = await r.reserve("3")
    async with a.stream() as old, b.stream() as new, r.stream() as requester:
        await old.events(2)
        await requester.events(2)
        await new.event()
        await a.post("instructions", made["id"], "refuse")
        assert (await old.event()).told == ("provider", "Withdraw", made["id"])
        assert (await new.event()).told == ("provider", "Hold", made["id"])
        used = await requester.event()
        assert used.told == ("requester", "Use", made["id"])
        assert used.data["reservation"]["targetClusterID"] == "b"
        assert used.data["message"] == "Use b for 3 CPU / 1Gi Memory"


async def test_reservation_that_all_refuse_fails_and_never_returns(broker, a, b, r):
    made = await r.reserve("3")
    await a.post("instructions", made["id"], "refuse", {"reason": "no"})
    answer = await b.post("instructions", made["id"], "refuse", {"reason": "not me"})
    assert answer.status == 200
    failed = answer.json["status"]
    assert (failed["phase"], failed["reason"]) == ("Failed", "ProviderRefused")
    assert failed["message"] == "Refused by b: not me; then 0/2 clusters fit: 2 LeftBefore"
    for provider in (a, b):
        assert await provider.read("instructions") == []
        again = await provider.post("instructions", made["id"], "refuse")
        assert (again.status, again.json) == (200, answer.json)
        held = await provider.post("instructions", made["id"], "acknowledge")
        assert held.status in {403, 409}


async def test_refusal_without_a_body_or_a_reason_is_taken(a, r):
    made = await r.reserve()
    answer = await a.post("instructions", made["id"], "refuse")
    assert answer.json["status"]["message"].startswith("Refused by a: no reason given; then ")


async def test_pinned_reservation_that_is_refused_goes_nowhere_else(a, b, r):
    made = await r.reserve("3", targetClusterID="a")
    answer = await a.post("instructions", made["id"], "refuse")
    assert answer.json["status"]["phase"] == "Failed"


async def test_provider_cannot_refuse_what_is_in_use(a, r):
    made = await r.reserve()
    await r.post("reservations", made["id"], "activate")
    answer = await a.post("instructions", made["id"], "refuse")
    assert answer.refusal == (409, "WrongPhase")
    assert answer.problem.hint == "drain the cluster instead"
    assert await r.phase_of(made["id"]) == "Active"


async def test_only_the_present_provider_answers(broker, a, b, r):
    made = await r.reserve("3")
    for step in ("acknowledge", "refuse"):
        assert (await r.post("instructions", made["id"], step)).refusal == (403, "Forbidden")
        assert (await b.post("instructions", made["id"], step)).refusal == (404, "NotFound")
    moved = await a.post("instructions", made["id"], "refuse")
    assert (await a.post("instructions", made["id"], "acknowledge")).refusal == (403, "Forbidden")
    # Said again, because the answer was lost: nothing more happens.
    assert (await a.post("instructions", made["id"], "refuse")).json == moved.json
    assert await r.read("reservations", made["id"]) == moved.json


async def test_answer_to_what_is_over_is_refused_also_long_after(start):
    broker = await start(retention=make.MINUTE)
    a, r = broker.cluster("a"), broker.cluster("r")
    await a.advertise()
    made = await r.reserve()
    await r.delete("reservations", made["id"])
    for _ in range(2):
        for step in ("acknowledge", "refuse"):
            answer = await a.post("instructions", made["id"], step)
            assert answer.refusal == (409, "WrongPhase")
        broker.clock.pass_time(make.HOUR)
        await broker.expire()
