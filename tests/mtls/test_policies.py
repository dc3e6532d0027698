"""What a provider lends, to whom and when: said by itself, set by an administrator, seen by both."""

import pytest

import brokers
import make
from callers import offer, wish
from kubelend.stores.sqlite import SqliteStore

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
def admin(broker):
    return broker.admin()


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
