"""The published contract to the letter, and what is wrong with a call: a status, a code, a named field."""

import json
import re

import pytest

import make
from callers import Json, offer, wish
from kubelend.wire import routes

DEEP = b'{"requestedResources":' + b'{"cpu":' * 10_000 + b"1" + b"}" * 10_001

QUANTITIES = ["requestedResources.cpu", "requestedResources.memory", "requestedResources.gpu"]


@pytest.fixture
async def a(broker):
    found = broker.cluster("a")
    await found.advertise("64", "64Gi")
    return found


async def refusal(caller, *path, content):
    """The one sentence of a call that must be answered with 400."""
    answer = await caller.post(*path, content=content)
    assert answer.status == 400, answer
    body = answer.json
    assert body["error"] == body["detail"] + (f"; {body['hint']}" if "hint" in body else "")
    assert body["type"] == f"urn:kubelend:problem:{body['code']}"
    assert (body["title"], body["status"]) == ("Bad Request", 400)
    return body["code"], body["detail"]


def encoded(body):
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"{", id="half"),
        pytest.param(b"{} {}", id="two"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"null", id="null"),
        pytest.param(b"cpu=1", id="a form"),
        pytest.param(b"\xff\xfe{}", id="not UTF-8"),
        pytest.param(b"\xef\xbb\xbf{}", id="byte order mark"),
        pytest.param(b'{"requestedResources":{"cpu":NaN,"memory":"1Gi"}}', id="NaN"),
        pytest.param(b'{"requestedResources":{"cpu":Infinity,"memory":"1Gi"}}', id="infinity"),
        pytest.param(b'{"requestedResources":{"cpu":"\\ud800","memory":"1Gi"}}', id="surrogate"),
        pytest.param(DEEP, id="ten thousand levels"),
        pytest.param(b"[" * 100_000, id="a hundred thousand brackets"),
    ],
)
@pytest.mark.parametrize("path", ["advertisements", "reservations", "explain"])
async def test_what_is_no_json_of_the_right_shape_is_refused(r, path, content):
    code, detail = await refusal(r, path, content=content)
    assert code in {"InvalidInput", "InvalidQuantity"}
    assert "body: " in detail or "requestedResources.cpu" in detail


@pytest.mark.parametrize("path", ["reservations", "explain"])
@pytest.mark.parametrize("field", QUANTITIES)
@pytest.mark.parametrize(
    "value",
    ["-1", "1 Gi", "one", "1e99", "9" * 400, "0x10", "٣", "1_000", "--1", "+", ".", "NaN", "1Zi"],
    ids=lambda value: value[:8],
)
async def test_quantity_that_is_none_is_refused_by_its_field(r, path, field, value):
    name = field.partition(".")[2]
    body = wish()
    body["requestedResources"][name] = value
    code, detail = await refusal(r, path, content=encoded(body))
    assert code == "InvalidQuantity"
    assert detail.startswith(f"{field}: ")


@pytest.mark.parametrize("value", ["0", "0m", "-0", 0], ids=repr)
@pytest.mark.parametrize("name", ["cpu", "memory"])
async def test_nothing_cannot_be_asked_for(r, name, value):
    body = wish()
    body["requestedResources"][name] = value
    code, detail = await refusal(r, "reservations", content=encoded(body))
    assert code == "InvalidQuantity"
    assert detail == f"requestedResources.{name}: must be more than zero"


@pytest.mark.parametrize("name", ["cpu", "memory"])
async def test_amount_that_is_needed_is_not_left_empty(r, name):
    asked, offered = wish(), offer("r")
    asked["requestedResources"][name] = offered["resources"]["capacity"][name] = ""
    code, detail = await refusal(r, "reservations", content=encoded(asked))
    assert (code, detail) == ("InvalidQuantity", f"requestedResources.{name}: '' is not a quantity")
    code, detail = await refusal(r, "advertisements", content=encoded(offered))
    assert (code, detail) == ("InvalidQuantity", f"resources.capacity.{name}: '' is not a quantity")


@pytest.mark.parametrize(
    "change, where",
    [
        pytest.param({"cpu": None}, "$.requestedResources.cpu", id="null"),
        pytest.param({"cpu": 1.5}, "$.requestedResources.cpu", id="a fraction"),
        pytest.param({"cpu": True}, "$.requestedResources.cpu", id="a truth"),
        pytest.param({"memory": ["1Gi"]}, "$.requestedResources.memory", id="a list"),
        pytest.param({"extended": ["x"]}, "$.requestedResources.extended", id="extended"),
        pytest.param(
            {"extended": {str(n): "1" for n in range(33)}},
            "$.requestedResources.extended",
            id="too many extended",
        ),
    ],
)
async def test_amount_of_another_type_is_refused_by_its_place(r, change, where):
    body = wish()
    body["requestedResources"] |= change
    code, detail = await refusal(r, "reservations", content=encoded(body))
    assert code == "InvalidInput"
    assert where in detail


@pytest.mark.parametrize("name", ["cpu", "memory"])
async def test_amount_that_is_missing_is_refused_by_its_name(r, name):
    body = wish()
    del body["requestedResources"][name]
    _, detail = await refusal(r, "reservations", content=encoded(body))
    assert f"missing required field `{name}` - at `$.requestedResources`" in detail


@pytest.mark.parametrize(
    "fields, code, detail",
    [
        ({"duration": "soon"}, "InvalidDuration", "duration: "),
        ({"duration": "-1h"}, "InvalidDuration", "duration: '-1h' is not above zero"),
        ({"duration": "0s"}, "InvalidDuration", "duration: '0s' is not above zero"),
        ({"duration": "1h " * 30}, "InvalidInput", "body: Expected `str` of length <= 64"),
        ({"duration": "9" * 60 + "h"}, "InvalidDuration", "duration: "),
        ({"duration": "1d"}, "InvalidDuration", "duration: "),
        ({"duration": 3600}, "InvalidInput", "body: Expected `str`, got `int` - at `$.duration`"),
        ({"priority": "high"}, "InvalidInput", "body: Expected `int`, got `str` - at `$.priority`"),
        (
            {"priority": 2**31},
            "InvalidInput",
            "body: Expected `int` <= 2147483647 - at `$.priority`",
        ),
        ({"priority": 10**400}, "InvalidInput", "body: "),
        ({"priority": 1.5}, "InvalidInput", "body: Expected `int`, got `float` - at `$.priority`"),
        ({"policy": "random"}, "InvalidInput", "policy: 'random' is unknown"),
        ({"weights": {"luck": 1}}, "InvalidInput", "weights: 'luck' is unknown"),
        (
            {"weights": {"price": -1}},
            "InvalidInput",
            "weights.price: -1.0 is not between 0 and 1000",
        ),
        ({"weights": {"price": 1001}}, "InvalidInput", "weights.price: 1001.0 is not between"),
        ({"weights": {"price": 0}}, "InvalidInput", "weights: all are zero"),
        ({"weights": {"price": "1"}}, "InvalidInput", "body: Expected `float`, got `str`"),
        (
            {"constraints": {"maxPricePerHour": "cheap"}},
            "InvalidInput",
            "constraints.maxPricePerHour:",
        ),
        ({"constraints": {"currency": "€"}}, "InvalidInput", "constraints.currency: "),
        ({"constraints": {"labels": {"a": 1}}}, "InvalidInput", "body: Expected `str`, got `int`"),
        ({"constraints": {"exclude": "a"}}, "InvalidInput", "body: Expected `array`, got `str`"),
        (
            {"constraints": {"exclude": ["a"] * 257}},
            "InvalidInput",
            "body: Expected `array` of length",
        ),
        ({"targetClusterID": 7}, "InvalidInput", "body: Expected `str`, got `int`"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_field_that_cannot_be_is_refused_by_its_name(r, a, fields, code, detail):
    found = await refusal(r, "reservations", content=encoded(wish(**fields)))
    assert found[0] == code
    assert found[1].startswith(detail)
    assert await a.read("instructions") == []


async def test_weight_beyond_all_numbers_is_refused(r):
    content = encoded(wish(weights={"price": 1})).replace(b'"price": 1', b'"price": 1e999')
    code, _ = await refusal(r, "reservations", content=content)
    assert code == "InvalidInput"


async def test_extended_resource_named_like_a_plain_one_is_refused(r):
    body = {"requestedResources": {"cpu": "1", "memory": "1Gi", "extended": {"cpu": "1"}}}
    code, detail = await refusal(r, "reservations", content=encoded(body))
    assert (code, detail) == ("InvalidInput", "extended.cpu: not an extended resource")


@pytest.mark.parametrize(
    "fields, detail",
    [
        ({"resources": {}}, "body: Object missing required field `capacity` - at `$.resources`"),
        ({"resources": {"capacity": {"cpu": "1"}}}, "body: Object missing required field `memory`"),
        ({"resources": {"capacity": {"cpu": "-1", "memory": "1"}}}, "resources.capacity.cpu: "),
        ({"timestamp": "yesterday"}, "body: Invalid RFC3339 encoded datetime - at `$.timestamp`"),
        ({"timestamp": "2026-01-01T00:00:00"}, "body: Expected `datetime` with a timezone"),
        ({"validFor": "0s"}, "validFor: '0s' is not above zero"),
        ({"validFor": "long"}, "validFor: "),
        ({"cost": {"cpuCost": "-1"}}, "cost.cpuCost: "),
        ({"cost": {"currency": "E U"}}, "cost.currency: "),
        ({"labels": {str(n): "x" for n in range(65)}}, "body: Expected `object` of length <= 64"),
        ({"clusterName": "x" * 254}, "body: Expected `str` of length <= 253 - at `$.clusterName`"),
        ({"clusterID": None}, "body: Expected `str`, got `null` - at `$.clusterID`"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_advertisement_that_cannot_be_is_refused_by_its_field(a, fields, detail):
    _, found = await refusal(a, "advertisements", content=encoded(offer("a") | fields))
    assert found.startswith(detail)
    assert (await a.read("advertisements", "a"))["resources"]["capacity"]["cpu"] == "64"


@pytest.mark.parametrize("part", ["allocatable", "allocated"])
async def test_amounts_of_every_part_of_an_advertisement_are_checked(a, part):
    body = offer("a")
    body["resources"][part] = {"cpu": "lots", "memory": "1"}
    code, detail = await refusal(a, "advertisements", content=encoded(body))
    assert code == "InvalidQuantity"
    assert detail.startswith(f"resources.{part}.cpu: ")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/api/v1",
        "/api/v2/version",
        "/api/v1/reservations/a/b/c",
        "/api/v1/../version",
        "/api/v1/instructions/",
    ],
)
async def test_unknown_path_is_not_found(r, path):
    answer = await r.get(path)
    assert answer.refusal == (404, "NotFound")
    assert answer.problem.hint == "see /openapi.json"


@pytest.mark.parametrize("route", routes.ROUTES, ids=lambda route: route.name)
async def test_method_that_a_path_does_not_have_is_refused_with_those_it_has(r, route):
    answer = await r.call("PATCH", re.sub(r"{\w+}", "x", route.path))
    assert answer.refusal == (405, "MethodNotAllowed")
    allowed = sorted(found.method for found in routes.ROUTES if found.path == route.path)
    assert answer.headers["Allow"] == ", ".join(allowed)
    assert answer.problem.hint == f"use {', '.join(allowed)}"


BAD = "eu\x1b]0;owned\x07\x1b[2J\r\nfake   Active"


@pytest.mark.parametrize(
    "path, body, where",
    [
        ("advertisements", offer("a", region=BAD), "region"),
        ("advertisements", offer("a", clusterName=BAD), "clusterName"),
        ("advertisements", offer("a", endpointURL="\x1b[5m"), "endpointURL"),
        ("advertisements", offer("a", labels={"k": "v\x1b[1m"}), "labels.k"),
        ("advertisements", offer("a", labels={"k\u2028": "v"}), "labels"),
        ("advertisements", offer("a", policy={"deny": ["x\x9b2J"]}), "policy.deny"),
        ("reservations", wish(targetClusterID=BAD), "targetClusterID"),
        ("reservations", wish(constraints={"region": BAD}), "constraints.region"),
        ("reservations", wish(constraints={"exclude": [BAD]}), "constraints.exclude"),
        ("reservations", wish(constraints={"labels": {"k": BAD}}), "constraints.labels.k"),
        ("reservations", wish(policy=BAD), "policy"),
        ("clusters/a/cordon", {"reason": BAD}, "reason"),
        ("clusters/a/drain", {"reason": BAD}, "reason"),
        ("members/cluster/a/revoke", {"reason": BAD}, "reason"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_text_that_could_steer_a_terminal_is_refused_and_changes_nothing(
    broker, a, path, body, where
):
    caller = broker.admin() if "/" in path else a
    answer = await caller.post(*path.split("/"), body)
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.detail.startswith(f"{where}: ")
    assert answer.problem.error.isprintable()
    found = await broker.admin().read("clusters", "a")
    assert "region" not in found["advertisement"]
    assert "cordoned" not in found["status"]


async def test_texts_in_any_language_are_taken(a):
    labels = {"ort": "São Paulo", "leer": ""}
    body = offer("a", clusterName="Zürich 東京", region="", labels=labels)
    answer = await a.post("advertisements", body)
    assert answer.status == 200
    assert answer.json["advertisement"]["labels"] == labels


async def test_refusal_counts_however_its_reason_is_written(broker, a):
    """An existing provider may send what some program has printed, lines and all."""
    made = await broker.cluster("r").reserve()
    reason = "disk is full:\r\n\x1b[31mno space left\x1b[0m\n"
    answer = await a.post("instructions", made["id"], "refuse", {"reason": reason})
    assert answer.status == 200
    assert answer.json["status"]["message"].startswith(
        "Refused by a: disk is full: [31mno space left [0m; then "
    )


async def test_name_in_a_path_that_nobody_can_have_is_no_route_and_not_in_the_journal(broker, a):
    """The audit log says what a refused call was about, and people read it."""
    answer = await a.get("clusters", BAD)
    assert answer.refusal == (404, "NotFound")
    assert answer.problem.error.isprintable()
    assert (await a.get("clusters", "b")).status == 403
    lines = (await broker.admin().read("audit", refused="true"))["lines"]
    assert [line["subject"] for line in lines] == ["cluster/b"]


OFFER: Json = {
    "clusterID": "agent-cluster-2",
    "clusterName": "cluster-advertisement",
    "timestamp": "2026-01-01T11:59:58Z",
    "resources": {
        "capacity": {"cpu": "10", "memory": "8025424Ki"},
        "allocatable": {"cpu": "10", "memory": "8025424Ki"},
        "allocated": {"cpu": "1050m", "memory": "418Mi"},
        "available": {"cpu": "8950m", "memory": "7597392Ki"},
    },
}

ASK = {"requestedResources": {"cpu": "500m", "memory": "256Mi"}, "priority": 10, "duration": "1h"}


@pytest.fixture
def requester(broker):
    return broker.cluster("agent-cluster-1")


@pytest.fixture
async def provider(broker):
    found = broker.cluster("agent-cluster-2")
    assert (await found.post("advertisements", OFFER)).status == 200
    return found


async def available(provider):
    found = await provider.read("advertisements", provider.name)
    return found["resources"]["available"]


async def test_advertisement_is_answered_with_the_brokers_view_of_it(broker):
    answer = await broker.cluster("agent-cluster-2").post("advertisements", OFFER)
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json == {
        "advertisement": {
            **OFFER,
            "resources": {**OFFER["resources"], "reserved": {"cpu": "0", "memory": "0"}},
        }
    }


async def test_reservation_is_answered_with_201_and_every_field_of_the_golden_pair(
    requester, provider
):
    answer = await requester.post("reservations", ASK)
    assert answer.status == 201
    body = answer.json
    assert re.fullmatch(r"rsv-agent-cluster-1-[0-9a-f]{16}", body.pop("id"))
    assert body.pop("revision") > 0
    assert body == {
        "requesterID": "agent-cluster-1",
        "targetClusterID": "agent-cluster-2",
        "requestedResources": {"cpu": "500m", "memory": "256Mi"},
        "status": {
            "phase": "Reserved",
            "message": "Resources locked in cluster agent-cluster-2",
            "reason": "Locked",
            "reservedAt": "2026-01-01T12:00:00Z",
            "expiresAt": "2026-01-01T13:00:00Z",
        },
        "createdAt": "2026-01-01T12:00:00Z",
        "priority": 10,
        "duration": "1h0m0s",
    }


async def test_provider_reads_the_same_reservation_everywhere(requester, provider):
    answer = await provider.get("instructions")
    assert (answer.status, answer.content) == (200, b"[]")
    made = (await requester.post("reservations", ASK)).json
    assert await provider.read("instructions") == [made]
    assert await provider.read("reservations", role="provider") == {"reservations": [made]}
    assert await requester.read("reservations", role="requester") == {"reservations": [made]}
    again = (await provider.post("advertisements", OFFER)).json
    assert again["providerInstructions"] == [made]
    assert again["advertisement"]["resources"]["reserved"] == {"cpu": "500m", "memory": "256Mi"}
    assert again["advertisement"]["resources"]["available"] == {
        "cpu": "8450m",
        "memory": "7335248Ki",
    }

    await requester.post("reservations", made["id"], "activate")
    assert await provider.read("instructions") == []


async def test_advertisement_can_be_read_back_with_what_is_reserved(requester, provider):
    await requester.reserve("3", "1Gi")
    found = await provider.read("advertisements", "agent-cluster-2")
    assert found["clusterID"] == "agent-cluster-2"
    assert found["clusterName"] == "cluster-advertisement"
    assert found["timestamp"] == "2026-01-01T11:59:58Z"
    assert found["resources"]["reserved"] == {"cpu": "3", "memory": "1Gi"}
    assert found["resources"]["available"] == {"cpu": "5950m", "memory": "6548816Ki"}


async def test_locking_example_refuses_the_third_and_changes_nothing(requester, provider):
    assert (await available(provider))["cpu"] == "8950m"
    await requester.reserve("3", "256Mi")
    assert (await available(provider))["cpu"] == "5950m"
    await requester.reserve("5", "256Mi")
    assert (await available(provider))["cpu"] == "950m"
    refused = await requester.post("reservations", wish("2", "256Mi"))
    assert refused.status == 409
    assert (await available(provider))["cpu"] == "950m"
    assert len(await provider.read("instructions")) == 2


async def test_refusal_carries_its_text_under_the_key_error(requester, provider):
    answer = await requester.post("reservations", wish("20"))
    assert answer.status == 409
    assert answer.headers["Content-Type"] == "application/problem+json"
    body = json.loads(answer.content)
    # The requester has not advertised, so one cluster is known.
    assert body["error"].startswith("no suitable cluster: 0/1 cluster fits: 1 InsufficientCPU")
    assert body["code"] == "NoCapacity"
    assert body["status"] == 409


@pytest.mark.parametrize(
    "free, size, winner",
    [
        pytest.param(("2", "2"), ("4", "8"), "tight", id="2 free of 4 beats 2 free of 8"),
        pytest.param(("2", "2"), ("4", "4"), "roomy", id="equal scores: the smaller ID"),
    ],
)
async def test_default_selection_takes_the_most_headroom_after_fulfilment(
    broker, requester, free, size, winner
):
    for name, cpu_free, cpu in zip(("tight", "roomy"), free, size, strict=True):
        capacity = {"cpu": cpu, "memory": "8Gi"}
        used = {"cpu": str(int(cpu) - int(cpu_free)), "memory": "4Gi"}
        resources = {"capacity": capacity, "allocatable": capacity, "allocated": used}
        body = {"clusterID": name, "resources": resources}
        assert (await broker.cluster(name).post("advertisements", body)).status == 200
    made = await requester.reserve("500m", "256Mi")
    assert made["targetClusterID"] == winner


async def test_exact_fit_fits(requester, provider):
    made = await requester.reserve("8950m", "7597392Ki")
    assert made["targetClusterID"] == "agent-cluster-2"
    assert await available(provider) == {"cpu": "0", "memory": "0"}


async def test_requester_never_serves_itself(provider):
    answer = await provider.post("reservations", wish("1"))
    assert answer.refusal == (409, "NoCapacity")
    assert answer.problem.error.startswith("no suitable cluster: 0/1 cluster fits: 1 IsRequester")


async def test_expiry_gives_the_amount_back_exactly_once(broker, requester, provider):
    made = await requester.reserve("3", "1Gi", duration="1h")
    broker.clock.pass_time(make.HOUR)
    await provider.post("advertisements", OFFER)
    assert await available(provider) == OFFER["resources"]["available"]
    assert (await requester.delete("reservations", made["id"])).status == 200
    assert await available(provider) == OFFER["resources"]["available"]


@pytest.mark.parametrize(
    "free, score, rating",
    [
        pytest.param(("10", "20Gi"), "66.67", "Moderate", id="two thirds"),
        pytest.param(("15", "30Gi"), "100.00", "Excellent", id="empty"),
        pytest.param(("13500m", "27Gi"), "90.00", "Excellent", id="from 90"),
        pytest.param(("10500m", "21Gi"), "70.00", "Good", id="from 70"),
        pytest.param(("7500m", "15Gi"), "50.00", "Moderate", id="from 50"),
        pytest.param(("0", "0"), "0.00", "Limited", id="full"),
    ],
)
async def test_display_score_is_half_cpu_and_half_memory(broker, free, score, rating):
    cpu, memory = (make.resources(f"cpu={free[0]},memory={free[1]}").amount(n) for n in MEASURES)
    used = {"cpu": f"{15000 - cpu}m", "memory": str(30 * 2**30 - memory)}
    resources = {"capacity": {"cpu": "15", "memory": "30Gi"}, "allocated": used}
    a = broker.cluster("a")
    assert (
        await a.post("advertisements", {"clusterID": "a", "resources": resources})
    ).status == 200
    status = (await a.read("clusters", "a"))["status"]
    assert (status["score"], status["rating"]) == (score, rating)


MEASURES = ("cpu", "memory")


async def test_cluster_without_allocatable_memory_scores_nothing(broker):
    a = broker.cluster("a")
    await a.advertise("4", "0")
    assert (await a.read("clusters", "a"))["status"]["score"] == "0.00"
