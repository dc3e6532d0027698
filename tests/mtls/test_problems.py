"""The published contract to the letter; a call that is refused gets a status, a code and the field's name."""

import json
import re

import pytest

from callers import Json, offer, request_body
from kubelend.wire import routes


@pytest.fixture
async def a(broker):
    found = broker.cluster("a")
    await found.advertise("64", "64Gi")
    return found


async def refusal(caller, path, content):
    """Code and detail of a call that must be answered with 400."""
    answer = await caller.post(path, content=content)
    assert answer.status == 400, answer
    body = answer.json
    assert body["error"] == body["detail"] + (f"; {body['hint']}" if "hint" in body else "")
    assert body["type"] == f"urn:kubelend:problem:{body['code']}"
    assert (body["title"], body["status"]) == ("Bad Request", 400)
    return body["code"], body["detail"]


NO_JSON = [b"", b"{", b"{} {}", b"[]", b"null", b"cpu=1", b"\xff\xfe{}", b"\xef\xbb\xbf{}"]


@pytest.mark.parametrize("path", ["advertisements", "reservations", "explain"])
async def test_body_that_is_no_json_of_the_right_shape_is_refused(r, path):
    for content in NO_JSON:
        code, detail = await refusal(r, path, content)
        assert (code, detail[:6]) == ("InvalidInput", "body: "), content


FLAWED = [
    (
        "reservations",
        request_body("-1"),
        "InvalidQuantity",
        "requestedResources.cpu: '-1' is negative",
    ),
    ("explain", request_body(gpu="1Zi"), "InvalidQuantity", "requestedResources.gpu: "),
    ("reservations", request_body(duration="1d"), "InvalidDuration", "duration: "),
    (
        "reservations",
        request_body(priority=1.5),
        "InvalidInput",
        "body: Expected `int`, got `float`",
    ),
    ("reservations", request_body(policy="random"), "InvalidInput", "policy: 'random' is unknown"),
    ("advertisements", offer("a", "lots"), "InvalidQuantity", "resources.capacity.cpu: "),
    ("advertisements", offer("a", validFor="0s"), "InvalidDuration", "validFor: "),
    ("advertisements", offer("a", resources={}), "InvalidInput", "body: Object missing required"),
]


async def test_invalid_field_is_refused_by_its_name_and_nothing_changes(broker, r, a):
    for path, body, code, detail in FLAWED:
        caller = a if path == "advertisements" else r
        found = await refusal(caller, path, json.dumps(body).encode())
        assert (found[0], found[1][: len(detail)]) == (code, detail)
    assert await a.read("instructions") == []
    assert (await a.read("advertisements", "a"))["resources"]["capacity"]["cpu"] == "64"


async def test_unknown_path_is_not_found(r):
    for path in ("/", "/api/v1", "/api/v2/version", "/api/v1/../version", "/api/v1/instructions/"):
        answer = await r.get(path)
        assert answer.refusal == (404, "NotFound")
        assert answer.problem.hint == "see /openapi.json"


async def test_method_that_a_path_does_not_have_is_refused_with_those_it_has(r):
    for path in {route.path for route in routes.ROUTES}:
        answer = await r.call("PATCH", re.sub(r"{\w+}", "x", path))
        assert answer.refusal == (405, "MethodNotAllowed")
        allowed = ", ".join(sorted(found.method for found in routes.ROUTES if found.path == path))
        assert (answer.headers["Allow"], answer.problem.hint) == (allowed, f"use {allowed}")


BAD = "eu\x1b]0;owned\x07\x1b[2J\r\nfake   Active"


@pytest.mark.parametrize(
    "path, body, where",
    [
        ("advertisements", offer("a", region=BAD), "region"),
        ("reservations", request_body(constraints={"region": BAD}), "constraints.region"),
        ("reservations", request_body(policy=BAD), "policy"),
        ("clusters/a/cordon", {"reason": BAD}, "reason"),
        ("clusters/a/drain", {"reason": BAD}, "reason"),
        ("members/cluster/a/revoke", {"reason": BAD}, "reason"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_control_characters_are_refused_and_nothing_changes(broker, a, path, body, where):
    caller = broker.admin() if "/" in path else a
    answer = await caller.post(*path.split("/"), body)
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.detail.startswith(f"{where}: ")
    assert answer.problem.error.isprintable()
    found = await broker.admin().read("clusters", "a")
    assert "region" not in found["advertisement"]
    assert "cordoned" not in found["status"]


async def test_refusal_of_a_provider_counts_however_its_reason_is_written(broker, a):
    """An existing provider may send what some program has printed, lines and all."""
    made = await broker.cluster("r").reserve()
    reason = "disk is full:\r\n\x1b[31mno space left\x1b[0m\n"
    answer = await a.post("instructions", made["id"], "refuse", {"reason": reason})
    assert answer.status == 200
    plain = "Refused by a: disk is full: [31mno space left [0m; then "
    assert answer.json["status"]["message"].startswith(plain)


async def test_invalid_name_in_a_path_is_no_route_and_not_in_the_audit_log(broker, a):
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
    left = {
        "reserved": {"cpu": "500m", "memory": "256Mi"},
        "available": {"cpu": "8450m", "memory": "7335248Ki"},
    }
    assert again["advertisement"]["resources"] == OFFER["resources"] | left
    assert await provider.read("advertisements", provider.name) == again["advertisement"]
    await requester.post("reservations", made["id"], "activate")
    assert await provider.read("instructions") == []


async def test_refusal_carries_its_text_under_the_key_error(requester, provider):
    answer = await requester.post("reservations", request_body("20"))
    assert answer.status == 409
    assert answer.headers["Content-Type"] == "application/problem+json"
    body = json.loads(answer.content)
    # The requester has not advertised, so one cluster is known.
    assert body["error"].startswith("no suitable cluster: 0/1 cluster fits: 1 InsufficientCPU")
    assert body["code"] == "NoCapacity"
    assert body["status"] == 409
