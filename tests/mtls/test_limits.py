"""Limits: size and number of calls, lending policies, quotas and budgets."""

import asyncio
import gzip
import json
import zlib

import pytest

import brokers
import make
import raw_connections
from callers import offer, wish
from kubelend.core.resources import Resources
from kubelend.stores.sqlite import SqliteStore
from waiting import PATIENCE

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


@pytest.mark.parametrize("path", ["advertisements", "reservations", "explain"])
async def test_megabyte_is_too_much_for_every_route_that_reads(r, path):
    answer = await r.post(path, content=padded(wish(), 2**20))
    assert answer.refusal == (413, "BodyTooLarge")
    assert (await r.get("version")).status == 200


async def test_body_that_says_it_is_too_long_is_not_waited_for(broker):
    """Nothing of it has come, and nothing need come."""
    async with raw_connections.connected(broker.cluster("r")) as (reader, writer):
        writer.write(raw_connections.POST + b"Content-Length: 99999999999\r\n\r\n")
        answer = await raw_connections.answer_of(reader)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"99999999999 bytes are more than" in answer


async def test_body_without_a_length_is_measured_as_it_comes(r):
    async def endless():
        for _ in range(1000):
            yield b" " * 4096

    url = f"https://localhost:{r.port}/api/v1/reservations"
    async with r.session.post(url, data=endless()) as response:
        assert response.status == 413


async def test_bomb_is_measured_unpacked(r):
    """A few kilobytes that unpack to many megabytes."""
    bomb = gzip.compress(b" " * 50_000_000)
    assert len(bomb) < LIMIT
    headers = {"Content-Encoding": "gzip"}
    answer = await r.call("POST", "reservations", content=bomb, headers=headers)
    assert answer.refusal == (413, "BodyTooLarge")


async def test_packed_body_is_read(broker, r):
    await broker.cluster("a").advertise()
    content = zlib.compress(json.dumps(wish()).encode())
    headers = {"Content-Encoding": "deflate"}
    assert (await r.call("POST", "reservations", content=content, headers=headers)).status == 201


async def test_client_that_asks_before_it_sends_its_body_is_told_to(broker, r):
    """As curl does with larger ones (Expect: 100-continue)."""
    await broker.cluster("a").advertise()
    url = f"https://localhost:{r.port}/api/v1/reservations"
    async with (
        asyncio.timeout(PATIENCE),
        r.session.post(url, json=wish(), expect100=True) as response,
    ):
        assert response.status == 201


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_body_that_is_not_packed_as_it_says_is_refused(r, encoding):
    headers = {"Content-Encoding": encoding}
    answer = await r.call("POST", "reservations", content=b"no such thing", headers=headers)
    assert answer.status == 400


async def test_headers_have_a_limit(r):
    url = f"https://localhost:{r.port}/api/v1/version"
    async with r.session.get(url, headers={"X-Long": "x" * 20_000}) as response:
        assert response.status == 400
    assert (await r.get("version")).status == 200


async def test_caller_that_calls_too_often_is_told_when_to_come_back(start):
    broker = await start(rate_limit=1, rate_burst=5)
    r = broker.cluster("r")
    answers = [await r.get("version") for _ in range(6)]
    assert [answer.status for answer in answers] == [200] * 5 + [429]
    last = answers[-1]
    assert last.refusal == (429, "RateLimited")
    assert last.headers["Retry-After"] == "1"
    assert last.problem.retryable is True
    assert last.problem.detail == "cluster r exceeds 1 requests per second"


async def test_person_and_cluster_of_one_name_are_counted_apart(start):
    broker = await start(rate_limit=0.001, rate_burst=1)
    for caller in (broker.cluster("paris"), broker.admin("paris"), broker.viewer("paris")):
        answers = [await caller.get("version") for _ in range(2)]
        assert [answer.status for answer in answers] == [200, 429]


async def test_one_callers_calls_are_not_counted_against_another(start):
    broker = await start(rate_limit=1, rate_burst=2)
    loud, quiet = broker.cluster("loud"), broker.cluster("quiet")
    statuses = [answer.status for answer in await asyncio.gather(*map(version, [loud] * 20))]
    assert statuses.count(429) >= 17
    assert (await version(quiet)).status == 200
    # Nor are they made to wait in another's name: identity comes first.
    assert (await broker.admin().get("version")).status == 200


async def test_refused_calls_change_nothing(start):
    broker = await start(rate_limit=1, rate_burst=1)
    a = broker.cluster("a")
    assert (await version(a)).status == 200
    assert (await a.post("advertisements", offer("a"))).refusal == (429, "RateLimited")
    assert (await broker.admin().get("clusters", "a")).status == 404


async def version(caller):
    return await caller.get("version")


async def test_largest_amounts_are_exact_and_more_is_refused(broker, r):
    """What fits a 64-bit number of bytes or millis is taken to the last unit."""
    a = broker.cluster("a")
    most = 2**63 - 1
    resources = {"capacity": {"cpu": f"{most}m", "memory": str(most)}}
    answer = await a.post("advertisements", {"clusterID": "a", "resources": resources})
    assert answer.status == 200
    made = await r.post("reservations", wish(f"{most - 1}m", str(most - 1)))
    assert made.status == 201
    left = (await a.read("advertisements", "a"))["resources"]["available"]
    assert make.resources(f"cpu={left['cpu']},memory={left['memory']}") == Resources(1, 1)
    assert (await r.post("reservations", wish("2m", "1"))).refusal == (409, "NoCapacity")
    assert (await r.post("reservations", wish("1m", "1"))).status == 201
    over = await r.post("reservations", wish(f"{2**63}m", "1"))
    assert over.refusal == (400, "InvalidQuantity")


POLICY = {
    "allow": ["team-*"],
    "deny": ["team-x"],
    "keepBack": {"cpu": "1"},
    "maxLent": {"cpu": "6", "gpu": "0"},
    "maxPerRequester": {"cpu": "2"},
    "hours": ["08:00-18:00", "Sat,Sun 00:00-24:00 Europe/Rome"],
}


@pytest.fixture
async def a(broker):
    found = broker.cluster("a")
    await found.advertise("8", "16Gi")
    return found


@pytest.fixture
def team(broker):
    return broker.cluster("team-a")


async def set_policy(admin, policy, cluster="a"):
    answer = await admin.put("clusters", cluster, "policy", policy)
    assert answer.status == 200, answer
    return answer.json


async def refusal(caller, *args, **fields):
    """Ask for what must not fit; gives the histogram of refusals."""
    answer = await caller.post("reservations", wish(*args, **fields))
    assert answer.refusal == (409, "NoCapacity")
    return answer.json["explanation"]["refusals"]


@pytest.mark.usefixtures("a")
async def test_what_an_administrator_sets_is_shown_and_holds(admin, team):
    shown = await set_policy(admin, POLICY)
    assert shown["admin"] == POLICY
    assert "advertised" not in shown
    assert shown["effective"] == {
        **POLICY,
        "allow": [POLICY["allow"]],
        "hours": [POLICY["hours"]],
    }
    assert await admin.read("clusters", "a", "policy") == shown
    assert await refusal(team, "3") == {"RequesterCapReached": 1}
    await team.reserve("2")


async def test_both_policies_hold_and_the_cluster_sees_them(broker, admin, a, team):
    await a.advertise("8", "16Gi", policy={"keepBack": {"cpu": "3"}, "deny": ["team-b"]})
    await set_policy(admin, POLICY)
    shown = await a.read("clusters", "a", "policy")
    assert shown["advertised"] == {"keepBack": {"cpu": "3"}, "deny": ["team-b"]}
    assert shown["effective"]["keepBack"] == {"cpu": "3"}
    assert shown["effective"]["deny"] == ["team-b", "team-x"]
    assert (await a.read("advertisements", "a"))["policy"] == shown["advertised"]
    assert await refusal(broker.cluster("team-b")) == {"RequesterDenied": 1}
    assert await refusal(broker.cluster("other")) == {"RequesterNotAllowed": 1}
    assert (await team.get("clusters", "a", "policy")).refusal == (403, "Forbidden")


@pytest.mark.usefixtures("a")
async def test_available_stays_and_what_is_withheld_is_shown_beside_it(admin, team):
    await set_policy(admin, POLICY)
    await team.reserve("2")
    found = await admin.read("clusters", "a")
    assert found["advertisement"]["resources"]["available"]["cpu"] == "6"
    assert found["status"]["withheld"] == {"cpu": "2"}
    assert found["status"]["policy"]["maxLent"] == {"cpu": "6", "gpu": "0"}
    assert "closed" not in found["status"]


@pytest.mark.parametrize(
    "policy, wanted, refused, remedy",
    [
        ({"allow": ["x"]}, "1", "RequesterNotAllowed", None),
        ({"deny": ["team-?"]}, "1", "RequesterDenied", None),
        (
            {"hours": ["18:00-20:00"]},
            "1",
            "OutsideOpeningHours",
            "a fits if you wait until it opens at 2026-01-01T18:00Z",
        ),
        ({"keepBack": {"cpu": 2}}, "7", "KeptBack", "a fits if you request 1 cpu less"),
        ({"maxLent": {"cpu": 4}}, "7", "LendingCapReached", "a fits if you request 3 cpu less"),
        (
            {"maxPerRequester": {"cpu": 4}},
            "5",
            "RequesterCapReached",
            "a fits if you request 1 cpu less",
        ),
    ],
    ids=str,
)
@pytest.mark.usefixtures("a")
async def test_each_limit_has_its_own_refusal_in_explain_and_in_metrics(
    broker, admin, team, policy, wanted, refused, remedy
):
    await set_policy(admin, policy)
    explained = (await team.post("explain", wish(wanted))).json
    assert explained["candidates"][0]["refusals"] == [refused]
    assert explained.get("remedy", {}).get("text") == remedy
    assert await refusal(team, wanted) == {refused: 1}
    assert broker.metric("kubelend_placement_failures_total", reason=refused) == 1


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


@pytest.mark.usefixtures("a")
async def test_policy_that_is_cleared_holds_no_more(admin, team):
    await set_policy(admin, POLICY)
    cleared = await admin.delete("clusters", "a", "policy")
    assert (cleared.status, cleared.content) == (204, b"")
    assert await admin.read("clusters", "a", "policy") == {"clusterID": "a"}
    assert (await admin.delete("clusters", "a", "policy")).refusal == (404, "NotFound")
    await team.reserve("8")


async def test_policy_may_be_set_before_the_cluster_comes(broker, admin, team):
    assert (await admin.get("clusters", "later", "policy")).refusal == (404, "NotFound")
    await set_policy(admin, {"deny": ["*"]}, "later")
    await broker.cluster("later").advertise("8", "16Gi")
    assert await refusal(team) == {"RequesterDenied": 1}


@pytest.mark.parametrize(
    "policy, detail",
    [
        ({"keepback": {"cpu": "1"}}, "unknown field `keepback`"),
        ({"keepBack": {"cpu": "much"}}, "keepBack.cpu: 'much'"),
        ({"hours": ["never"]}, "hours: 'never' is not a valid opening-hours text"),
        ({"hours": ["08:00-18:00 Atlantis/City"]}, "Atlantis/City is not a known time zone"),
        ({"allow": ["\x07"]}, "allow: '\\x07' is not a cluster name or pattern"),
        ({"deny": ["x"] * 257}, "$.deny"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_policy_that_cannot_hold_is_refused_and_changes_nothing(admin, a, policy, detail):
    answer = await admin.put("clusters", "a", "policy", policy)
    assert answer.status == 400
    assert detail in answer.problem.detail
    assert await admin.read("clusters", "a", "policy") == {"clusterID": "a"}


@pytest.mark.parametrize("name", ["", " ", "a\x00b", "x" * 65], ids=repr)
async def test_what_cannot_be_a_cluster_has_no_policy(admin, name):
    for path in (("clusters", name, "policy"), ("quotas", name)):
        assert (await admin.put(*path, {})).status in {404, 405}


async def test_advertised_policy_that_cannot_hold_is_refused(broker):
    body = offer("a", policy={"hours": ["25:00-26:00"]})
    answer = await broker.cluster("a").post("advertisements", body)
    assert answer.refusal == (400, "InvalidInput")
    assert "policy.hours: '25:00-26:00': 25:00 is not a time of day" in answer.problem.detail


async def test_limits_and_what_is_used_of_them_outlive_a_restart(certificates, tmp_path):
    path = tmp_path / "kubelend.db"
    opened = brokers.reopening(SqliteStore.open(path))
    async with brokers.running(certificates, open_store=opened) as broker:
        await broker.cluster("a").advertise("8", "16Gi")
        await set_policy(broker.admin(), POLICY)
        assert (await broker.admin().put("quotas", "team-a", {"reservations": 1})).status == 200
        await broker.cluster("team-a").reserve("1")
    opened = brokers.reopening(SqliteStore.open(path))
    async with brokers.running(certificates, open_store=opened) as broker:
        team = broker.cluster("team-a")
        assert (await broker.admin().read("clusters", "a", "policy"))["admin"] == POLICY
        assert (await team.post("reservations", wish())).refusal == (403, "QuotaExceeded")
        assert await refusal(broker.cluster("team-x")) == {"RequesterDenied": 1}
        assert (await team.read("quotas", "team-a"))["used"]["reservations"] == 1


@pytest.fixture
async def priced(broker):
    """A core costs 0.25 EUR an hour."""
    found = broker.cluster("a")
    await found.advertise("64", "64Gi", cost={"cpuCost": "0.25", "currency": "EUR"})
    return found


@pytest.fixture
def payer(broker, priced):
    """A requester where cores have a price."""
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


async def test_quota_that_is_exceeded_is_a_final_refusal_with_numbers(broker, admin, payer):
    await allot(admin, {"amounts": {"cpu": "32"}})
    await payer.reserve("30")
    answer = await payer.post("reservations", wish("4"))
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


async def test_explain_shows_the_quota_beside_the_clusters(admin, payer):
    await allot(admin, {"amounts": {"cpu": "2"}, "reservations": 0})
    explained = (await payer.post("explain", wish("3"))).json
    assert explained["quota"] == [
        "r has 0 of 0 reservations, and one more would exceed its quota;"
        " release a reservation, or wait until one ends",
        "r holds 0 of 2 cpu, and 3 more would exceed its quota; request 1 cpu less",
    ]
    assert explained["summary"] == "1/1 cluster fits"
    planned = await payer.post("reservations", wish("3"), dryRun="true")
    assert planned.refusal == (403, "QuotaExceeded")
    real = await payer.post("reservations", wish("3"))
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


async def test_reservation_shows_its_cost_and_a_free_one_none(broker, payer):
    made = await payer.reserve("2")
    assert made["cost"] == {"pricePerHour": "0.5", "currency": "EUR"}
    await broker.cluster("free").advertise("64", "64Gi")
    assert "cost" not in await payer.reserve("2", targetClusterID="free")


async def test_budget_refuses_what_is_too_dear_and_says_what_it_leaves(broker, admin, payer):
    await allot(admin, {"budget": "1", "currency": "EUR"})
    await payer.reserve("2", duration="1h")
    answer = await payer.post("reservations", wish("4"))
    assert answer.refusal == (409, "NoCapacity")
    assert answer.problem.detail == "no suitable cluster: 0/1 cluster fits: 1 OverBudget"
    assert answer.problem.hint == (
        "a fits if you request less, or for a shorter time (your budget leaves 0.5 EUR per hour)"
    )
    assert broker.metric("kubelend_placement_failures_total", reason="OverBudget") == 1
    await payer.reserve("4", duration="30m")
    assert (await payer.read("quotas", "r"))["used"]["spentToday"] == "1"


async def test_budget_in_another_currency_is_no_money_there(admin, payer):
    await allot(admin, {"budget": "100", "currency": "USD"})
    answer = await payer.post("reservations", wish("1"))
    assert answer.json["explanation"]["refusals"] == {"CurrencyMismatch": 1}
    assert answer.problem.hint == ""


async def test_renewal_over_the_budget_is_refused(admin, payer):
    await allot(admin, {"budget": "1", "currency": "EUR"})
    made = await payer.reserve("2", duration="1h")
    answer = await payer.post("reservations", made["id"], "renew", {"duration": "3h"})
    assert answer.refusal == (403, "QuotaExceeded")
    assert answer.problem.detail == (
        f"the budget of r, 1 EUR a day, leaves 0.25 per hour, but {made['id']} costs 0.5"
    )
    renewed = await payer.post("reservations", made["id"], "renew", {"duration": "2h"})
    assert renewed.status == 200


async def test_a_new_day_has_a_new_budget(broker, admin, priced, payer):
    await allot(admin, {"budget": "1", "currency": "EUR"})
    made = await payer.reserve("4", duration="1h")
    assert (await payer.post("reservations", wish("1"))).status == 409
    await payer.delete("reservations", made["id"])
    broker.clock.pass_time(12 * make.HOUR)
    await priced.advertise("64", "64Gi", cost={"cpuCost": "0.25", "currency": "EUR"})
    assert (await payer.read("quotas", "r"))["used"].get("spentToday") == "0"
    await payer.reserve("4", duration="1h")


async def test_quota_that_is_cleared_bounds_no_more(admin, payer):
    await allot(admin, {"reservations": 0})
    assert (await payer.post("reservations", wish())).status == 403
    assert (await admin.delete("quotas", "r")).status == 204
    assert (await admin.delete("quotas", "r")).refusal == (404, "NotFound")
    missing = await payer.get("quotas", "r")
    assert missing.refusal == (404, "NotFound")
    assert missing.problem.detail == "'r' has no quota"
    await payer.reserve()


async def test_quotas_are_listed_in_pages_by_name(admin):
    for name in ("c", "a", "b"):
        await allot(admin, {"reservations": 1}, name)
    first = await admin.read("quotas", limit="2")
    assert [one["clusterID"] for one in first["quotas"]] == ["a", "b"]
    rest = await admin.read("quotas", **{"limit": "2", "continue": first["next"]})
    assert [one["clusterID"] for one in rest["quotas"]] == ["c"]
    assert "next" not in rest


async def test_a_cluster_sees_its_own_quota_only(broker, admin, payer):
    await allot(admin, {"reservations": 1})
    assert (await broker.cluster("s").get("quotas", "r")).refusal == (403, "Forbidden")
    assert (await payer.get("quotas")).refusal == (403, "Forbidden")


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
