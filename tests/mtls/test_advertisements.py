"""What clusters say of themselves, how much of it is believed, and for how long."""

import pytest

import make
from callers import offer, wish


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
    await publish(a, resources={"capacity": amount})
    assert (await a.read("advertisements", "a"))["resources"]["capacity"] == shown


async def test_the_answer_repeats_what_was_sent_in_its_own_words(a):
    seen = await publish(a, resources={"capacity": {"cpu": "15e-1", "memory": "1G"}})
    assert seen["resources"]["capacity"] == {"cpu": "15e-1", "memory": "1G"}
    assert seen["resources"]["available"] == {"cpu": "1500m", "memory": "1000000000"}


async def test_sent_timestamp_is_shown_and_not_judged_by(broker, a, b):
    """Neither a clock that is years behind nor one that is ahead matters."""
    for sent in ("1999-12-31T23:59:59.123456789Z", "2999-01-01T00:00:00+14:00"):
        body = offer("a", timestamp=sent)
        assert (await a.post("advertisements", body)).status == 200
        assert (await status_of(a))["phase"] == "Active"
        assert (await b.post("reservations", wish("1m", "1Mi"))).status == 201
        assert (await status_of(a))["lastUpdateTime"] == "2026-01-01T12:00:00Z"


async def test_unknown_fields_are_ignored(a):
    answer = await a.post("advertisements", offer("a", flavour="new", spec={"x": [1, 2]}))
    assert answer.status == 200


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


async def test_removed_and_advertised_anew_a_cluster_starts_clean(broker, a, b):
    await a.advertise("4", "8Gi")
    made = await b.reserve("3", "1Gi")
    assert (await broker.admin().delete("clusters", "a")).refusal == (409, "Conflict")
    await b.delete("reservations", made["id"])
    assert (await broker.admin().delete("clusters", "a")).status == 204
    await a.advertise("4", "8Gi")
    assert (await resources_of(a))["available"]["cpu"] == "4"


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
    assert (await status_of(a))["active"] is False
    refused = await b.post("reservations", wish())
    assert refused.problem.error.startswith("no suitable cluster: 0/1 cluster fits: 1 Stale")
    assert await b.phase_of(made["id"]) == "Reserved"
    await a.advertise()
    assert (await status_of(a))["active"] is True
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
