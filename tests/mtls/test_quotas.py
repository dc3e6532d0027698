"""What a requester may have, and what it costs: set by an administrator, seen and felt by the requester."""

import pytest

import make
from callers import wish


@pytest.fixture
async def a(broker):
    """A core costs 0.25 EUR an hour."""
    found = broker.cluster("a")
    await found.advertise("64", "64Gi", cost={"cpuCost": "0.25", "currency": "EUR"})
    return found


@pytest.fixture
def admin(broker):
    return broker.admin()


@pytest.fixture
def r(broker):
    return broker.cluster("r")


async def allot(admin, quota, cluster="r"):
    answer = await admin.put("quotas", cluster, quota)
    assert answer.status == 200, answer
    return answer.json


pytestmark = pytest.mark.usefixtures("a")


async def test_quota_is_shown_with_what_is_used(admin, r):
    await allot(
        admin, {"amounts": {"cpu": "70"}, "reservations": 4, "budget": "50", "currency": "EUR"}
    )
    await r.reserve("60", duration="2h")
    await r.queue("8", wait="1h")
    shown = await r.read("quotas", "r")
    assert shown == {
        "clusterID": "r",
        "quota": {"amounts": {"cpu": "70"}, "reservations": 4, "budget": "50", "currency": "EUR"},
        "used": {
            "held": {"cpu": "60", "memory": "1Gi"},
            "waitedFor": {"cpu": "8", "memory": "1Gi"},
            "reservations": 1,
            "waiting": 1,
            "spentToday": "30",
        },
    }
    assert await admin.read("quotas", "r") == shown
    assert await admin.read("quotas") == {"quotas": [shown]}


async def test_quota_that_is_exceeded_is_a_final_refusal_with_numbers(broker, admin, r):
    await allot(admin, {"amounts": {"cpu": "32"}})
    await r.reserve("30")
    answer = await r.post("reservations", wish("4"))
    assert answer.refusal == (403, "QuotaExceeded")
    assert "retryable" not in answer.json
    assert answer.problem.detail == "r holds 30 of 32 cpu, and 4 more would exceed its quota"
    assert answer.problem.hint == "request 2 cpu less"
    assert (
        broker.metric(
            "kubelend_http_requests_rejected_total", route="reserve", code="QuotaExceeded"
        )
        == 1
    )


async def test_explain_shows_the_quota_beside_the_clusters(admin, r):
    await allot(admin, {"amounts": {"cpu": "2"}, "reservations": 0})
    explained = (await r.post("explain", wish("3"))).json
    assert explained["quota"] == [
        "r has 0 of 0 reservations, and one more would exceed its quota;"
        " release a reservation, or wait until one ends",
        "r holds 0 of 2 cpu, and 3 more would exceed its quota; request 1 cpu less",
    ]
    assert explained["summary"] == "1/1 cluster fits"
    planned = await r.post("reservations", wish("3"), dryRun="true")
    assert planned.refusal == (403, "QuotaExceeded")
    real = await r.post("reservations", wish("3"))
    assert planned.problem == real.problem
    assert real.problem.error == explained["quota"][0]


async def test_who_waits_does_not_count_against_itself_in_explain(admin, r):
    await allot(admin, {"amounts": {"cpu": "100"}})
    await r.reserve("60")
    waiting = await r.queue("40", wait="1h")
    explained = await r.read("reservations", waiting["id"], "explain")
    assert "quota" not in explained
    await allot(admin, {"amounts": {"cpu": "99"}})
    explained = await r.read("reservations", waiting["id"], "explain")
    assert explained["quota"][0].startswith("r holds 60 of 99 cpu, and 40 more")


async def test_reservation_shows_its_cost_and_a_free_one_none(broker, r):
    made = await r.reserve("2")
    assert made["cost"] == {"pricePerHour": "0.5", "currency": "EUR"}
    await broker.cluster("free").advertise("64", "64Gi")
    assert "cost" not in await r.reserve("2", targetClusterID="free")


async def test_budget_refuses_what_is_too_dear_and_says_what_it_leaves(broker, admin, r):
    await allot(admin, {"budget": "1", "currency": "EUR"})
    await r.reserve("2", duration="1h")
    answer = await r.post("reservations", wish("4"))
    assert answer.refusal == (409, "NoCapacity")
    assert answer.problem.detail == "no suitable cluster: 0/1 cluster fits: 1 OverBudget"
    assert answer.problem.hint == (
        "a fits if you request less, or for a shorter time (your budget leaves 0.5 EUR per hour)"
    )
    assert broker.metric("kubelend_placement_failures_total", reason="OverBudget") == 1
    await r.reserve("4", duration="30m")
    assert (await r.read("quotas", "r"))["used"]["spentToday"] == "1"


async def test_budget_in_another_currency_is_no_money_there(admin, r):
    await allot(admin, {"budget": "100", "currency": "USD"})
    answer = await r.post("reservations", wish("1"))
    assert answer.json["explanation"]["refusals"] == {"CurrencyMismatch": 1}
    assert answer.problem.hint == ""


async def test_renewal_over_the_budget_is_refused(admin, r):
    await allot(admin, {"budget": "1", "currency": "EUR"})
    made = await r.reserve("2", duration="1h")
    answer = await r.post("reservations", made["id"], "renew", {"duration": "3h"})
    assert answer.refusal == (403, "QuotaExceeded")
    assert answer.problem.detail == (
        f"the budget of r, 1 EUR a day, leaves 0.25 per hour, but {made['id']} costs 0.5"
    )
    renewed = await r.post("reservations", made["id"], "renew", {"duration": "2h"})
    assert renewed.status == 200


async def test_a_new_day_has_a_new_budget(broker, admin, a, r):
    await allot(admin, {"budget": "1", "currency": "EUR"})
    made = await r.reserve("4", duration="1h")
    assert (await r.post("reservations", wish("1"))).status == 409
    await r.delete("reservations", made["id"])
    broker.clock.pass_time(12 * make.HOUR)
    await a.advertise("64", "64Gi", cost={"cpuCost": "0.25", "currency": "EUR"})
    assert (await r.read("quotas", "r"))["used"].get("spentToday") == "0"
    await r.reserve("4", duration="1h")


async def test_quota_that_is_cleared_bounds_no_more(admin, r):
    await allot(admin, {"reservations": 0})
    assert (await r.post("reservations", wish())).status == 403
    assert (await admin.delete("quotas", "r")).status == 204
    assert (await admin.delete("quotas", "r")).refusal == (404, "NotFound")
    missing = await r.get("quotas", "r")
    assert missing.refusal == (404, "NotFound")
    assert missing.problem.detail == "'r' has no quota"
    await r.reserve()


async def test_quotas_are_listed_in_pages_by_name(admin):
    for name in ("c", "a", "b"):
        await allot(admin, {"reservations": 1}, name)
    first = await admin.read("quotas", limit="2")
    assert [one["clusterID"] for one in first["quotas"]] == ["a", "b"]
    rest = await admin.read("quotas", **{"limit": "2", "continue": first["next"]})
    assert [one["clusterID"] for one in rest["quotas"]] == ["c"]
    assert "next" not in rest


async def test_a_cluster_sees_its_own_quota_only(broker, admin, r):
    await allot(admin, {"reservations": 1})
    assert (await broker.cluster("s").get("quotas", "r")).refusal == (403, "Forbidden")
    assert (await r.get("quotas")).refusal == (403, "Forbidden")


@pytest.mark.parametrize(
    "quota, detail",
    [
        ({"cpu": "4"}, "unknown field `cpu`"),
        ({"amounts": {"cpu": "-4"}}, "amounts.cpu: '-4' is negative"),
        ({"reservations": -1}, "$.reservations"),
        ({"budget": "much"}, "budget: 'much' is not a price"),
        ({"budget": "1", "currency": "EURO COINS"}, "$.currency"),
    ],
    ids=str,
)
async def test_quota_that_cannot_be_is_refused(admin, quota, detail):
    answer = await admin.put("quotas", "r", quota)
    assert answer.status == 400
    assert detail in answer.problem.detail
    assert (await admin.get("quotas", "r")).status == 404
