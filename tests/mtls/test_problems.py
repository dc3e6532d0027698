"""What is wrong with a call is said in one shape: a status, a stable code, a sentence naming the field."""

import json
import re

import pytest

from callers import offer, wish
from kubelend.wire import routes

DEEP = b'{"requestedResources":' + b'{"cpu":' * 10_000 + b"1" + b"}" * 10_001
QUANTITIES = ["requestedResources.cpu", "requestedResources.memory", "requestedResources.gpu"]


@pytest.fixture
def r(broker):
    return broker.cluster("r")


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


# -- routes that do not exist


@pytest.mark.parametrize(
    "path", ["/", "/api/v1", "/api/v2/version", "/api/v1/reservations/a/b/c", "/api/v1/../version"]
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


async def test_trailing_slash_is_another_path(r):
    assert (await r.get("/api/v1/instructions/")).status == 404
