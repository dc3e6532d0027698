"""Clusters: what they advertise and how long it is believed, administration, and failover."""

import pytest

import make
from kubelend.transports import tls


async def publish(caller, **fields):
    """Publish exactly these resources; gives what the broker makes of them."""
    answer = await caller.post("advertisements", {"clusterID": caller.name, **fields})
    assert answer.status == 200, answer
    return answer.json["advertisement"]


async def resources_of(caller):
    return (await caller.read("advertisements", caller.name))["resources"]


async def status_of(caller):
    return (await caller.read("clusters", caller.name))["status"]


@pytest.fixture
def a(broker):
    return broker.cluster("a")


@pytest.fixture
def b(broker):
    return broker.cluster("b")


async def test_what_a_cluster_says_of_reserved_and_available_is_not_read(a):
    said = {"capacity": {"cpu": "4", "memory": "8Gi"}, "allocated": {"cpu": "1", "memory": "2Gi"}}
    lies = {
        "reserved": {"cpu": "-3", "memory": "what?"},
        "available": {"cpu": "400", "memory": "800Gi"},
    }
    seen = await publish(a, resources=said | lies)
    assert seen["resources"]["capacity"] == said["capacity"]
    assert seen["resources"]["reserved"] == {"cpu": "0", "memory": "0"}
    assert seen["resources"]["available"] == {"cpu": "3", "memory": "6Gi"}


async def test_answer_repeats_what_was_sent_and_shows_it_canonically_later(a):
    """Numbers, exponents and empty texts of any form; unknown fields are ignored."""
    sent = {"cpu": "1999999u", "memory": 4096}
    seen = await publish(a, resources={"capacity": sent}, flavour="unknown")
    assert seen["resources"]["capacity"] == sent
    assert seen["resources"]["available"] == {"cpu": "1999m", "memory": "4Ki"}
    await publish(a, resources={"capacity": {"cpu": "15e-1", "memory": "1G", "gpu": ""}})
    shown = (await resources_of(a))["capacity"]
    assert shown == {"cpu": "1500m", "memory": "1000000000"}


async def test_gpus_storage_and_extended_resources_are_lent_like_any_other(a, b):
    """A GPU cluster without pods that use any has none in allocated."""
    fpga, pages = "example.com/fpga", "hugepages-2Mi"
    amounts = {"cpu": "8", "memory": "16Gi", "gpu": "4", "storage": "500Gi"}
    used = {"cpu": "1", "memory": "1Gi"}
    capacity = amounts | {"extended": {fpga: "2", pages: "1Gi"}}
    await publish(a, resources={"capacity": capacity, "allocated": used})
    wanted = {"cpu": "1", "memory": "1Gi", "gpu": "3", "storage": "200Gi", "extended": {fpga: "1"}}
    answer = await b.post("reservations", {"requestedResources": wanted})
    assert (answer.status, answer.json["requestedResources"]) == (201, wanted)
    seen = await resources_of(a)
    assert seen["reserved"] == wanted
    left = {"cpu": "6", "memory": "14Gi", "gpu": "1", "storage": "300Gi"}
    assert seen["available"] == left | {"extended": {fpga: "1", pages: "1Gi"}}
    more = wanted | {"gpu": "1", "extended": {fpga: "2"}}
    refused = await b.post("reservations", {"requestedResources": more})
    assert "InsufficientExtended" in refused.problem.error


async def test_prices_labels_region_and_endpoint_are_kept_and_shown(a):
    said = {
        "clusterName": "the first",
        "cost": {"cpuCost": "0.05", "memoryCost": "0.01", "gpuCost": "2.5", "currency": "EUR"},
        "labels": {"tier": "gold", "topology.kubernetes.io/region": "eu-west"},
        "region": "eu-west",
        "validFor": "1m30s",
        "endpointURL": "https://a.example.org:6443",
    }
    seen = await publish(a, resources={"capacity": {"cpu": "4", "memory": "8Gi"}}, **said)
    assert {name: seen[name] for name in said} == said


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
    until = tls.own_certificate(certificates.cluster("a")).not_valid_after_utc
    assert listed[0]["status"] == {
        "phase": "Active",
        "active": True,
        "score": "75.00",
        "rating": "Good",
        "lastUpdateTime": "2026-01-01T12:00:00Z",
        "validUntil": "2026-01-01T12:10:00Z",
        "reservations": 1,
        "certificateUntil": f"{until:%Y-%m-%dT%H:%M:%SZ}",
    }
    assert listed[0]["advertisement"]["resources"]["reserved"] == {"cpu": "2", "memory": "4Gi"}


@pytest.mark.usefixtures("fleet")
async def test_cordoned_cluster_says_why_and_gets_no_more_until_it_is_opened(broker, admin, r):
    answer = await admin.post("clusters", "a", "cordon", {"reason": "new kernel"})
    assert answer.status == 200
    status = answer.json["status"]
    assert (status["cordoned"], status["cordonReason"]) == (True, "new kernel")
    assert status["active"] is True
    assert (await r.reserve("1"))["targetClusterID"] == "b"
    await broker.cluster("a").advertise("8", "16Gi")
    assert (await admin.read("clusters", "a"))["status"]["cordoned"] is True
    for _ in range(2):
        opened = await admin.post("clusters", "a", "uncordon")
        assert (opened.status, "cordoned" in opened.json["status"]) == (200, False)
    assert (await r.reserve("6"))["targetClusterID"] == "a"
    unexplained = await admin.post("clusters", "a", "cordon")
    assert unexplained.json["status"]["cordonReason"] == "by alice"


@pytest.mark.usefixtures("fleet")
async def test_drain_is_answered_with_what_moved_and_pushed_to_all_it_concerns(broker, admin, r):
    small, large = await r.reserve("3"), await r.reserve("5", targetClusterID="a")
    a, b = broker.cluster("a"), broker.cluster("b")
    async with a.stream() as old, b.stream() as new, r.stream() as requester:
        await old.events(3)
        await new.event()
        await requester.events(3)
        answer = await admin.post("clusters", "a", "drain", {"reason": "retired"})
        assert (await old.event()).instruction == ("provider", "Withdraw", small["id"])
        assert (await new.event()).instruction == ("provider", "Hold", small["id"])
        assert (await requester.event()).instruction == ("requester", "Use", small["id"])
    assert answer.status == 200
    moved, released = answer.json["reservations"]
    assert (moved["id"], moved["targetClusterID"]) == (small["id"], "b")
    assert (moved["status"]["reason"], moved["previousClusterIDs"]) == ("Moved", ["a"])
    assert (released["id"], released["status"]["reason"]) == (large["id"], "Drained")
    assert released["status"]["message"].startswith("Cluster a was drained: retired; then 0/2")
    cluster = answer.json["cluster"]
    assert cluster["status"]["cordonReason"] == "retired"
    assert "reservations" not in cluster["status"]
    assert cluster["advertisement"]["resources"]["reserved"]["cpu"] == "0"
    again = await admin.post("clusters", "a", "drain", {"reason": "retired"})
    assert again.json["reservations"] == []


@pytest.mark.usefixtures("fleet")
async def test_command_for_an_unknown_cluster_or_with_a_long_reason_is_refused(admin):
    for command in ("cordon", "uncordon", "drain"):
        answer = await admin.post("clusters", "nobody", command)
        assert answer.refusal == (404, "NotFound")
        assert "nobody" in answer.problem.detail
    for command in ("cordon", "drain"):
        answer = await admin.post("clusters", "a", command, {"reason": "x" * 1025})
        assert answer.refusal == (400, "InvalidInput")
        assert "$.reason" in answer.problem.detail
    assert (await admin.get("clusters", limit="all")).refusal == (400, "InvalidInput")


@pytest.mark.broker(
    stale_after=make.MINUTE,
    lost_after=make.MINUTE,
    offers={"paris": ("8", "8Gi"), "oslo": ("4", "8Gi")},
)
async def test_failover_reaches_the_streams_of_both_sides_and_the_audit_log(broker, r):
    made = await r.reserve()
    assert made["targetClusterID"] == "paris"
    async with r.stream() as stream:
        _, use = await stream.events(2)
        for _ in range(24):
            broker.clock.pass_time(5 * make.SECOND)
            await broker.cluster("oslo").advertise("4")
            await broker.expire()
        moved = await stream.event()
    assert moved.instruction == ("requester", "Use", made["id"])
    assert moved.data["message"] == "Use oslo for 1 CPU / 1Gi Memory"
    line = (await broker.viewer().read("audit"))["lines"][0]
    assert (line["actor"]["name"], line["action"]) == ("broker", "Placed")
    assert line["before"] == {"reason": "Locked", "target": "paris"}
    assert line["after"] == {"reason": "Moved", "target": "oslo"}
    async with broker.cluster("paris").stream(after=use.id) as stream:
        assert (await stream.event()).instruction == ("provider", "Withdraw", made["id"])
