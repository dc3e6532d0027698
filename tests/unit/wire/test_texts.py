"""Free texts of bodies stay on their line and steer no terminal, and the document says so of each."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kubelend.core import durations
from kubelend.core.errors import InvalidInput
from kubelend.core.models import ClusterId
from kubelend.wire import bodies, conversion, json_types, openapi, routes, validation
from make import T0

STEERING = [
    *map(chr, range(0x20)),  # C0: bells, tabs, line breaks, escapes
    *map(chr, range(0x7F, 0xA0)),  # DEL, and C1: what begins with ESC in seven bits
    "\u2028",
    "\u2029",
]


@pytest.mark.parametrize("character", STEERING, ids=ascii)
def test_no_character_that_steers_is_plain(character):
    assert not validation.is_plain(f"a{character}b")
    assert validation.to_single_line(f"a{character}{character}b") == "a b"
    with pytest.raises(InvalidInput):
        validation.check_plain(character, "region")


@pytest.mark.parametrize(
    "text", ["", " ", "eu-west", "Zürich", "東京", "a\xa0b", "👩\u200d🔬", "\ufeff", "{}'\"\\"]
)
def test_any_other_text_is_left_as_it_is(text):
    assert validation.check_plain(text, "region") is text
    assert validation.to_single_line(text) is text


@given(st.text(st.characters() | st.sampled_from(STEERING)))
@example("a\n")
@example("a\u2028")
def test_what_is_published_is_what_holds(text):
    pattern = json_types.PLAIN["pattern"].removeprefix("^").removesuffix("$")
    assert (re.fullmatch(pattern, text) is not None) == validation.is_plain(text)


def test_message_names_the_field_and_is_plain_itself():
    with pytest.raises(InvalidInput) as raised:
        validation.check_plain("eu\x1b]0;owned\x07", "region")
    assert str(raised.value) == (
        r"region: 'eu\x1b]0;owned\x07' contains a control character or a line break;"
        " use plain text in a single line"
    )


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
def test_text_that_steers_is_refused_with_its_field(make, fields, where):
    with pytest.raises(InvalidInput) as raised:
        make(**fields)
    assert raised.value.message.startswith(f"{where}: ")
    assert validation.is_plain(str(raised.value))


UNBOUND = {
    "/RefuseRequest/reason",  # whatever is in it, a refusal must not be lost
    "/AcceptRequest/key",  # only compared
    *(f"/Amounts/{name}" for name in ("cpu", "memory", "gpu", "storage")),  # not read at all
    *(f"/Amounts/extended{key}" for key in ("", "/*")),
}
"""Texts of which nothing is demanded."""


def described(schema, path, found):
    """Every text that a schema has room for, with where it is."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in found["seen"]:
            found["seen"].add(name)
            described(found["schemas"][name], f"/{name}", found)
    if "string" in (schema.get("type"), *schema.get("type", ())):
        found["texts"].append((path, schema))
    if isinstance(names := schema.get("propertyNames"), dict):
        found["texts"].append((path, names))
    for name, part in schema.get("properties", {}).items():
        described(part, f"{path}/{name}", found)
    for key in ("items", "additionalProperties"):
        if isinstance(part := schema.get(key), dict):
            described(part, f"{path}/*", found)
    for part in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
        described(part, path, found)


def test_every_text_that_is_sent_has_a_pattern():
    document = openapi.document("x")
    found = {"schemas": document["components"]["schemas"], "seen": set(), "texts": []}
    for route in routes.ROUTES:
        operation = document["paths"][route.path][route.method.lower()]
        if "requestBody" in operation:
            content = operation["requestBody"]["content"]["application/json"]
            described(content["schema"], f"/{route.name}", found)
    free = {
        path for path, schema in found["texts"] if not schema.keys() & {"pattern", "enum", "format"}
    }
    assert len(found["texts"]) > 30
    assert free <= UNBOUND
