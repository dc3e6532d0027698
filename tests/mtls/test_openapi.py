"""The description that the broker serves: valid, complete, and true of what it answers.

That it is true is checked by `callers.check_documented` on every answer of every test; here is checked
that this check bites.
"""

import re

import pytest

import kubelend
from callers import Answer, check_documented, route_of
from kubelend.wire import problems, routes

METHODS = {"get", "put", "post", "delete", "options", "head", "patch", "trace"}
STATUS = re.compile(r"[1-5]\d\d|default")
TYPES = {"null", "boolean", "object", "array", "number", "string", "integer"}


@pytest.fixture
async def document(broker):
    return await broker.cluster("a").read("/openapi.json")


def walk(value, path="#"):
    """Every object inside, with where it is."""
    if isinstance(value, dict):
        yield path, value
        for name, part in value.items():
            yield from walk(part, f"{path}/{name}")
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from walk(part, f"{path}/{index}")


def operations(document):
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield path, method, operation


def schemas(document):
    """Every schema, wherever it stands."""
    for path, found in walk(document):
        parent = path.rpartition("/")[0]
        if path.endswith("/schema") or parent.endswith(("/schemas", "/properties", "/anyOf")):
            yield path, found


async def test_it_is_openapi_3_1_of_this_version(document):
    assert document["openapi"] == "3.1.0"
    assert document["info"]["version"] == kubelend.__version__
    assert document["info"]["title"]
    assert set(document["info"]["license"]) == {"name", "identifier"}
    assert set(document) <= {"openapi", "info", "servers", "security", "paths", "components"}


async def test_every_route_is_in_it_and_nothing_else(document):
    described = {(method.upper(), path) for path, method, _ in operations(document)}
    assert described == {(route.method, route.path) for route in routes.ROUTES}
    assert {method for _, method, _ in operations(document)} <= METHODS


async def test_every_operation_is_complete(document):
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(names)) == len(names)
    for path, _, operation in operations(document):
        assert operation["summary"]
        assert operation["responses"]
        for status, response in operation["responses"].items():
            assert STATUS.fullmatch(status)
            assert response["description"]
        in_path = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
        assert in_path == set(re.findall(r"\{(\w+)\}", path))
        keys = [(p["in"], p["name"]) for p in operation["parameters"]]
        assert len(set(keys)) == len(keys)
        for parameter in operation["parameters"]:
            assert parameter["in"] in {"path", "query", "header"}
            assert parameter.get("required", False) == (parameter["in"] == "path")
            assert parameter["schema"]["type"] in TYPES


async def test_every_reference_leads_somewhere_and_nothing_is_left_over(document):
    used = set()
    for path, found in walk(document):
        if "$ref" in found:
            prefix, _, name = found["$ref"].rpartition("/")
            assert prefix == "#/components/schemas", path
            assert name in document["components"]["schemas"], path
            used.add(name)
    assert used == set(document["components"]["schemas"])


async def test_every_schema_says_what_it_is(document):
    count = 0
    for path, schema in schemas(document):
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        assert set(kinds) <= TYPES, path
        assert {"type", "$ref", "anyOf", "allOf", "oneOf", "enum"} & set(schema) or not schema, path
        if kinds == ["object"] and "properties" in schema:
            assert set(schema["required"]) <= set(schema["properties"]), path
        count += 1
    assert count > 100


async def test_errors_are_problems_with_their_codes(document):
    for _, _, operation in operations(document):
        for status, response in operation["responses"].items():
            if status == "default" or status >= "400":
                types = set(response["content"])
                assert types <= {problems.CONTENT_TYPE, "text/plain"}
    reserve = document["paths"]["/api/v1/reservations"]["post"]["responses"]
    assert reserve["409"]["description"] == "NoCapacity, IdentityInUse"
    assert reserve["422"]["description"] == "KeyReused"


async def test_mutual_tls_is_asked_for(document):
    assert document["security"] == [{"mutualTLS": []}]
    assert document["components"]["securitySchemes"] == {"mutualTLS": {"type": "mutualTLS"}}


async def test_bodies_are_needed_where_they_are(document):
    needed = {
        operation["operationId"]: operation["requestBody"]["required"]
        for _, _, operation in operations(document)
        if "requestBody" in operation
    }
    assert needed == {
        "publish": True,
        "reserve": True,
        "explain": True,
        "renew": False,
        "refuse": False,
        "cordon": False,
        "drain": False,
        "set_policy": True,
        "set_quota": True,
        "create_token": False,
        "accept_member": False,
        "revoke_member": False,
        "renew_certificate": True,
    }


@pytest.mark.parametrize("content", [{}, {"data": b""}, {"data": b"{}"}], ids=["no", "empty", "{}"])
async def test_body_that_is_not_needed_may_be_left_out_in_any_way(broker, content):
    """Without a length, with nothing in chunks, and with an empty object."""
    await broker.cluster("a").advertise()
    url = f"https://localhost:{broker.port}/api/v1/clusters/a/cordon"
    admin = broker.admin()
    chunked = {"chunked": True} if content else {}
    async with admin.session.post(url, **content, **chunked) as response:
        assert response.status == 200


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "answer",
    [
        Answer(202, JSON, b'{"version":"1"}'),
        Answer(404, {"Content-Type": problems.CONTENT_TYPE}, b"{}"),
        Answer(200, {"Content-Type": "text/plain"}, b"1"),
        Answer(200, JSON, b'{"version":"1","secret":"x"}'),
        Answer(200, JSON, b""),
    ],
    ids=["status", "error", "media type", "field", "nothing"],
)
def test_what_is_not_in_it_is_noticed(answer):
    check_documented("GET", "/api/v1/version", Answer(200, JSON, b'{"version":"1"}'))
    with pytest.raises((AssertionError, KeyError)):
        check_documented("GET", "/api/v1/version", answer)


def test_paths_are_told_apart():
    assert route_of("GET", "/api/v1/instructions/stream") is routes.ROUTES_BY_NAME["stream"]
    assert route_of("GET", "/api/v1/reservations/x") is routes.ROUTES_BY_NAME["get_reservation"]
    assert route_of("GET", "/nowhere") is None
