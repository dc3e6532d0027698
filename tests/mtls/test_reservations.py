"""Asking: where a request goes, what the refused hear, and that trying things out changes nothing."""

import pytest

from callers import wish


@pytest.fixture
def r(broker):
    return broker.cluster("r")


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


async def test_without_any_cluster_the_refusal_says_so(r):
    answer = await r.post("reservations", wish())
    assert answer.problem.detail == "no suitable cluster: no cluster has advertised yet"


@pytest.mark.usefixtures("fleet")
async def test_refusal_says_what_would_help_and_it_does(r):
    answer = await r.post("reservations", wish("17", "1Gi"))
    assert answer.problem.hint == "large fits if you request 1 cpu less"
    remedy = answer.json["explanation"]["remedy"]
    assert remedy == {"clusterID": "large", "text": answer.problem.hint, "less": {"cpu": "1"}}
    assert (await r.reserve("16", "1Gi"))["targetClusterID"] == "large"


async def test_second_best_serves_when_the_best_is_full(broker, r):
    for name in ("a", "b"):
        await broker.cluster(name).advertise("4", "8Gi")
    assert [(await r.reserve("3"))["targetClusterID"] for _ in range(2)] == ["a", "b"]
    assert (await r.post("reservations", wish("3"))).refusal == (409, "NoCapacity")


async def test_duration_is_an_hour_unless_it_is_said(broker, r):
    await broker.cluster("a").advertise()
    assert (await r.reserve())["status"]["expiresAt"] == "2026-01-01T13:00:00Z"
    said = await r.reserve(duration="1h30m0.5s")
    assert said["status"]["expiresAt"] == "2026-01-01T13:30:00.500000Z"
    assert said["duration"] == "1h30m0.5s"


async def test_longest_duration_is_allowed_and_not_a_moment_more(broker, r):
    await broker.cluster("a").advertise()
    assert (await r.reserve(duration="720h"))["status"]["expiresAt"] == "2026-01-31T12:00:00Z"
    answer = await r.post("reservations", wish(duration="720h0m0.001s"))
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.error == (
        "duration: 720h0m0.001s exceeds the broker's maximum; request at most 720h, and renew"
    )


async def test_asked_amounts_are_rounded_up(broker, r):
    await broker.cluster("a").advertise()
    made = await r.reserve("1100u", "100m")
    assert made["requestedResources"] == {"cpu": "2m", "memory": "1"}


# -- trying out


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


@pytest.mark.usefixtures("fleet")
async def test_explain_looks_closely_at_no_more_than_a_hundred(r):
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
