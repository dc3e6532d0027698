"""Limits: size and number of calls, lending policies, quotas and budgets."""

import json
import zlib

import pytest

import make
from callers import offer, request_body
from kubelend.core import lending

LIMIT = 262144


def padded(body, size):
    """The body, with spaces up to exactly this size."""
    return json.dumps(body).encode().ljust(size)


async def test_body_at_the_limit_is_read_and_one_byte_more_is_not(broker):
    a = broker.cluster("a")
    exact = await a.post("advertisements", content=padded(offer("a"), LIMIT))
    assert exact.status == 200
    over = await a.post("advertisements", content=padded(offer("a", "99"), LIMIT + 1))
    assert over.refusal == (413, "BodyTooLarge")
    assert over.problem.retryable is False
    assert over.problem.hint == "send a smaller body"
    assert "Retry-After" not in over.headers
    assert (await a.read("advertisements", "a"))["resources"]["capacity"]["cpu"] == "4"


async def test_packed_body_is_read(broker, r):
    await broker.cluster("a").advertise()
    content = zlib.compress(json.dumps(request_body()).encode())
    headers = {"Content-Encoding": "deflate"}
    assert (await r.call("POST", "reservations", content=content, headers=headers)).status == 201


async def test_caller_that_calls_too_often_is_answered_when_to_come_back(start):
    broker = await start(rate_limit=1, rate_burst=5)
    r = broker.cluster("r")
    answers = [await r.get("version") for _ in range(6)]
    assert [answer.status for answer in answers] == [200] * 5 + [429]
    last = answers[-1]
    assert last.refusal == (429, "RateLimited")
    assert last.headers["Retry-After"] == "1"
    assert last.problem.retryable is True
    assert last.problem.detail == "cluster r exceeds 1 requests per second"
    assert (await r.post("advertisements", offer("r"))).refusal == (429, "RateLimited")
    assert (await broker.admin().get("clusters", "r")).status == 404
    for other in (broker.cluster("s"), broker.admin("r"), broker.viewer("r")):
        assert (await other.get("version")).status == 200, "others are counted apart"


POLICY = {
    "allow": ["team-*"],
    "deny": ["team-x"],
    "keepBack": {"cpu": "1"},
    "maxLent": {"cpu": "6", "gpu": "0"},
    "maxPerRequester": {"cpu": "2"},
    "hours": ["08:00-18:00", "Sat,Sun 00:00-24:00 Europe/Rome"],
}


@pytest.fixture
def team(broker):
    return broker.cluster("team-a")


async def set_policy(admin, policy, cluster="a"):
    answer = await admin.put("clusters", cluster, "policy", policy)
    assert answer.status == 200, answer
    return answer.json


async def refusal(caller, *args, **fields):
    """Ask for what must not fit; gives the histogram of rejections."""
    answer = await caller.post("reservations", request_body(*args, **fields))
    assert answer.refusal == (409, "NoCapacity")
    return answer.json["explanation"]["rejections"]


async def test_policies_of_both_are_shown_and_hold_until_they_are_cleared(broker, admin, a, team):
    own = {"keepBack": {"cpu": "3"}, "deny": ["team-b"]}
    await a.advertise("8", "16Gi", policy=own)
    shown = await set_policy(admin, POLICY)
    assert shown["admin"] == POLICY
    assert shown["advertised"] == own
    assert shown["effective"] == {
        **POLICY,
        "allow": [POLICY["allow"]],
        "deny": ["team-b", "team-x"],
        "keepBack": {"cpu": "3"},
        "hours": [POLICY["hours"]],
    }
    for caller in (a, admin):
        assert await caller.read("clusters", "a", "policy") == shown
    assert (await a.read("advertisements", "a"))["policy"] == own
    assert await refusal(broker.cluster("team-b")) == {"RequesterDenied": 1}
    assert await refusal(broker.cluster("other")) == {"RequesterNotAllowed": 1}
    assert await refusal(team, "3") == {"RequesterCapReached": 1}
    reason = {"reason": "RequesterCapReached"}
    assert broker.metric("kubelend_placement_failures_total", **reason) == 1
    await team.reserve("2")
    found = await admin.read("clusters", "a")
    assert found["advertisement"]["resources"]["available"]["cpu"] == "6"
    assert found["status"]["withheld"] == {"cpu": "3"}
    assert found["status"]["policy"]["maxLent"] == {"cpu": "6", "gpu": "0"}
    assert "closed" not in found["status"]
    await a.advertise("8", "16Gi")
    cleared = await admin.delete("clusters", "a", "policy")
    assert (cleared.status, cleared.content) == (204, b"")
    assert await admin.read("clusters", "a", "policy") == {"clusterID": "a"}
    assert (await admin.delete("clusters", "a", "policy")).refusal == (404, "NotFound")
    await team.reserve("6")


@pytest.mark.usefixtures("a")
async def test_closed_cluster_is_shown_as_such_and_serves_who_waits_when_it_opens(
    broker, admin, team
):
    await set_policy(admin, {"hours": ["12:05-18:00"]})
    waiting = await team.queue("1", wait="10m")
    assert (await admin.read("clusters", "a"))["status"]["closed"] is True
    broker.clock.pass_time(5 * make.MINUTE)
    assert await team.phase_of(waiting["id"]) == "Reserved"
    assert "closed" not in (await admin.read("clusters", "a"))["status"]


def policy_of(number):
    """As many new patterns as a policy may have, each as long as it may be."""
    names = [f"{number}-{n:02d}-{'[!a-y]' * 9}" for n in range(2 * lending.MAX_PATTERNS)]
    return {"allow": names[: lending.MAX_PATTERNS], "deny": names[lending.MAX_PATTERNS :]}


async def test_patterns_count_in_the_rate_limit_once_and_only_what_is_new(start):
    broker = await start(rate_limit=1, rate_burst=200)
    a, before = broker.cluster("a"), lending.compiled_patterns()
    for _ in range(10):
        await a.advertise(policy=policy_of(1))
    assert lending.compiled_patterns() - before == 2 * lending.MAX_PATTERNS
    await a.advertise(policy=policy_of(2))
    late = await a.post("advertisements", offer("a", policy=policy_of(3)))
    assert late.refusal == (429, "RateLimited")
    assert lending.compiled_patterns() - before == 4 * lending.MAX_PATTERNS
    assert (await broker.cluster("b").get("version")).status == 200


async def test_large_bodies_and_large_answers_count_as_several_calls(start):
    broker = await start(rate_limit=1, rate_burst=20)
    a, b = broker.cluster("a"), broker.cluster("b")
    content = padded(offer("a"), 12 * 4096)
    assert (await a.post("advertisements", content=content)).status == 200
    late = await a.post("advertisements", content=content)
    assert late.refusal == (429, "RateLimited")
    assert 3 < int(late.headers["Retry-After"]) < 20
    assert (await a.get("version")).status == 200, "a small one fits"
    assert len((await b.get("/openapi.json")).content) > 20 * 16384 / 2
    assert (await b.get("/openapi.json")).status == 200
    assert (await b.get("version")).refusal == (429, "RateLimited")


@pytest.mark.parametrize(
    "path",
    [
        "tokens",
        "clusters/a/cordon",
        "clusters/a/drain",
        "members/cluster/a/revoke",
        "members/cluster/a/approve",
    ],
)
async def test_unknown_field_of_a_persons_call_is_refused_by_its_name(a, admin, path):
    """A token for `nmae` would be one for anybody."""
    answer = await admin.post(*path.split("/"), {"nmae": "edge-1"})
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.detail == "body: Object contains unknown field `nmae`"
    assert "cordoned" not in (await admin.read("clusters", "a"))["status"]


INVALID = [
    (("clusters", "a", "policy"), {"keepback": {"cpu": "1"}}, "unknown field `keepback`"),
    (("clusters", "a", "policy"), {"keepBack": {"cpu": "much"}}, "keepBack.cpu: 'much'"),
    (("clusters", "a", "policy"), {"hours": ["never"]}, "hours: 'never' is not a valid"),
    (("clusters", "a", "policy"), {"deny": ["x"] * 257}, "$.deny"),
    (("quotas", "a"), {"cpu": "4"}, "unknown field `cpu`"),
    (("quotas", "a"), {"amounts": {"cpu": "-4"}}, "amounts.cpu: '-4' is negative"),
    (("quotas", "a"), {"reservations": -1}, "$.reservations"),
    (("quotas", "a"), {"budget": "1", "currency": "EURO COINS"}, "$.currency"),
]


@pytest.mark.usefixtures("a")
async def test_invalid_policy_or_quota_is_refused_and_changes_nothing(admin):
    for path, body, detail in INVALID:
        answer = await admin.put(*path, body)
        assert answer.status == 400
        assert detail in answer.problem.detail
    assert await admin.read("clusters", "a", "policy") == {"clusterID": "a"}
    assert (await admin.get("quotas", "a")).status == 404


async def test_invalid_cluster_name_has_no_policy_and_no_quota(admin):
    for name in ("", " ", "a\x00b", "x" * 65):
        for path in (("clusters", name, "policy"), ("quotas", name)):
            assert (await admin.put(*path, {})).status in {404, 405}
    assert (await admin.get("clusters", "unknown", "policy")).refusal == (404, "NotFound")


@pytest.fixture
async def payer(broker):
    """A requester where a core costs 0.25 EUR an hour."""
    cost = {"cpuCost": "0.25", "currency": "EUR"}
    await broker.cluster("a").advertise("64", "64Gi", cost=cost)
    return broker.cluster("r")


async def allot(admin, quota, cluster="r"):
    answer = await admin.put("quotas", cluster, quota)
    assert answer.status == 200, answer
    return answer.json


async def test_quota_is_shown_with_what_is_used(admin, payer):
    await allot(
        admin, {"amounts": {"cpu": "70"}, "reservations": 4, "budget": "50", "currency": "EUR"}
    )
    await payer.reserve("60", duration="2h")
    await payer.queue("8", wait="1h")
    shown = await payer.read("quotas", "r")
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


async def test_explain_shows_the_quota_beside_the_clusters(admin, payer):
    await allot(admin, {"amounts": {"cpu": "2"}, "reservations": 0})
    explained = (await payer.post("explain", request_body("3"))).json
    assert explained["quota"] == [
        "r has 0 of 0 reservations, and one more would exceed its quota;"
        " release a reservation, or wait until one ends",
        "r holds 0 of 2 cpu, and 3 more would exceed its quota; request 1 cpu less",
    ]
    assert explained["summary"] == "1/1 cluster fits"
    planned = await payer.post("reservations", request_body("3"), dryRun="true")
    assert planned.refusal == (403, "QuotaExceeded")
    real = await payer.post("reservations", request_body("3"))
    assert planned.problem == real.problem
    assert real.problem.error == explained["quota"][0]


async def test_who_waits_does_not_count_against_itself_in_explain(admin, payer):
    await allot(admin, {"amounts": {"cpu": "100"}})
    await payer.reserve("60")
    waiting = await payer.queue("40", wait="1h")
    explained = await payer.read("reservations", waiting["id"], "explain")
    assert "quota" not in explained
    await allot(admin, {"amounts": {"cpu": "99"}})
    explained = await payer.read("reservations", waiting["id"], "explain")
    assert explained["quota"][0].startswith("r holds 60 of 99 cpu, and 40 more")


async def test_budget_bounds_the_cost_that_a_reservation_shows(broker, admin, payer):
    await allot(admin, {"budget": "1", "currency": "EUR"})
    made = await payer.reserve("2", duration="1h")
    assert made["cost"] == {"pricePerHour": "0.5", "currency": "EUR"}
    answer = await payer.post("reservations", request_body("4"))
    assert answer.refusal == (409, "NoCapacity")
    assert answer.problem.detail == "no suitable cluster: 0/1 cluster fits: 1 OverBudget"
    assert answer.problem.hint == (
        "a cluster fits if you request less, or for a shorter time (your budget leaves 0.5 EUR per hour)"
    )
    renewal = await payer.post("reservations", made["id"], "renew", {"duration": "3h"})
    assert renewal.refusal == (403, "QuotaExceeded")
    await payer.reserve("4", duration="30m")
    assert (await payer.read("quotas", "r"))["used"]["spentToday"] == "1"
    await broker.cluster("free").advertise("64", "64Gi")
    assert "cost" not in await payer.reserve("2", targetClusterID="free")
