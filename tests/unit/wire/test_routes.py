"""The route table: bound by the server, called by the client, described by the OpenAPI document."""

import re

import msgspec
import pytest

from kubelend.api.app import HANDLERS
from kubelend.core import errors
from kubelend.core.errors import MethodNotAllowed, NotFound
from kubelend.wire import openapi, problems, routes
from kubelend.wire.route import COMMON_ERRORS, Access
from kubelend.wire.routes import ROUTES, RouteMatch


def test_every_route_has_a_handler_and_a_place_of_its_own():
    assert set(HANDLERS) == set(routes.ROUTES_BY_NAME)
    names = [route.name for route in routes.ROUTES]
    places = {(route.method, route.path) for route in routes.ROUTES}
    assert len(names) == len(set(names)) == len(places)


def test_routes_may_be_repeated_after_a_lost_response_but_those_that_could_answer_otherwise():
    not_repeatable = {route.name for route in routes.ROUTES if not route.is_repeatable}
    assert not_repeatable == {"drain", "create_token", "deny_member"}


@pytest.mark.parametrize("route", routes.ROUTES, ids=lambda route: route.name)
def test_route_is_complete(route):
    assert route.method in {"GET", "POST", "PUT", "DELETE"}
    assert route.path.startswith("/")
    assert route.summary
    assert route.responses
    assert isinstance(route.access, Access)
    assert route.method == "POST" or not route.idempotent
    # A body or a value in the query can be wrong: then 400 has to be documented.
    if route.body is not None or any(each.location == "query" for each in route.parameters):
        statuses = {int(problems.http_status(kind(""))) for kind in route.errors}
        assert 400 in statuses


def body_of(route):
    """The schema of a body as text."""
    found, parts = msgspec.json.schema_components([route.body], ref_template="{name}")
    return msgspec.json.encode([found, parts]).decode()


@pytest.mark.parametrize(
    "route", [route for route in routes.ROUTES if route.body], ids=lambda route: route.name
)
def test_route_declares_the_errors_of_its_body(route):
    text = body_of(route)
    assert ("A Kubernetes quantity" in text) == (errors.InvalidQuantity in route.errors)
    assert ("A Go duration" in text) == (errors.InvalidDuration in route.errors)
    assert {errors.InvalidInput, errors.TooSlow, errors.BodyTooLarge} <= {*route.declared_errors}


def test_document_has_the_error_codes_of_all_routes():
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


def test_routes_of_the_published_system_exist():
    found = {(route.method, route.path): route.responses for route in routes.ROUTES}
    for place, status in PUBLISHED.items():
        assert status in found[place]


def test_document_has_the_limits_of_fields():
    text = openapi.document_bytes("1.2.3")
    assert text == openapi.document_bytes("1.2.3")
    document = msgspec.json.decode(text)
    assert document["info"]["version"] == "1.2.3"
    schemas = document["components"]["schemas"]
    priority = schemas["ReservationRequest"]["properties"]["priority"]
    assert (priority["minimum"], priority["maximum"]) == (-(2**31), 2**31 - 1)
    assert schemas["Quantities"]["required"] == ["cpu", "memory"]
    assert "targetClusterID" in schemas["Reservation"]["required"]


# -- matching


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_route_is_found_by_its_own_path(route):
    found = routes.match_route(route.method, route.path.replace("{", "").replace("}", ""))
    names = re.findall(r"{(\w+)}", route.path)
    assert found == RouteMatch(route, {name: name for name in names})


@pytest.mark.parametrize(
    "sent, name",
    [
        ("a", "a"),
        ("Team%20A%2FCluster_1", "Team A/Cluster_1"),
        ("%7Bcluster%7D", "{cluster}"),
        ("..", ".."),
    ],
)
def test_path_parameters_are_decoded(sent, name):
    found = routes.match_route("GET", f"/api/v1/clusters/{sent}")
    assert isinstance(found, routes.RouteMatch)
    assert found.names == {"cluster": name}


@pytest.mark.parametrize(
    "path",
    [
        *("/", "", "/nix", "/api/v1/clusters/", "/api/v1/clusters/a/b/c", "/healthz/"),
        *("/api/v1/clusters/a%1B%5B2J", "/api/v1/clusters/a%0A", "/api/v1/clusters/%E2%80%A8"),
    ],
)
def test_unknown_paths_are_not_found(path):
    assert isinstance(routes.match_route("GET", path), NotFound)


@pytest.mark.parametrize(
    "method, path, allowed",
    [
        ("PUT", "/api/v1/reservations", ["GET", "POST"]),
        ("POST", "/api/v1/clusters/a", ["DELETE", "GET"]),
        ("GET", "/api/v1/clusters/a/drain", ["POST"]),
    ],
)
def test_wrong_method_is_rejected_with_the_allowed_ones(method, path, allowed):
    found = routes.match_route(method, path)
    assert isinstance(found, MethodNotAllowed)
    assert list(found.allowed) == allowed
