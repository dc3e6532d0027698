"""Reservations: where a request goes, what is tried out, how one lives and ends, and its signed grant."""

from typing import Any

import msgspec
import pytest

import brokers
import make
from callers import offer, request_body
from kubelend.pki.grants import JwkSet, verify_grant

pytestmark = pytest.mark.broker(explain_others="names")


@pytest.fixture
async def fleet(broker):
    await advertise_all(broker)


async def advertise_all(broker):
    """Three clusters of different size, price and place."""
    fields = {
        "cheap": ("4", "8Gi", {"region": "eu", "cost": cost("0.01")}),
        "large": ("16", "32Gi", {"region": "us", "cost": cost("0.10")}),
        "plain": ("8", "16Gi", {"labels": {"tier": "gold"}}),
    }
    for name, (cpu, memory, more) in fields.items():
        await broker.cluster(name).advertise(cpu, memory, **more)


def cost(price):
    return {"cpuCost": price, "memoryCost": "0", "currency": "USD"}


CHOICES: list[tuple[dict[str, Any], str]] = [
    ({}, "large"),
    ({"policy": "headroom"}, "large"),
    ({"policy": "binpack"}, "cheap"),
    ({"policy": "cost"}, "cheap"),
    ({"policy": "balanced"}, "cheap"),
    ({"weights": {"packing": 1}}, "cheap"),
    ({"weights": {"price": 0.001, "headroom": 1000}}, "large"),
    ({"targetClusterID": "plain"}, "plain"),
    ({"constraints": {"exclude": ["large"]}}, "plain"),
    ({"constraints": {"region": "eu"}}, "cheap"),
    ({"constraints": {"labels": {"tier": "gold"}}}, "plain"),
    ({"constraints": {"maxPricePerHour": "0.05"}}, "plain"),
]


@pytest.mark.usefixtures("fleet")
async def test_request_goes_where_it_asks_to(r):
    for fields, target in CHOICES:
        made = await r.reserve("1", "1Gi", **fields)
        assert made["targetClusterID"] == target, fields
        assert (await r.delete("reservations", made["id"])).status == 200


@pytest.mark.usefixtures("fleet")
async def test_refusal_counts_the_reasons_and_says_what_would_help(r):
    answer = await r.post("reservations", request_body("17", "1Gi"))
    assert answer.refusal == (409, "NoCapacity")
    detail = "no suitable cluster: 0/3 clusters fit: 3 InsufficientCPU"
    assert (answer.problem.detail, answer.problem.hint) == (
        detail,
        "large fits if you request 1 cpu less",
    )
    explanation = answer.json["explanation"]
    assert (explanation["total"], explanation["fitting"]) == (3, 0)
    assert explanation["rejections"] == {"InsufficientCPU": 3}
    text = answer.problem.hint
    assert explanation["suggestion"] == {"clusterID": "large", "text": text, "less": {"cpu": "1"}}
    unknown = await r.post("reservations", request_body(targetClusterID="nobody"))
    assert "3 NotPinned; cluster 'nobody' is unknown" in unknown.problem.detail


@pytest.mark.usefixtures("fleet")
async def test_dry_run_says_where_it_would_go_and_changes_nothing(broker, r):
    before = await everything(broker)
    answer = await r.post("reservations", request_body(policy="binpack"), key="k", dryRun="true")
    assert answer.status == 200
    assert answer.json["candidates"][0]["clusterID"] == "cheap"
    assert (answer.json["total"], answer.json["fitting"]) == (3, 3)
    refused = await r.post("reservations", request_body("99"), dryRun="true")
    assert refused.refusal == (409, "NoCapacity")
    assert "explanation" in refused.json
    assert await everything(broker) == before
    assert (await r.reserve(policy="binpack", key="k"))["targetClusterID"] == "cheap"


@pytest.mark.usefixtures("fleet")
async def test_doubtful_query_reserves_nothing(broker, r):
    """Whoever mistyped a dry run did not mean to borrow."""
    before = await everything(broker)
    for query in ({"dryRun": ""}, {"dryRun": "yes"}, {"limit": "101"}):
        assert (await r.post("reservations", request_body(), **query)).refusal == (
            400,
            "InvalidInput",
        )
    assert await everything(broker) == before


@pytest.mark.usefixtures("fleet")
async def test_explain_looks_at_every_cluster_and_changes_nothing(broker, r):
    before = await everything(broker)
    answer = await r.post("explain", request_body("6", constraints={"maxPricePerHour": "0.5"}))
    assert answer.status == 200
    body = answer.json
    assert body["summary"] == "1/3 clusters fit: 1 InsufficientCPU, 1 TooExpensive"
    assert body["rejections"] == {"InsufficientCPU": 1, "TooExpensive": 1}
    plain, *others = body["candidates"]
    assert (plain["clusterID"], plain["fits"]) == ("plain", True)
    assert {found["clusterID"]: found["rejections"] for found in others} == {
        "cheap": ["InsufficientCPU"],
        "large": ["TooExpensive"],
    }
    large = next(found for found in others if found["clusterID"] == "large")
    assert (large["pricePerHour"], large["currency"]) == ("0.6", "USD")
    assert large["suggestion"]["maxPricePerHour"] == "0.6"
    assert await everything(broker) == before


@pytest.mark.parametrize(
    "setting, rejections, hint, message",
    [
        (
            {},
            {"InsufficientCPU": 3},
            "a cluster fits if you request 1 cpu less",
            "Waiting: 0/3 clusters fit: 3 InsufficientCPU",
        ),
        ({"explain_others": "none"}, {}, "", "Waiting: 0/1 cluster fits"),
    ],
)
async def test_clusters_learn_no_names_of_others_unless_they_may(
    start, setting, rejections, hint, message
):
    """In no answer: neither when a request is refused or waits, nor when it is tried out."""
    broker = await start(**setting)
    await advertise_all(broker)
    r, body = broker.cluster("r"), request_body("17")
    waiting = await r.queue("17", wait="1h")
    assert waiting["status"]["message"] == message
    refused, dry = (
        await r.post("reservations", body),
        await r.post("reservations", body, dryRun="true"),
    )
    explained = await r.post("explain", body, limit="100")
    own = await r.get("reservations", waiting["id"], "explain")
    for answer in (refused, dry, explained, own):
        assert not any(name in answer.content for name in (b"large", b"cheap", b"plain")), answer
    assert refused.problem.hint == dry.problem.hint == hint
    assert explained.json["rejections"] == own.json["rejections"] == rejections
    assert explained.json["fitting"] == 0
    seen = await broker.viewer().read("reservations", waiting["id"], "explain")
    assert {found["clusterID"] for found in seen["candidates"]} == {"large", "cheap", "plain"}
    assert seen["suggestion"]["clusterID"] == "large"


@pytest.mark.usefixtures("fleet")
async def test_explain_looks_closely_at_as_many_as_asked(r):
    for limit, count in (("0", 0), ("2", 2), ("100", 3)):
        answer = await r.post("explain", request_body(), limit=limit)
        assert (len(answer.json.get("candidates", [])), answer.json["fitting"]) == (count, 3)
    answer = await r.post("explain", request_body(), limit="101")
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.detail == "limit: '101' is not an integer from 0 to 100"


@pytest.mark.usefixtures("fleet")
async def test_explanation_of_a_reservation_asks_where_one_like_it_would_fit_now(broker, r):
    """Beside what it holds already, and not where it was refused."""
    made = await r.reserve("9")
    assert made["targetClusterID"] == "large"
    for caller in (r, broker.cluster("large"), broker.viewer()):
        found = await caller.read("reservations", made["id"], "explain")
        assert (found["fitting"], found["rejections"]) == (0, {"InsufficientCPU": 3})
    small = await r.reserve("1")
    assert small["targetClusterID"] == "plain"
    await broker.cluster("plain").post("instructions", small["id"], "refuse")
    found = await r.read("reservations", small["id"], "explain")
    assert found["rejections"] == {"PreviousProvider": 1}
    refused = next(c for c in found["candidates"] if not c["fits"])
    assert refused["clusterID"] == "plain"


async def everything(broker):
    viewer = broker.viewer()
    return await viewer.read("reservations"), await viewer.read("clusters")


@pytest.fixture
async def a(broker):
    found = broker.cluster("a")
    await found.advertise("8", "16Gi")
    return found


async def available(a):
    return (await a.read("advertisements", "a"))["resources"]["available"]["cpu"]


async def test_reservation_is_activated_renewed_and_released(broker, a, r):
    made = await r.reserve("3", duration="1h")
    path = ("reservations", made["id"])
    broker.clock.pass_time(30 * make.MINUTE)
    for _ in range(2):
        status = (await r.post(*path, "activate")).json["status"]
        assert (status["phase"], status["activatedAt"]) == ("Active", "2026-01-01T12:30:00Z")
        assert status["message"] == "Resources in use in cluster a"
    for body, end in (
        ({"duration": "10m"}, "13:00"),
        (None, "13:30"),
        ({"duration": "2h"}, "14:30"),
    ):
        answer = await r.post(*path, "renew", *([body] if body else []))
        assert answer.json["status"]["expiresAt"] == f"2026-01-01T{end}:00Z"
    too_long = await r.post(*path, "renew", {"duration": "721h"})
    assert too_long.refusal == (400, "InvalidInput")
    assert too_long.problem.detail.startswith("duration: ")
    answers = [await r.delete(*path) for _ in range(2)]
    assert answers[0].json["status"] == {
        "phase": "Released",
        "message": "Released by requester r",
        "reason": "ReleasedByRequester",
        "reservedAt": "2026-01-01T12:00:00Z",
        "expiresAt": "2026-01-01T14:30:00Z",
        "activatedAt": "2026-01-01T12:30:00Z",
        "finishedAt": "2026-01-01T12:30:00Z",
    }
    assert (answers[1].status, answers[1].json) == (200, answers[0].json)
    for step in ("activate", "renew"):
        assert (await r.post(*path, step)).refusal == (409, "WrongPhase")
    assert (await r.get(*path, "grant")).refusal == (409, "WrongPhase")
    assert await available(a) == "8"


async def test_expiry_is_seen_at_once_by_whoever_asks(broker, a, r):
    """Not only after the second in which the broker ends what has expired."""
    made = await r.reserve("8", duration="10s")
    broker.clock.pass_time(10 * make.SECOND)
    assert (await r.post("reservations", made["id"], "renew")).refusal == (409, "WrongPhase")
    assert (await r.reserve("8"))["targetClusterID"] == "a"
    status = (await r.read("reservations", made["id"]))["status"]
    assert (status["phase"], status["reason"]) == ("Released", "Expired")
    assert status["message"] == "Duration elapsed"


async def keys(caller):
    answer = await caller.get("keys")
    assert answer.status == 200
    return msgspec.json.decode(answer.content, type=JwkSet).keys


async def test_both_parties_get_the_same_grant_and_it_says_what_was_promised(broker, a, r):
    made = await r.reserve("1500m", "2Gi")
    mine = await r.read("reservations", made["id"], "grant")
    theirs = await broker.cluster("a").read("reservations", made["id"], "grant")
    assert mine == theirs
    grant = verify_grant(mine["grant"], await keys(broker.viewer()))
    assert (grant.jti, grant.sub, grant.aud) == (made["id"], "r", "a")
    assert grant.resources == {"cpu": "1500m", "memory": "2Gi"}
    assert grant.exp == int((make.T0 + make.HOUR).timestamp())
    grant.check(provider="a", now=broker.clock())
    await r.post("reservations", made["id"], "renew", {"duration": "5h"})
    renewed = (await r.read("reservations", made["id"], "grant"))["grant"]
    assert verify_grant(renewed, await keys(r)).exp == int((make.T0 + 5 * make.HOUR).timestamp())


async def test_provider_that_it_was_moved_away_from_gets_none(broker, a, r):
    made = await r.reserve("1")
    await broker.cluster("b").post("advertisements", offer("b"))
    await broker.cluster("a").post("instructions", made["id"], "refuse")
    answer = await broker.cluster("a").get("reservations", made["id"], "grant")
    assert answer.refusal == (409, "WrongPhase")
    moved = (await r.read("reservations", made["id"], "grant"))["grant"]
    assert verify_grant(moved, await keys(r)).aud == "b"


async def test_key_outlives_the_broker(certificates, tmp_path):
    store = str(tmp_path / "kubelend.db")
    async with brokers.running(certificates, store=store) as broker:
        before = await keys(broker.viewer())
    async with brokers.running(certificates, store=store) as broker:
        assert await keys(broker.viewer()) == before
    (found,) = tmp_path.glob("*.key")
    assert found.stat().st_mode & 0o777 == 0o600
