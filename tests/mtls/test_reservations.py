"""Reservations: where a request goes, what is tried out, how one lives and ends, and its signed grant."""

import msgspec
import pytest

import brokers
import make
from callers import offer, wish
from kubelend.pki.grants import JwkSet, verify_grant


@pytest.fixture
async def fleet(broker):
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


@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize(
    "fields, target",
    [
        pytest.param({}, "large", id="headroom is the default"),
        pytest.param({"policy": "headroom"}, "large", id="headroom"),
        pytest.param({"policy": "binpack"}, "cheap", id="binpack"),
        pytest.param({"policy": "cost"}, "cheap", id="cost"),
        pytest.param({"policy": "balanced"}, "cheap", id="balanced"),
        pytest.param({"weights": {"packing": 1}}, "cheap", id="own weights"),
        pytest.param({"weights": {"price": 0.001, "headroom": 1000}}, "large", id="two weights"),
        pytest.param({"targetClusterID": "plain"}, "plain", id="pinned"),
        pytest.param({"constraints": {"exclude": ["large"]}}, "plain", id="excluded"),
        pytest.param({"constraints": {"region": "eu"}}, "cheap", id="region"),
        pytest.param({"constraints": {"labels": {"tier": "gold"}}}, "plain", id="label"),
        pytest.param({"constraints": {"maxPricePerHour": "0.05"}}, "plain", id="price"),
    ],
)
async def test_request_goes_where_it_asks_to(r, fields, target):
    made = await r.reserve("1", "1Gi", **fields)
    assert made["targetClusterID"] == target


@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize(
    "fields, why",
    [
        pytest.param(
            {"targetClusterID": "nobody"},
            "3 NotPinned; cluster 'nobody' is unknown",
            id="pinned to nobody",
        ),
        pytest.param({"targetClusterID": "cheap", "cpu": "5"}, "2 NotPinned", id="pinned, full"),
        pytest.param({"constraints": {"region": "mars"}}, "3 LabelMismatch", id="region"),
        pytest.param({"memory": "1Ti"}, "3 InsufficientMemory", id="memory"),
        pytest.param({"gpu": "1"}, "3 InsufficientGPU", id="gpu"),
    ],
)
async def test_what_fits_nowhere_is_refused_with_a_count_of_the_reasons(r, fields, why):
    answer = await r.post("reservations", wish(**fields))
    assert answer.refusal == (409, "NoCapacity")
    assert answer.problem.detail.startswith(f"no suitable cluster: 0/3 clusters fit: {why}")
    explanation = answer.json["explanation"]
    assert (explanation["total"], explanation["fitting"]) == (3, 0)
    assert sum(explanation["refusals"].values()) == 3


@pytest.mark.usefixtures("fleet")
async def test_asked_amounts_are_rounded_up_and_the_second_best_serves_when_the_best_is_full(r):
    made = await r.reserve("1100u", "100m")
    assert made["requestedResources"] == {"cpu": "2m", "memory": "1"}
    full = [(await r.reserve(cpu))["targetClusterID"] for cpu in ("15", "7", "3")]
    assert full == ["large", "plain", "cheap"]
    assert (await r.post("reservations", wish("3"))).refusal == (409, "NoCapacity")


async def test_without_any_cluster_the_refusal_says_so(r):
    answer = await r.post("reservations", wish())
    assert answer.problem.detail == "no suitable cluster: no cluster has advertised yet"


@pytest.mark.usefixtures("fleet")
async def test_refusal_says_what_would_help_and_it_does(broker, r):
    answer = await r.post("reservations", wish("17", "1Gi"))
    assert answer.problem.hint == "large fits if you request 1 cpu less"
    remedy = answer.json["explanation"]["remedy"]
    assert remedy == {"clusterID": "large", "text": answer.problem.hint, "less": {"cpu": "1"}}
    assert (await r.reserve("16", "1Gi"))["targetClusterID"] == "large"


async def test_duration_is_an_hour_unless_it_is_said_and_has_a_maximum(broker, r):
    await broker.cluster("a").advertise()
    assert (await r.reserve())["status"]["expiresAt"] == "2026-01-01T13:00:00Z"
    said = await r.reserve(duration="1h30m0.5s")
    assert said["status"]["expiresAt"] == "2026-01-01T13:30:00.500000Z"
    assert said["duration"] == "1h30m0.5s"
    assert (await r.reserve(duration="720h"))["status"]["expiresAt"] == "2026-01-31T12:00:00Z"
    answer = await r.post("reservations", wish(duration="720h0m0.001s"))
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.error == (
        "duration: 720h0m0.001s exceeds the broker's maximum; request at most 720h, and renew"
    )


@pytest.mark.usefixtures("fleet")
async def test_dry_run_says_where_it_would_go_and_changes_nothing(broker, r):
    before = await everything(broker)
    answer = await r.post("reservations", wish(policy="binpack"), key="k", dryRun="true")
    assert answer.status == 200
    assert answer.json["candidates"][0]["clusterID"] == "cheap"
    assert (answer.json["total"], answer.json["fitting"]) == (3, 3)
    refused = await r.post("reservations", wish("99"), dryRun="true")
    assert refused.refusal == (409, "NoCapacity")
    assert "explanation" in refused.json
    assert await everything(broker) == before
    assert (await r.reserve(policy="binpack", key="k"))["targetClusterID"] == "cheap"


@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize("query", [{"dryRun": ""}, {"dryRun": "yes"}, {"limit": "101"}], ids=str)
async def test_doubtful_query_reserves_nothing(broker, r, query):
    """Whoever mistyped a dry run did not mean to borrow."""
    before = await everything(broker)
    assert (await r.post("reservations", wish(), **query)).refusal == (400, "InvalidInput")
    assert await everything(broker) == before


@pytest.mark.usefixtures("fleet")
async def test_explain_looks_at_every_cluster_and_changes_nothing(broker, r):
    before = await everything(broker)
    answer = await r.post("explain", wish("6", constraints={"maxPricePerHour": "0.5"}))
    assert answer.status == 200
    body = answer.json
    assert body["summary"] == "1/3 clusters fit: 1 InsufficientCPU, 1 TooExpensive"
    assert body["refusals"] == {"InsufficientCPU": 1, "TooExpensive": 1}
    plain, *others = body["candidates"]
    assert (plain["clusterID"], plain["fits"]) == ("plain", True)
    assert {found["clusterID"]: found["refusals"] for found in others} == {
        "cheap": ["InsufficientCPU"],
        "large": ["TooExpensive"],
    }
    large = next(found for found in others if found["clusterID"] == "large")
    assert (large["pricePerHour"], large["currency"]) == ("0.6", "USD")
    assert large["remedy"]["maxPricePerHour"] == "0.6"
    assert await everything(broker) == before


@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize("limit, count", [("0", 0), ("2", 2), ("100", 3)])
async def test_explain_looks_closely_at_as_many_as_asked(r, limit, count):
    answer = await r.post("explain", wish(), limit=limit)
    assert answer.status == 200
    assert len(answer.json.get("candidates", [])) == count
    assert answer.json["fitting"] == 3
    answer = await r.post("explain", wish(), limit="101")
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.detail == "limit: '101' is not an integer from 0 to 100"


@pytest.mark.usefixtures("fleet")
async def test_explanation_of_a_reservation_asks_where_one_like_it_would_fit_now(broker, r):
    """Beside what it holds already, and not where it was refused."""
    made = await r.reserve("9")
    assert made["targetClusterID"] == "large"
    for caller in (r, broker.cluster("large"), broker.viewer()):
        found = await caller.read("reservations", made["id"], "explain")
        assert (found["fitting"], found["refusals"]) == (0, {"InsufficientCPU": 3})
    small = await r.reserve("1")
    assert small["targetClusterID"] == "plain"
    await broker.cluster("plain").post("instructions", small["id"], "refuse")
    found = await r.read("reservations", small["id"], "explain")
    assert found["refusals"] == {"LeftBefore": 1}
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
    for step in (("activate",), ("renew",)):
        assert (await r.post("reservations", made["id"], *step)).refusal == (409, "WrongPhase")
    assert (await r.get("reservations", made["id"], "grant")).refusal == (409, "WrongPhase")
    assert await available(a) == "8"


async def test_archived_reservation_is_released_for_good_and_still_found(start):
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
    assert (await r.read("reservations", made["id"], "explain"))["total"] == 1
    for step in ("activate", "renew"):
        answer = await r.post("reservations", made["id"], step)
        assert answer.refusal == (409, "WrongPhase")
        assert answer.problem.detail == f"{made['id']} is Released"
        assert answer.problem.hint == "the reservation is finished; request a new one"
    assert (await broker.cluster("s").get("reservations", made["id"])).status == 404
    assert (await broker.cluster("s").delete("reservations", made["id"])).status == 404


async def test_release_by_an_admin_says_so(broker, a, r):
    made = await r.reserve()
    answer = await broker.admin().delete("reservations", made["id"])
    assert answer.json["status"]["reason"] == "ReleasedByAdmin"
    assert answer.json["status"]["message"] == "Released by an administrator"
    assert await r.read("reservations", made["id"]) == answer.json


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
    assert (await r.post("reservations", made["id"], "renew")).refusal == (409, "WrongPhase")
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


def expiry(answer):
    assert answer.status == 200
    return answer.json["status"]["expiresAt"]


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


async def test_grant_comes_with_the_instruction(broker, a, r):
    async with a.stream() as provider, r.stream() as requester:
        await provider.event()
        await requester.event()
        made = await r.reserve()
        hold, use = await provider.event(), await requester.event()
        assert hold.data["grant"] == use.data["grant"]
        assert verify_grant(hold.data["grant"], await keys(r)).jti == made["id"]
        await r.delete("reservations", made["id"])
        assert "grant" not in (await provider.event()).data


async def test_nobody_else_gets_one(broker, a, r):
    made = await r.reserve()
    path = ("reservations", made["id"], "grant")
    assert (await broker.cluster("c").get(*path)).refusal == (404, "NotFound")
    assert (await broker.admin().get(*path)).refusal == (403, "Forbidden")
    assert (await broker.viewer().get(*path)).refusal == (403, "Forbidden")


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
