"""Schemas of texts agree with their parsers; free texts are plain; validation errors are readable."""

import re
from typing import Annotated

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kubelend.api import request
from kubelend.core import durations, resources, scoring
from kubelend.core.errors import InvalidInput
from kubelend.core.lifecycle import Phase
from kubelend.core.models import ClusterId
from kubelend.wire import (
    admin_bodies,
    bodies,
    conversion,
    json_types,
    openapi,
    quantities,
    routes,
    validation,
)
from make import T0

# In the order of the routes: workers of one run have to collect the same tests.
BODIES = list(dict.fromkeys(route.body for route in routes.ROUTES if isinstance(route.body, type)))


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_null_in_a_body_is_the_same_as_no_value(kind):
    fields = msgspec.structs.fields(kind)
    optional = {one.encode_name: None for one in fields if not one.required}
    required = {one.encode_name: SAMPLES[one.encode_name] for one in fields if one.required}
    given = {**required, **optional}
    plain = request.decode_body(msgspec.json.encode(required), kind)
    assert request.decode_body(msgspec.json.encode(given), kind) == plain
    for name in required:
        with pytest.raises(InvalidInput, match=f"missing required field `{name}`"):
            request.decode_body(msgspec.json.encode(given | {name: None}), kind)


def test_null_is_no_value_inside_a_body_too_but_not_in_a_map_or_an_unknown_field():
    wanted = {"requestedResources": _AMOUNTS | {"gpu": None}, "constraints": {"exclude": None}}
    decoded = request.decode_body(msgspec.json.encode(wanted), bodies.ReservationRequest)
    assert decoded == bodies.ReservationRequest(bodies.Quantities("1", "1Gi"))
    for part in ({"labels": {"zone": None}}, {"exclude": [None]}):
        text = msgspec.json.encode(wanted | {"constraints": part})
        with pytest.raises(InvalidInput, match="got `null`"):
            request.decode_body(text, bodies.ReservationRequest)
    with pytest.raises(InvalidInput, match="unknown field `reasn`"):
        request.decode_body(b'{"reasn": null}', admin_bodies.RevokeRequest)


_AMOUNTS = {"cpu": "1", "memory": "1Gi"}
SAMPLES = {
    "clusterID": "a",
    "request": "PEM",
    "requestedResources": _AMOUNTS,
    "resources": {"capacity": _AMOUNTS},
}

TERMS = conversion.RequestLimits(*[durations.MAX_DURATION] * 3)


def fits(schema, text):
    """As a validator reads it: `$` is the end of the text, not of the last line."""
    assert schema.keys() <= {"pattern", "allOf", "maxLength", "not", "enum"}
    return (
        re.fullmatch(schema["pattern"].removeprefix("^").removesuffix("$"), text) is not None
        and len(text) <= schema.get("maxLength", 64)
        and all(re.search(other["pattern"], text) for other in schema.get("allOf", []))
        and text not in schema.get("not", {}).get("enum", [])
    )


def accepts(parse, text):
    """Whether a parser accepts a text. A value that is too large is beyond any pattern."""
    try:
        parse(text)
    except InvalidInput as problem:
        return "out of range" in problem.message and "exponent" not in problem.message
    return True


def offered(cpu="1", **amounts):
    return quantities.parse_offered(bodies.Quantities(cpu, "1", **amounts), "x")


def requested(cpu):
    return quantities.parse_reservation_amounts(bodies.Quantities(cpu, "1"))


def with_wait(text):
    body = bodies.ReservationRequest(bodies.Quantities("1", "1"), wait=text)
    return conversion.to_request(body, ClusterId("me"), "", TERMS)


AMOUNT, TIME = "0123456789.+-eEnumkMGTPKi \n", "0123456789.+-nuµμmsh "
# Takes for ever where digits can be divided in many ways.
SLOW = "000s" * 15 + "000!"
LONG = "example.com/" + "x" * 63
TEXTS = {
    "quantity": (json_types.QUANTITY, AMOUNT, offered),
    "optional quantity": (json_types.OPTIONAL_QUANTITY, AMOUNT, lambda t: offered(gpu=t)),
    "duration": (json_types.DURATION, TIME, lambda t: conversion.bounded_duration(t, TERMS)),
    "wait": (json_types.WAIT, TIME, with_wait),
    "price": (json_types.PRICE, "0123456789.+-e", lambda t: conversion.to_prices(bodies.Cost(t))),
    "currency": (
        json_types.CURRENCY,
        "AZaz09é",
        lambda t: conversion.to_prices(bodies.Cost(currency=t)),
    ),
    "resource": (json_types.RESOURCE_NAME, "aZ0-_./", lambda t: offered(extended={t: "1"})),
}
EDGES = {
    "quantity": ["1e64", "1e65", "1e-0064", "-0", "-.0Ki", "-0.1", "Ki", "", "1" * 64, "0" * 65],
    "optional quantity": ["", "-0", "Ki"],
    "duration": ["0", "-0s", "+0h0m1ns", "1", "-1s", "1m1", SLOW],
    "wait": ["0", "-0s", "-0", "-0h0.1s"],
    "price": ["0999999999.000000001", "1000000000", "1."],
    "currency": ["EUR", "eur", ""],
    "resource": ["gpu", LONG, f"{LONG}x", "a..b/c", "A/c", "nvidia.com/gpu"],
}


@pytest.mark.parametrize("kind", TEXTS)
@given(st.data())
def test_schema_of_a_text_agrees_with_its_parser(kind, data):
    schema, letters, parse = TEXTS[kind]
    # Texts that fit, and texts that nearly do.
    text = data.draw(st.from_regex(schema["pattern"]) | st.text(letters, max_size=9))
    for one in (text, *EDGES[kind]):
        assert fits(schema, one) == accepts(parse, one), one


@given(st.from_regex(json_types.QUANTITY["pattern"], fullmatch=True).filter(lambda t: len(t) <= 64))
@example("0")
@example("0e5")
@example("+.001n")
@example("-0")
def test_requested_quantities_are_above_zero(text):
    number, text_part = json_types.POSITIVE_CPU_AND_MEMORY["properties"]["cpu"]["anyOf"]
    assert number["minimum"] == 1
    assert bool(re.search(text_part["pattern"], text)) == accepts(requested, text)


@pytest.mark.parametrize("number", [-1, 0, 1, 2**63 // 1000, 2**63 // 1000 + 1])
def test_numbers_of_cores_have_a_range(number):
    is_within = json_types.CORES_NUMBER["minimum"] <= number <= json_types.CORES_NUMBER["maximum"]
    try:
        offered(number)
    except InvalidInput:
        assert not is_within
    else:
        assert is_within


def test_phases_policies_and_scores_are_those_of_the_core():
    for text in ("", ",", "Pending", "Pending,,Active,", ",".join(Phase)):
        assert re.search(json_types.PHASES["pattern"], text)
    for text in ("pending", "Pending;Failed", "Pending "):
        assert not re.search(json_types.PHASES["pattern"], text)
    assert tuple(scoring.SCORING_POLICIES) == json_types.POLICIES
    assert tuple(scoring.SCORES) == json_types.SCORES


def test_formatted_amounts_match_the_pattern():
    """What the broker answers is described by the same types."""
    for amount in (0, 1, 1500, 2**40, 2**63 - 1):
        for name in ("cpu", "memory", "example.com/fpga"):
            assert fits(json_types.QUANTITY, resources.format_amount(name, amount))


# -- free texts


CONTROL = [
    *map(chr, range(0x20)),  # C0: bells, tabs, line breaks, escapes
    *map(chr, range(0x7F, 0xA0)),  # DEL, and C1: what begins with ESC in seven bits
    "\u2028",
    "\u2029",
]


@pytest.mark.parametrize("character", CONTROL, ids=ascii)
def test_control_characters_are_not_plain(character):
    assert not validation.is_plain(f"a{character}b")
    assert validation.to_single_line(f"a{character}{character}b") == "a b"
    with pytest.raises(InvalidInput):
        validation.check_plain(character, "region")


@pytest.mark.parametrize(
    "text", ["", " ", "eu-west", "Zürich", "東京", "a\xa0b", "👩\u200d🔬", "\ufeff", "{}'\"\\"]
)
def test_plain_text_is_unchanged(text):
    assert validation.check_plain(text, "region") is text
    assert validation.to_single_line(text) is text


@given(st.text(st.characters() | st.sampled_from(CONTROL)))
@example("a\n")
@example("a\u2028")
def test_published_pattern_agrees_with_the_check(text):
    pattern = json_types.PLAIN["pattern"].removeprefix("^").removesuffix("$")
    assert (re.fullmatch(pattern, text) is not None) == validation.is_plain(text)


def offer(**fields):
    amounts = bodies.Metrics(bodies.Quantities("1", "1Gi"))
    return conversion.to_advertisement(
        bodies.Advertisement("a", amounts, **fields), ClusterId("a"), T0
    )


def constrained_request(target="", **constraints):
    limits = conversion.RequestLimits(*[durations.MAX_DURATION] * 3)
    body = bodies.ReservationRequest(
        bodies.Quantities("1", "1Gi"),
        target_cluster_id=target,
        constraints=bodies.Constraints(**constraints),
    )
    return conversion.to_request(body, ClusterId("a"), "", limits)


BAD = "x\x1b[2J\r\nfake"


@pytest.mark.parametrize(
    "make, fields, where",
    [
        (offer, {"cluster_name": BAD}, "clusterName"),
        (offer, {"region": BAD}, "region"),
        (offer, {"endpoint_url": BAD}, "endpointURL"),
        (offer, {"labels": {"ok": "ok", "tier": BAD}}, "labels.tier"),
        (offer, {"labels": {BAD: "ok"}}, "labels"),
        (offer, {"policy": bodies.LendingPolicy(allow=[BAD])}, "policy.allow"),
        (offer, {"policy": bodies.LendingPolicy(hours=[BAD])}, "policy.hours"),
        (constrained_request, {"target": BAD}, "targetClusterID"),
        (constrained_request, {"region": BAD}, "constraints.region"),
        (constrained_request, {"exclude": ["ok", BAD]}, "constraints.exclude"),
        (constrained_request, {"labels": {"tier": BAD}}, "constraints.labels.tier"),
        (constrained_request, {"labels": {BAD: "ok"}}, "constraints.labels"),
    ],
)
def test_control_characters_are_rejected_with_their_field(make, fields, where):
    with pytest.raises(InvalidInput) as raised:
        make(**fields)
    assert raised.value.message.startswith(f"{where}: ")
    assert validation.is_plain(str(raised.value))


UNRESTRICTED = {
    "/RefuseRequest/reason",  # a refusal must not be lost
    "/HoldReport/message",  # nor a report
    "/ApproveRequest/key",  # only compared
    *(f"/Amounts/{name}" for name in ("cpu", "memory", "gpu", "storage")),  # not read at all
    *(f"/Amounts/extended{key}" for key in ("", "/*")),
}
"""Texts without a pattern."""


def collect_texts(schema, path, found):
    """Every string of a schema, with its path."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in found["seen"]:
            found["seen"].add(name)
            collect_texts(found["schemas"][name], f"/{name}", found)
    if "string" in (schema.get("type"), *schema.get("type", ())):
        found["texts"].append((path, schema))
    if isinstance(names := schema.get("propertyNames"), dict):
        found["texts"].append((path, names))
    for name, part in schema.get("properties", {}).items():
        collect_texts(part, f"{path}/{name}", found)
    for key in ("items", "additionalProperties"):
        if isinstance(part := schema.get(key), dict):
            collect_texts(part, f"{path}/*", found)
    for part in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
        collect_texts(part, path, found)


def test_every_string_of_a_request_has_a_pattern():
    document = openapi.document("x")
    found = {"schemas": document["components"]["schemas"], "seen": set(), "texts": []}
    for route in routes.ROUTES:
        operation = document["paths"][route.path][route.method.lower()]
        if "requestBody" in operation:
            content = operation["requestBody"]["content"]["application/json"]
            collect_texts(content["schema"], f"/{route.name}", found)
    free = {
        path for path, schema in found["texts"] if not schema.keys() & {"pattern", "enum", "format"}
    }
    assert len(found["texts"]) > 30
    assert free <= UNRESTRICTED


# -- readable errors


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    cpu: str
    most: Annotated[int, msgspec.Meta(le=9)] = 0
    least: Annotated[float, msgspec.Meta(ge=0.5)] = 1
    name: Annotated[str, msgspec.Meta(min_length=2, max_length=3)] = "ab"
    some: Annotated[list[str], msgspec.Meta(max_length=1)] = []
    pairs: Annotated[dict[str, int], msgspec.Meta(max_length=1)] = {}


class Outer(msgspec.Struct):
    spec: Inner


@pytest.mark.parametrize(
    "value, text",
    [
        ({"spec": {}}, "spec.cpu: is required"),
        ({}, "spec: is required"),
        ([], "expected object, got array"),
        ({"spec": {"cpu": "1", "gpu": 1}}, "spec.gpu: unknown field"),
        ({"spec": {"cpu": 1}}, "spec.cpu: must be a string: put it in quotes"),
        ({"spec": {"cpu": "1", "most": 10}}, "spec.most: must be at most 9"),
        ({"spec": {"cpu": "1", "least": 0.1}}, "spec.least: must be at least 0.5"),
        ({"spec": {"cpu": "1", "name": "a"}}, "spec.name: must have at least 2 characters"),
        ({"spec": {"cpu": "1", "name": "abcd"}}, "spec.name: must have at most 3 characters"),
        ({"spec": {"cpu": "1", "some": ["a", "b"]}}, "spec.some: must have at most 1 entries"),
        (
            {"spec": {"cpu": "1", "pairs": {"a": 1, "b": 2}}},
            "spec.pairs: must have at most 1 entries",
        ),
        ({"spec": {"cpu": "1", "pairs": {"a": "x"}}}, "spec.pairs[...]: expected int, got str"),
    ],
)
def test_validation_error_names_the_field(value, text):
    with pytest.raises(msgspec.ValidationError) as rejected:
        msgspec.convert(value, Outer)
    assert validation.readable_validation_error(rejected.value) == text
