"""Many at once: never more is promised than there is, and nothing that fits is refused."""

import asyncio
import random
from functools import partial

import pytest

import brokers
import make
import waiting
from callers import request_body
from kubelend.stores import factory

CLUSTERS = ("a", "b", "c")
CALLERS = 10


@pytest.fixture
async def broker(start, tmp_path):
    return await start(open_store=partial(factory.open_store, str(tmp_path / "kubelend.db")))


async def ask_at_once(broker, bodies):
    """All of them in one moment, by several clusters; gives the answers in the same order."""
    callers = [broker.cluster(f"r{number}") for number in range(CALLERS)]
    calls = (callers[n % CALLERS].post("reservations", body) for n, body in enumerate(bodies))
    return await asyncio.gather(*calls)


def amounts_of(found):
    return make.resources(f"cpu={found['cpu']},memory={found['memory']}")


async def state(broker, name):
    resources = (await broker.cluster(name).read("advertisements", name))["resources"]
    return {part: amounts_of(found) for part, found in resources.items()}


async def test_concurrent_requests_fill_all_capacity_exactly(broker):
    for name in CLUSTERS:
        await broker.cluster(name).advertise("10", "100Gi")
    answers = await ask_at_once(broker, [request_body("1", "1Gi") for _ in range(200)])
    placed = [answer.json for answer in answers if answer.status == 201]
    refused = [answer for answer in answers if answer.status != 201]
    assert len(placed) == 30
    assert {answer.refusal for answer in refused} == {(409, "NoCapacity")}
    assert len({found["id"] for found in placed}) == 30
    for name in CLUSTERS:
        assert sum(found["targetClusterID"] == name for found in placed) == 10
        assert (await state(broker, name))["available"].cpu == 0
        assert len(await broker.cluster(name).read("instructions")) == 10


async def test_concurrent_requests_of_all_sizes_never_overbook(broker):
    dice = random.Random(7)
    for name, cpu in zip(CLUSTERS, ("16", "32", "48"), strict=True):
        await broker.cluster(name).advertise(cpu, "256Gi")
    bodies = [
        request_body(f"{dice.randint(1, 4000)}m", f"{dice.randint(1, 4096)}Mi") for _ in range(200)
    ]
    answers = await ask_at_once(broker, bodies)
    assert {answer.status for answer in answers} == {201, 409}
    states = {name: await state(broker, name) for name in CLUSTERS}
    for name, found in states.items():
        placed = [answer.json for answer in answers if answer.status == 201]
        mine = [
            amounts_of(one["requestedResources"])
            for one in placed
            if one["targetClusterID"] == name
        ]
        assert sum(mine, make.resources("")) == found["reserved"]
        assert found["reserved"].fits_in(found["allocatable"])
    for body, answer in zip(bodies, answers, strict=True):
        if answer.status == 409:
            amounts = amounts_of(body["requestedResources"])
            assert not any(amounts.fits_in(found["available"]) for found in states.values())


async def test_queued_and_immediate_requests_are_all_served(broker):
    """Each gives back what it had; who waits gets it; at the end nothing is held and nobody waits."""
    await broker.cluster("a").advertise("8", "64Gi")
    callers = [broker.cluster(f"r{number}") for number in range(CALLERS)]

    async def live(caller, number):
        made = await caller.post(
            "reservations", request_body(f"{1 + number % 4}", "1Gi", wait="1h")
        )
        assert made.status in {201, 202}
        found = made.json["id"]
        await waiting.until(partial(is_placed, caller, found))
        answer = await caller.delete("reservations", found)
        assert answer.json["status"]["reason"] == "ReleasedByRequester"

    await asyncio.gather(*(live(callers[n % CALLERS], n) for n in range(40)))
    assert (await state(broker, "a"))["reserved"] == make.resources("")
    listed = await broker.viewer().read("reservations", phase="Pending,Reserved")
    assert listed["reservations"] == []


async def is_placed(caller, found):
    return await caller.phase_of(found) == "Reserved"


@pytest.mark.timeout(60)
async def test_concurrent_operations_leave_a_consistent_ledger(start, tmp_path):
    """Advertising, borrowing, giving back, refusing, cordoning and draining, with nobody in order."""
    path = tmp_path / "kubelend.db"
    broker = await start(open_store=partial(factory.open_store, str(path)))
    dice = random.Random()
    admin = broker.admin()
    names = [f"c{number}" for number in range(6)]
    clusters = [broker.cluster(name) for name in names]
    known: list[tuple[str, str]] = []

    async def act():
        caller, other = dice.choice(clusters), dice.choice(names)
        match dice.randrange(8):
            case 0:
                return await caller.post(
                    "advertisements",
                    {"clusterID": caller.name, "resources": {"capacity": amounts(dice)}},
                )
            case 1 if known:
                requester, found = dice.choice(known)
                return await broker.cluster(requester).delete("reservations", found)
            case 2 if known:
                return await caller.post("instructions", dice.choice(known)[1], "refuse")
            case 3:
                return await admin.post(
                    "clusters", other, dice.choice(["cordon", "uncordon", "drain"])
                )
            case 4:
                return await admin.delete("clusters", other)
            case _:
                body = {"requestedResources": amounts(dice, 4)}
                answer = await caller.post("reservations", body | dice.choice([{}, {"wait": "1h"}]))
                if answer.status in {201, 202}:
                    known.append((caller.name, answer.json["id"]))
                return answer

    async def worker():
        return [(await act()).status for _ in range(50)]

    statuses = set().union(*await asyncio.gather(*(worker() for _ in range(12))))
    assert statuses <= {200, 201, 202, 204, 403, 404, 409}
    assert {200, 201, 409} <= statuses
    await broker.expire()
    ledger = brokers.audited(path)
    assert {found for _, found in known} == set(ledger.reservations)


def amounts(dice, most=32):
    return {"cpu": str(dice.randint(1, most)), "memory": f"{dice.randint(1, most)}Gi"}
