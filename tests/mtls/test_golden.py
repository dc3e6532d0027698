"""The published contract to the letter: what existing clients send, and every field that they read back."""

import json
import re

import pytest

import make
from callers import Json, wish

OFFER: Json = {
    "clusterID": "agent-cluster-2",
    "clusterName": "cluster-advertisement",
    "timestamp": "2026-01-01T11:59:58Z",
    "resources": {
        "capacity": {"cpu": "10", "memory": "8025424Ki"},
        "allocatable": {"cpu": "10", "memory": "8025424Ki"},
        "allocated": {"cpu": "1050m", "memory": "418Mi"},
        "available": {"cpu": "8950m", "memory": "7597392Ki"},
    },
}
ASK = {
    "requestedResources": {"cpu": "500m", "memory": "256Mi"},
    "priority": 10,
    "duration": "1h",
}


@pytest.fixture
def requester(broker):
    return broker.cluster("agent-cluster-1")


@pytest.fixture
async def provider(broker):
    found = broker.cluster("agent-cluster-2")
    assert (await found.post("advertisements", OFFER)).status == 200
    return found


async def available(provider):
    found = await provider.read("advertisements", provider.name)
    return found["resources"]["available"]


async def test_advertisement_is_answered_with_the_brokers_view_of_it(broker):
    answer = await broker.cluster("agent-cluster-2").post("advertisements", OFFER)
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json == {
        "advertisement": {
            **OFFER,
            "resources": {**OFFER["resources"], "reserved": {"cpu": "0", "memory": "0"}},
        }
    }


async def test_reservation_is_answered_with_201_and_every_field_of_the_golden_pair(
    requester, provider
):
    answer = await requester.post("reservations", ASK)
    assert answer.status == 201
    body = answer.json
    assert re.fullmatch(r"rsv-agent-cluster-1-[0-9a-f]{16}", body.pop("id"))
    assert body.pop("revision") > 0
    assert body == {
        "requesterID": "agent-cluster-1",
        "targetClusterID": "agent-cluster-2",
        "requestedResources": {"cpu": "500m", "memory": "256Mi"},
        "status": {
            "phase": "Reserved",
            "message": "Resources locked in cluster agent-cluster-2",
            "reason": "Locked",
            "reservedAt": "2026-01-01T12:00:00Z",
            "expiresAt": "2026-01-01T13:00:00Z",
        },
        "createdAt": "2026-01-01T12:00:00Z",
        "priority": 10,
        "duration": "1h0m0s",
    }


async def test_provider_reads_the_same_reservation_everywhere(requester, provider):
    made = (await requester.post("reservations", ASK)).json
    assert await provider.read("instructions") == [made]
    assert await provider.read("reservations", role="provider") == {"reservations": [made]}
    assert await requester.read("reservations", role="requester") == {"reservations": [made]}
    again = (await provider.post("advertisements", OFFER)).json
    assert again["providerInstructions"] == [made]
    assert again["advertisement"]["resources"]["reserved"] == {"cpu": "500m", "memory": "256Mi"}
    assert again["advertisement"]["resources"]["available"] == {
        "cpu": "8450m",
        "memory": "7335248Ki",
    }


async def test_no_instructions_are_an_empty_list(provider):
    answer = await provider.get("instructions")
    assert (answer.status, answer.content) == (200, b"[]")


async def test_instructions_hold_only_what_is_reserved(requester, provider):
    made = await requester.reserve("1", "1Gi")
    await requester.post("reservations", made["id"], "activate")
    assert await provider.read("instructions") == []


async def test_advertisement_can_be_read_back_with_what_is_reserved(requester, provider):
    await requester.reserve("3", "1Gi")
    found = await provider.read("advertisements", "agent-cluster-2")
    assert found["clusterID"] == "agent-cluster-2"
    assert found["clusterName"] == "cluster-advertisement"
    assert found["timestamp"] == "2026-01-01T11:59:58Z"
    assert found["resources"]["reserved"] == {"cpu": "3", "memory": "1Gi"}
    assert found["resources"]["available"] == {"cpu": "5950m", "memory": "6548816Ki"}


async def test_locking_example_refuses_the_third_and_changes_nothing(requester, provider):
    assert (await available(provider))["cpu"] == "8950m"
    await requester.reserve("3", "256Mi")
    assert (await available(provider))["cpu"] == "5950m"
    await requester.reserve("5", "256Mi")
    assert (await available(provider))["cpu"] == "950m"
    refused = await requester.post("reservations", wish("2", "256Mi"))
    assert refused.status == 409
    assert (await available(provider))["cpu"] == "950m"
    assert len(await provider.read("instructions")) == 2


async def test_refusal_carries_its_text_under_the_key_error(requester, provider):
    answer = await requester.post("reservations", wish("20"))
    assert answer.status == 409
    assert answer.headers["Content-Type"] == "application/problem+json"
    body = json.loads(answer.content)
    # The requester has not advertised, so one cluster is known.
    assert body["error"].startswith("no suitable cluster: 0/1 cluster fits: 1 InsufficientCPU")
    assert body["code"] == "NoCapacity"
    assert body["status"] == 409


@pytest.mark.parametrize(
    "free, size, winner",
    [
        pytest.param(("2", "2"), ("4", "8"), "tight", id="2 free of 4 beats 2 free of 8"),
        pytest.param(("2", "2"), ("4", "4"), "roomy", id="equal scores: the smaller ID"),
    ],
)
async def test_default_selection_takes_the_most_headroom_after_fulfilment(
    broker, requester, free, size, winner
):
    for name, cpu_free, cpu in zip(("tight", "roomy"), free, size, strict=True):
        capacity = {"cpu": cpu, "memory": "8Gi"}
        used = {"cpu": str(int(cpu) - int(cpu_free)), "memory": "4Gi"}
        resources = {"capacity": capacity, "allocatable": capacity, "allocated": used}
        body = {"clusterID": name, "resources": resources}
        assert (await broker.cluster(name).post("advertisements", body)).status == 200
    made = await requester.reserve("500m", "256Mi")
    assert made["targetClusterID"] == winner


async def test_exact_fit_fits(requester, provider):
    made = await requester.reserve("8950m", "7597392Ki")
    assert made["targetClusterID"] == "agent-cluster-2"
    assert await available(provider) == {"cpu": "0", "memory": "0"}


async def test_requester_never_serves_itself(provider):
    answer = await provider.post("reservations", wish("1"))
    assert answer.refusal == (409, "NoCapacity")
    assert answer.problem.error.startswith("no suitable cluster: 0/1 cluster fits: 1 IsRequester")


async def test_expiry_gives_the_amount_back_exactly_once(broker, requester, provider):
    made = await requester.reserve("3", "1Gi", duration="1h")
    broker.clock.pass_time(make.HOUR)
    await provider.post("advertisements", OFFER)
    assert await available(provider) == OFFER["resources"]["available"]
    assert (await requester.delete("reservations", made["id"])).status == 200
    assert await available(provider) == OFFER["resources"]["available"]


@pytest.mark.parametrize(
    "free, score, rating",
    [
        pytest.param(("10", "20Gi"), "66.67", "Moderate", id="two thirds"),
        pytest.param(("15", "30Gi"), "100.00", "Excellent", id="empty"),
        pytest.param(("13500m", "27Gi"), "90.00", "Excellent", id="from 90"),
        pytest.param(("10500m", "21Gi"), "70.00", "Good", id="from 70"),
        pytest.param(("7500m", "15Gi"), "50.00", "Moderate", id="from 50"),
        pytest.param(("0", "0"), "0.00", "Limited", id="full"),
    ],
)
async def test_display_score_is_half_cpu_and_half_memory(broker, free, score, rating):
    cpu, memory = (make.resources(f"cpu={free[0]},memory={free[1]}").amount(n) for n in MEASURES)
    used = {"cpu": f"{15000 - cpu}m", "memory": str(30 * 2**30 - memory)}
    resources = {"capacity": {"cpu": "15", "memory": "30Gi"}, "allocated": used}
    a = broker.cluster("a")
    assert (
        await a.post("advertisements", {"clusterID": "a", "resources": resources})
    ).status == 200
    status = (await a.read("clusters", "a"))["status"]
    assert (status["score"], status["rating"]) == (score, rating)


MEASURES = ("cpu", "memory")


async def test_cluster_without_allocatable_memory_scores_nothing(broker):
    a = broker.cluster("a")
    await a.advertise("4", "0")
    assert (await a.read("clusters", "a"))["status"]["score"] == "0.00"


async def test_advertisement_is_stale_after_ten_minutes_by_default(broker, requester, provider):
    broker.clock.pass_time(10 * make.MINUTE - make.SECOND)
    assert (await provider.read("clusters", provider.name))["status"]["phase"] == "Active"
    await requester.reserve("1")
    broker.clock.pass_time(make.SECOND)
    status = (await provider.read("clusters", provider.name))["status"]
    assert (status["phase"], status["active"]) == ("Stale", False)
    assert (await requester.post("reservations", wish("1"))).refusal == (409, "NoCapacity")


async def test_health_says_ok(requester):
    answer = await requester.get("/healthz")
    assert (answer.status, answer.content) == (200, b"ok")
