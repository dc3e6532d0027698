"""What administrators do with clusters: look, close, open, empty and forget them."""

import pytest

import make
from callers import wish
from kubelend.transports import tls


@pytest.fixture
def admin(broker):
    return broker.admin()


@pytest.fixture
def r(broker):
    return broker.cluster("r")


@pytest.fixture
async def fleet(broker):
    for name, cpu in (("a", "8"), ("b", "4")):
        await broker.cluster(name).advertise(cpu, "16Gi")


@pytest.mark.usefixtures("fleet")
async def test_clusters_are_shown_with_what_the_broker_makes_of_them(
    broker, certificates, admin, r
):
    await r.reserve("2", "4Gi")
    listed = (await admin.read("clusters"))["clusters"]
    assert [found["advertisement"]["clusterID"] for found in listed] == ["a", "b"]
    assert listed[0] == await admin.read("clusters", "a")
    assert listed[0] == await broker.cluster("a").read("clusters", "a")
    assert listed[0]["status"] == {
        "phase": "Active",
        "active": True,
        "score": "75.00",
        "rating": "Good",
        "lastUpdateTime": "2026-01-01T12:00:00Z",
        "validUntil": "2026-01-01T12:10:00Z",
        "reservations": 1,
        "certificateUntil": f"{tls.certificate_expiry(certificates.cluster('a')):%Y-%m-%dT%H:%M:%SZ}",
    }
    assert listed[0]["advertisement"]["resources"]["reserved"] == {"cpu": "2", "memory": "4Gi"}


@pytest.mark.usefixtures("fleet")
async def test_cordoned_cluster_keeps_what_it_lends_and_gets_no_more(broker, admin, r):
    made = await r.reserve("1")
    answer = await admin.post("clusters", "a", "cordon", {"reason": "new kernel"})
    assert answer.status == 200
    status = answer.json["status"]
    assert (status["cordoned"], status["cordonReason"]) == (True, "new kernel")
    assert status["active"] is True
    assert (await r.reserve("1"))["targetClusterID"] == "b"
    refused = await r.post("reservations", wish("6"))
    assert "1 Cordoned" in refused.problem.error
    assert (await r.read("reservations", made["id"]))["targetClusterID"] == "a"
    await broker.cluster("a").advertise("8", "16Gi")
    assert (await admin.read("clusters", "a"))["status"]["cordoned"] is True

    opened = await admin.post("clusters", "a", "uncordon")
    assert opened.status == 200
    assert "cordoned" not in opened.json["status"]
    assert (await r.reserve("6"))["targetClusterID"] == "a"


@pytest.mark.usefixtures("fleet")
async def test_cordon_without_a_reason_names_who_did_it(admin):
    for _ in range(2):
        answer = await admin.post("clusters", "a", "cordon")
        assert answer.json["status"]["cordonReason"] == "by alice"
    assert (await admin.post("clusters", "a", "uncordon")).status == 200
    assert (await admin.post("clusters", "a", "uncordon")).status == 200


@pytest.mark.usefixtures("fleet")
async def test_drained_cluster_hands_over_what_fits_elsewhere_and_releases_the_rest(
    broker, admin, r
):
    small, large = await r.reserve("3"), await r.reserve("5", targetClusterID="a")
    active = await r.reserve("1", targetClusterID="b")
    await r.post("reservations", small["id"], "activate")
    answer = await admin.post("clusters", "a", "drain", {"reason": "retired"})
    assert answer.status == 200
    moved, released = answer.json["reservations"]
    assert (moved["id"], moved["targetClusterID"]) == (small["id"], "b")
    assert (moved["status"]["phase"], moved["status"]["reason"]) == ("Reserved", "Moved")
    assert moved["previousClusterIDs"] == ["a"]
    assert released["id"] == large["id"]
    assert (released["status"]["phase"], released["status"]["reason"]) == ("Released", "Drained")
    assert released["status"]["message"].startswith("Cluster a was drained: retired; then 0/2")
    cluster = answer.json["cluster"]
    assert cluster["status"]["cordonReason"] == "retired"
    assert "reservations" not in cluster["status"]
    assert cluster["advertisement"]["resources"]["reserved"]["cpu"] == "0"
    assert (await r.read("reservations", active["id"]))["targetClusterID"] == "b"
    again = await admin.post("clusters", "a", "drain", {"reason": "retired"})
    assert again.json["reservations"] == []


@pytest.mark.usefixtures("fleet")
async def test_drain_is_pushed_to_whom_it_concerns(broker, admin, r):
    made = await r.reserve("3")
    a, b = broker.cluster("a"), broker.cluster("b")
    async with a.stream() as old, b.stream() as new, r.stream() as requester:
        await old.events(2)
        await new.event()
        await requester.events(2)
        await admin.post("clusters", "a", "drain")
        assert (await old.event()).told == ("provider", "Withdraw", made["id"])
        assert (await new.event()).told == ("provider", "Hold", made["id"])
        assert (await requester.event()).told == ("requester", "Use", made["id"])


@pytest.mark.usefixtures("fleet")
async def test_removed_cluster_is_forgotten(broker, admin, r):
    made = await r.reserve("3")
    refused = await admin.delete("clusters", "a")
    assert refused.refusal == (409, "Conflict")
    assert refused.problem.error == "a still lends 1 reservation; drain the cluster first"
    await r.delete("reservations", made["id"])
    gone = await admin.delete("clusters", "a")
    assert (gone.status, gone.content) == (204, b"")
    assert (await admin.get("clusters", "a")).refusal == (404, "NotFound")
    assert (await admin.delete("clusters", "a")).refusal == (404, "NotFound")
    assert (await broker.cluster("a").get("advertisements", "a")).refusal == (404, "NotFound")
    assert (await r.post("reservations", wish("8"))).status == 409
    assert (await r.read("reservations", made["id"]))["targetClusterID"] == "a"


@pytest.mark.parametrize("step", ["cordon", "uncordon", "drain"])
async def test_unknown_cluster_is_not_found(admin, step):
    assert (await admin.post("clusters", "nobody", step)).refusal == (404, "NotFound")


@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize("step", ["cordon", "drain"])
async def test_reason_that_is_too_long_is_refused(admin, step):
    answer = await admin.post("clusters", "a", step, {"reason": "x" * 1025})
    assert answer.refusal == (400, "InvalidInput")
    assert "$.reason" in answer.problem.detail


async def test_page_of_clusters_that_cannot_be_is_refused(admin):
    assert (await admin.get("clusters", limit="all")).refusal == (400, "InvalidInput")


@pytest.mark.usefixtures("fleet")
async def test_stale_cluster_is_shown_as_such_until_it_speaks_again(broker, admin):
    broker.clock.pass_time(make.HOUR)
    statuses = [found["status"] for found in (await admin.read("clusters"))["clusters"]]
    assert [(s["phase"], s["active"]) for s in statuses] == [("Stale", False)] * 2
    await broker.cluster("a").advertise()
    assert (await admin.read("clusters", "a"))["status"]["phase"] == "Active"
