"""The routes, once: what the server binds, the client calls and the documents show cannot differ."""

import msgspec
import pytest

from kubelend.api.app import HANDLERS
from kubelend.core import errors
from kubelend.wire import openapi, problems, routes
from kubelend.wire.route import COMMON_ERRORS, Access


def test_names_and_places_are_unique():
    names = [route.name for route in routes.ROUTES]
    places = [(route.method, route.path) for route in routes.ROUTES]
    assert len(set(names)) == len(names)
    assert len(set(places)) == len(places)


def test_every_route_has_a_handler_and_every_handler_a_route():
    assert set(HANDLERS) == set(routes.ROUTES_BY_NAME)


@pytest.mark.parametrize("route", routes.ROUTES, ids=lambda route: route.name)
def test_route_says_what_it_needs_and_gives(route):
    assert route.method in {"GET", "POST", "PUT", "DELETE"}
    assert route.path.startswith("/")
    assert route.summary
    assert route.responses
    assert isinstance(route.access, Access)
    # A body or a value in the query can be wrong: then 400 has to be documented.
    if route.body is not None or any(each.location == "query" for each in route.parameters):
        statuses = {int(problems.http_status(kind(""))) for kind in route.errors}
        assert 400 in statuses


def body_of(route):
    """All that is described of a body, as text."""
    found, parts = msgspec.json.schema_components([route.body], ref_template="{name}")
    return msgspec.json.encode([found, parts]).decode()


@pytest.mark.parametrize(
    "route", [route for route in routes.ROUTES if route.body], ids=lambda route: route.name
)
def test_route_names_the_codes_of_what_its_body_holds(route):
    text = body_of(route)
    assert ("A Kubernetes quantity" in text) == (errors.InvalidQuantity in route.errors)
    assert ("A Go duration" in text) == (errors.InvalidDuration in route.errors)
    assert {errors.InvalidInput, errors.TooSlow, errors.BodyTooLarge} <= {*route.declared_errors}


def test_document_names_the_codes_that_any_route_can_answer():
    document = openapi.document("x")
    codes = document["components"]["schemas"]["Problem"]["properties"]["code"]["enum"]
    for route in routes.ROUTES:
        responses = document["paths"][route.path][route.method.lower()]["responses"]
        for sign in problems.status_and_codes(COMMON_ERRORS):
            assert sign in responses["default"]["description"]
            assert sign.split()[1] in codes
        for sign in problems.status_and_codes(route.declared_errors):
            status, code = sign.split()
            assert code in responses[status]["description"].split(", ")


PUBLISHED = {
    ("POST", "/api/v1/advertisements"): 200,
    ("GET", "/api/v1/advertisements/{cluster}"): 200,
    ("POST", "/api/v1/reservations"): 201,
    ("GET", "/api/v1/reservations"): 200,
    ("GET", "/api/v1/instructions"): 200,
    ("GET", "/healthz"): 200,
}


def test_routes_of_the_published_system_are_all_here():
    found = {(route.method, route.path): route.responses for route in routes.ROUTES}
    for place, status in PUBLISHED.items():
        assert status in found[place]


def test_document_is_the_same_every_time():
    assert openapi.document_bytes("1.2.3") == openapi.document_bytes("1.2.3")
    document = msgspec.json.decode(openapi.document_bytes("1.2.3"))
    assert document == openapi.document("1.2.3")
    assert document["info"]["version"] == "1.2.3"


def test_fields_are_in_it_with_their_limits():
    schemas = openapi.document("x")["components"]["schemas"]
    priority = schemas["ReservationRequest"]["properties"]["priority"]
    assert (priority["minimum"], priority["maximum"]) == (-(2**31), 2**31 - 1)
    assert schemas["Quantities"]["required"] == ["cpu", "memory"]
    assert "targetClusterID" in schemas["Reservation"]["required"]


NOT_AGAIN = {"drain", "create_token", "reject_member"}
"""Said twice, they could answer differently. A new route that is not said again needs its name here."""


def test_all_but_these_may_be_said_again_when_an_answer_was_lost():
    assert {route.name for route in routes.ROUTES if not route.is_repeatable} == NOT_AGAIN


@pytest.mark.parametrize("route", routes.ROUTES, ids=lambda route: route.name)
def test_only_what_is_posted_has_to_be_marked_as_harmless_twice(route):
    assert route.method == "POST" or not route.idempotent
