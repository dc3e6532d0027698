"""Clusters: what they advertise and how long it is believed, administration, and failover."""

import pytest

import make
from callers import offer, wish
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


async def test_capacity_stands_in_for_allocatable_and_now_for_the_timestamp(a):
    seen = await publish(a, resources={"capacity": {"cpu": "4", "memory": "8Gi"}})
    assert seen["resources"]["allocatable"] == {"cpu": "4", "memory": "8Gi"}
    assert seen["resources"]["allocated"] == {"cpu": "0", "memory": "0"}
    assert seen["resources"]["available"] == {"cpu": "4", "memory": "8Gi"}
    assert seen["timestamp"] == "2026-01-01T12:00:00Z"


@pytest.mark.parametrize(
    "amount, shown",
    [
        pytest.param(
            {"cpu": "15e-1", "memory": "1G"},
            {"cpu": "1500m", "memory": "1000000000"},
            id="exponents and decimal suffixes",
        ),
        pytest.param({"cpu": 2, "memory": 4096}, {"cpu": "2", "memory": "4Ki"}, id="numbers"),
        pytest.param(
            {"cpu": "1999999u", "memory": "2000m"},
            {"cpu": "1999m", "memory": "2"},
            id="rounded down",
        ),
        pytest.param(
            {"cpu": "4", "memory": "8Gi", "gpu": "", "storage": ""},
            {"cpu": "4", "memory": "8Gi"},
            id="empty texts",
        ),
    ],
)
async def test_offers_are_read_in_every_form_and_rounded_down(a, amount, shown):
    seen = await publish(a, resources={"capacity": amount}, flavour="unknown fields are ignored")
    if all(amount.values()):  # the response repeats what was sent in its own words
        assert seen["resources"]["capacity"] == amount
        assert seen["resources"]["available"] == shown
    assert (await a.read("advertisements", "a"))["resources"]["capacity"] == shown


async def test_sent_timestamp_is_shown_and_not_judged_by(broker, a, b):
    """Neither a clock that is years behind nor one that is ahead matters."""
    for sent in ("1999-12-31T23:59:59.123456789Z", "2999-01-01T00:00:00+14:00"):
        body = offer("a", timestamp=sent)
        assert (await a.post("advertisements", body)).status == 200
        assert (await status_of(a))["phase"] == "Active"
        assert (await b.post("reservations", wish("1m", "1Mi"))).status == 201
        assert (await status_of(a))["lastUpdateTime"] == "2026-01-01T12:00:00Z"


async def test_idle_gpu_cluster_lends_its_gpus(a, b):
    """GPUs in capacity, no pod that uses any, and so none in allocated."""
    capacity = {"cpu": "32", "memory": "128Gi", "gpu": "4"}
    used = {"cpu": "2", "memory": "4Gi"}
    await publish(a, resources={"capacity": capacity, "allocatable": capacity, "allocated": used})
    made = await b.reserve("4", "16Gi", gpu="3")
    assert made["requestedResources"] == {"cpu": "4", "memory": "16Gi", "gpu": "3"}
    seen = await resources_of(a)
    assert seen["reserved"] == {"cpu": "4", "memory": "16Gi", "gpu": "3"}
    assert seen["available"] == {"cpu": "26", "memory": "108Gi", "gpu": "1"}
    refused = await b.post("reservations", wish("1", "1Gi", gpu="2"))
    assert refused.refusal == (409, "NoCapacity")
    assert "InsufficientGPU" in refused.problem.error
    await b.delete("reservations", made["id"])
    assert (await resources_of(a))["available"]["gpu"] == "4"


async def test_storage_and_extended_resources_are_lent_like_any_other(a, b):
    everything = {
        "cpu": "8",
        "memory": "16Gi",
        "storage": "500Gi",
        "extended": {"example.com/fpga": "2", "hugepages-2Mi": "1Gi"},
    }
    await publish(a, resources={"capacity": everything})
    wanted = {
        "cpu": "1",
        "memory": "1Gi",
        "storage": "200Gi",
        "extended": {"example.com/fpga": "1"},
    }
    answer = await b.post("reservations", {"requestedResources": wanted})
    assert answer.status == 201
    assert answer.json["requestedResources"] == wanted
    seen = await resources_of(a)
    assert seen["reserved"] == wanted
    assert seen["available"] == {
        "cpu": "7",
        "memory": "15Gi",
        "storage": "300Gi",
        "extended": {"example.com/fpga": "1", "hugepages-2Mi": "1Gi"},
    }
    more = wanted | {"extended": {"example.com/fpga": "2"}}
    refused = await b.post("reservations", {"requestedResources": more})
    assert "InsufficientExtended" in refused.problem.error
    unknown = wanted | {"extended": {"example.com/tpu": "1"}}
    assert (await b.post("reservations", {"requestedResources": unknown})).status == 409


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


async def test_advertisement_again_keeps_every_lock(a, b):
    await a.advertise("4", "8Gi")
    made = await b.reserve("3", "1Gi")
    for _ in range(3):
        answer = await a.post("advertisements", offer("a", "4", "8Gi"))
        assert answer.json["advertisement"]["resources"]["available"]["cpu"] == "1"
        assert [found["id"] for found in answer.json["providerInstructions"]] == [made["id"]]
    assert (await b.post("reservations", wish("2"))).status == 409


async def test_cluster_that_fills_up_under_its_promises_says_so_and_gets_no_more(a, b):
    await a.advertise("4", "8Gi")
    await b.reserve("3", "1Gi")
    used = {"cpu": "2", "memory": "1Gi"}
    capacity = {"cpu": "4", "memory": "8Gi"}
    seen = await publish(a, resources={"capacity": capacity, "allocated": used})
    assert seen["resources"]["available"] == {"cpu": "0", "memory": "6Gi"}
    assert (await status_of(a))["message"].startswith("Overcommitted")
    assert (await b.post("reservations", wish("1m", "1Mi"))).refusal == (409, "NoCapacity")


async def test_stale_cluster_gets_nothing_new_keeps_what_it_lends_and_comes_back(broker, a, b):
    await a.advertise()
    made = await b.reserve(duration="24h")
    broker.clock.pass_time(10 * make.MINUTE)
    (listed,) = (await broker.viewer().read("clusters"))["clusters"]
    assert (listed["status"]["phase"], listed["status"]["active"]) == ("Stale", False)
    refused = await b.post("reservations", wish())
    assert refused.problem.error.startswith("no suitable cluster: 0/1 cluster fits: 1 Stale")
    assert await b.phase_of(made["id"]) == "Reserved"
    await a.advertise()
    assert ((await status_of(a))["phase"], (await status_of(a))["active"]) == ("Active", True)
    assert (await b.post("reservations", wish())).status == 201


@pytest.mark.parametrize(
    "valid_for, stale_after, believed",
    [
        pytest.param("30s", 10 * make.MINUTE, 30 * make.SECOND, id="shorter than the limit"),
        pytest.param("24h", 10 * make.MINUTE, 10 * make.MINUTE, id="longer than the limit"),
        pytest.param("", 2 * make.MINUTE, 2 * make.MINUTE, id="not said"),
    ],
)
async def test_advertisement_is_believed_as_long_as_both_sides_allow(
    start, valid_for, stale_after, believed
):
    broker = await start(stale_after=stale_after)
    a = broker.cluster("a")
    await a.advertise(**({"validFor": valid_for} if valid_for else {}))
    broker.clock.pass_time(believed - make.SECOND)
    assert (await status_of(a))["phase"] == "Active"
    broker.clock.pass_time(make.SECOND)
    assert (await status_of(a))["phase"] == "Stale"
    assert (await broker.cluster("b").post("reservations", wish())).status == 409


async def test_answer_holds_only_what_waits_for_this_provider(broker, a, b):
    c = broker.cluster("c")
    await a.advertise("8", "16Gi")
    await c.advertise("8", "16Gi")
    mine = [await b.reserve(targetClusterID="a") for _ in range(3)]
    await b.reserve(targetClusterID="c")
    await b.post("reservations", mine[0]["id"], "activate")
    await b.delete("reservations", mine[1]["id"])
    answer = await a.advertise("8", "16Gi")
    assert [found["id"] for found in answer["providerInstructions"]] == [mine[2]["id"]]


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
    await broker.cluster("a").advertise("8", "16Gi")
    assert (await resources_of(broker.cluster("a")))["available"]["cpu"] == "8"


@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize(
    "call, refusal, detail",
    [
        (("clusters", "nobody", "cordon"), (404, "NotFound"), "nobody"),
        (("clusters", "nobody", "uncordon"), (404, "NotFound"), "nobody"),
        (("clusters", "nobody", "drain"), (404, "NotFound"), "nobody"),
        (("clusters", "a", "cordon", {"reason": "x" * 1025}), (400, "InvalidInput"), "$.reason"),
        (("clusters", "a", "drain", {"reason": "x" * 1025}), (400, "InvalidInput"), "$.reason"),
    ],
    ids=lambda value: " ".join(map(str, value))[:30] if isinstance(value, tuple) else None,
)
async def test_command_for_an_unknown_cluster_or_with_a_long_reason_is_refused(
    admin, call, refusal, detail
):
    answer = await admin.post(*call)
    assert answer.refusal == refusal
    assert detail in answer.problem.detail
    assert (await admin.get("clusters", limit="all")).refusal == (400, "InvalidInput")


STEP = 5 * make.SECOND


async def fall_silent(broker, *speaking):
    """Two minutes in which everybody else speaks."""
    for _ in range(2 * make.MINUTE // STEP):
        broker.clock.pass_time(STEP)
        for one in speaking:
            await one.advertise("4")
        await broker.expire()


LOSING = pytest.mark.broker(
    stale_after=make.MINUTE,
    lost_after=make.MINUTE,
    offers={"paris": ("8", "8Gi"), "oslo": ("4", "8Gi")},
)


@LOSING
async def test_failover_reaches_the_streams_of_both_sides_and_the_audit_log(broker, r):
    made = await r.reserve()
    assert made["targetClusterID"] == "paris"
    async with r.stream() as stream:
        _, use = await stream.events(2)
        await fall_silent(broker, broker.cluster("oslo"))
        moved = await stream.event()
    assert moved.told == ("requester", "Use", made["id"])
    assert moved.data["message"] == "Use oslo for 1 CPU / 1Gi Memory"
    assert moved.data["reservation"]["status"]["message"] == (
        "Resources locked in cluster oslo. Moved from paris, unreachable since 12:00:00 UTC"
    )
    line = (await broker.viewer().read("audit"))["lines"][0]
    assert (line["actor"]["name"], line["action"]) == ("broker", "Placed")
    assert line["before"] == {"reason": "Locked", "target": "paris"}
    assert line["after"] == {"reason": "Moved", "target": "oslo"}
    async with broker.cluster("paris").stream(after=use.id) as stream:
        assert (await stream.event()).told == ("provider", "Withdraw", made["id"])


@LOSING
async def test_what_fits_nowhere_else_is_counted_and_logged(broker, log, r):
    paris, oslo = broker.cluster("paris"), broker.cluster("oslo")
    made = await r.reserve("6")
    await fall_silent(broker, oslo)
    status = (await r.read("reservations", made["id"]))["status"]
    assert (status["phase"], status["reason"]) == ("Reserved", "ProviderSilent")
    assert status["message"] == (
        "Stays in cluster paris, unreachable since 12:00:00 UTC; no other cluster fits yet"
    )
    kept = {"phase": "Reserved", "reason": "ProviderSilent"}
    assert broker.metric("kubelend_reservations", **kept) == 1
    line = (await broker.viewer().read("audit"))["lines"][0]
    assert (line["action"], line["after"]) == ("FailoverBlocked", {"reason": "ProviderSilent"})
    (logged,) = log.lines("Provider unreachable, failing over its reservations")
    assert logged["cluster"] == "paris"
    await paris.advertise("8")
    broker.clock.pass_time(make.SECOND)
    await broker.expire()
    back = (await r.read("reservations", made["id"]))["status"]
    assert (back["reason"], back["message"]) == ("Locked", "Resources locked in cluster paris")


@pytest.mark.broker(
    stale_after=make.MINUTE,
    lost_after=make.NO_TIME,
    offers={"paris": ("8", "8Gi"), "oslo": ("4", "8Gi")},
)
async def test_zero_leaves_everything_where_it_is(broker, r):
    made = await r.reserve()
    await fall_silent(broker, broker.cluster("oslo"))
    assert (await r.read("reservations", made["id"]))["targetClusterID"] == "paris"
