"""The OpenAPI document that the broker serves: valid, complete, and true of what it answers.

That it is true is checked by `callers.check_documented` on every answer of every test; here is checked that
this check bites. Schemathesis tries to prove it wrong as a cluster, a viewer and an admin, with data that
fits the document and data that does not: nothing may fail in the broker, answer what is not documented, be
accepted against the document, or be refused although it is allowed. Every run tries the same.
"""

import functools
import itertools
import json
import re
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

import applicants
import brokers
import kubelend
import roles
from applicants import Applicant
from callers import Answer, check_documented, offer, request_body
from kubelend.core import durations
from kubelend.wire import openapi, problems, routes, validation
from kubelend.wire.route import EVENT_STREAM
from waiting import FACTOR, PATIENCE

TYPES = {"null", "boolean", "object", "array", "number", "string", "integer"}

DOCUMENT = openapi.document(kubelend.__version__)


def walk(value, path="#"):
    """Every object inside, with where it is."""
    if isinstance(value, dict):
        yield path, value
        for name, part in value.items():
            yield from walk(part, f"{path}/{name}")
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from walk(part, f"{path}/{index}")


OPERATIONS = [
    (path, method, operation)
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
]


def test_it_is_openapi_3_1_of_this_version_with_mutual_tls():
    assert DOCUMENT["openapi"] == "3.1.0"
    assert DOCUMENT["info"]["version"] == kubelend.__version__
    assert DOCUMENT["info"]["title"]
    assert set(DOCUMENT["info"]["license"]) == {"name", "identifier"}
    assert set(DOCUMENT) <= {"openapi", "info", "servers", "security", "paths", "components"}
    assert DOCUMENT["security"] == [{"mutualTLS": []}]
    assert DOCUMENT["components"]["securitySchemes"] == {"mutualTLS": {"type": "mutualTLS"}}


def test_every_route_is_in_it_and_nothing_else():
    described = {(method.upper(), path) for path, method, _ in OPERATIONS}
    assert described == {(route.method, route.path) for route in routes.ROUTES}


@pytest.mark.parametrize(
    "path, operation", [pytest.param(p, o, id=o["operationId"]) for p, _, o in OPERATIONS]
)
def test_every_operation_is_complete(path, operation):
    assert operation["summary"]
    assert operation["responses"]
    for status, response in operation["responses"].items():
        assert re.fullmatch(r"[1-5]\d\d|default", status)
        assert response["description"]
        if status == "default" or status >= "400":
            assert set(response["content"]) <= {problems.CONTENT_TYPE, "text/plain"}
    in_path = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
    assert in_path == set(re.findall(r"\{(\w+)\}", path))
    keys = [(p["in"], p["name"]) for p in operation["parameters"]]
    assert len(set(keys)) == len(keys)
    for parameter in operation["parameters"]:
        assert parameter["in"] in {"path", "query", "header"}
        assert parameter.get("required", False) == (parameter["in"] == "path")
        assert parameter["schema"]["type"] in TYPES


def test_every_reference_leads_somewhere_and_nothing_is_left_over():
    used = set()
    for path, found in walk(DOCUMENT):
        if "$ref" in found:
            prefix, _, name = found["$ref"].rpartition("/")
            assert prefix == "#/components/schemas", path
            assert name in DOCUMENT["components"]["schemas"], path
            used.add(name)
    assert used == set(DOCUMENT["components"]["schemas"])


def test_every_schema_says_what_it_is():
    count = 0
    for path, schema in walk(DOCUMENT):
        parent = path.rpartition("/")[0]
        if not (path.endswith("/schema") or parent.endswith(("/schemas", "/properties", "/anyOf"))):
            continue
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        assert set(kinds) <= TYPES, path
        assert {"type", "$ref", "anyOf", "allOf", "oneOf", "enum"} & set(schema) or not schema, path
        if kinds == ["object"] and "properties" in schema:
            assert set(schema["required"]) <= set(schema["properties"]), path
        count += 1
    assert count > 100


def test_bodies_are_needed_where_they_are():
    bodies = {
        operation["operationId"]: operation["requestBody"]["required"]
        for *_, operation in OPERATIONS
        if "requestBody" in operation
    }
    needed = " ".join(sorted(name for name in bodies if bodies[name]))
    optional = " ".join(sorted(name for name in bodies if not bodies[name]))
    assert needed == (
        "exchange_handshake explain publish renew_certificate reserve set_policy set_quota"
    )
    assert optional == (
        "acknowledge approve_member cordon create_token drain refuse renew revoke_member"
    )


async def test_body_that_is_not_needed_may_be_left_out_in_any_way(broker, admin):
    await broker.cluster("a").advertise()
    for content in ({}, {"data": b"", "chunked": True}, {"data": b"{}", "chunked": True}):
        async with admin.session.post("/api/v1/clusters/a/cordon", **content) as response:
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


@functools.cache
def schema():
    """Its library is imported by this module's tests alone: it takes a second."""
    import schemathesis

    off, responses_off = {"enabled": False}, {"extra-data-sources": {"responses": False}}
    settings = {
        "checks": {
            # Neither 409 nor 422: what is against the document must not get as far as a decision.
            "negative_data_rejection": {"expected-statuses": [400, 403, 404, 405, 413]},
            "positive_data_acceptance": {"expected-statuses": ["2xx", 403, 404, 409, 422]},
            "ignored_auth": off,  # without its certificate a caller has no connection
        },
        # What one case brings to light must not change the next: every run is the same.
        "phases": {
            "examples": responses_off,
            "coverage": responses_off,
            "fuzzing": responses_off | {"error-feedback": off},
        },
        "analysis": {"constants": off},
        "max-stream-events": 1,
    }
    config = schemathesis.Config.from_dict(settings)
    return schemathesis.openapi.from_dict(DOCUMENT, config=config)


UNSAYABLE = re.compile(
    r"out of range"  # a text says more than 2^63-1, or more than 292 years
    r"|got `float`"  # 1.0 is an integer to JSON Schema
    r"|is given twice"  # gpu, and nvidia.com/gpu among the extended
    r"|role: needs a cluster"  # one value in the query needs another
    r"|invisible characters"  # Unicode's classes, which regular expressions have no common words for
    r"|request is corrupt"  # what is between BEGIN and END
    r"|ttl: .* is more than"  # a duration has a largest value
    r"|is not a known time zone|begins and ends at the same time"  # of opening hours
    r"|is not a cluster name or pattern"  # as with invisible characters
)

"""Demands that JSON Schema has no words for."""

SOON, LATE = 0.5 * FACTOR, PATIENCE

"""Seconds after which the end of a stream, which has none, and of a call is not waited for."""


class Service:
    """A running broker, and three who call it."""

    def __init__(self, broker):
        self.url = f"https://localhost:{broker.port}"
        self.enrolment = f"https://localhost:{broker.ports['enrol']}/enrol/v1/join"
        certificates = broker.certificates
        self.cluster = session(certificates.cluster("me"))
        self.other = session(certificates.cluster("other"))
        self.viewer = session(certificates.viewer("victor"))
        self.admin = session(certificates.admin("alice"))
        self.names = {}
        self.turns = itertools.count()

    def prepare(self):
        """Objects for the paths: `me` lends and borrows, and there is room for whatever is asked."""
        for name, caller in (("me", self.cluster), ("other", self.other)):
            self.post(caller, "advertisements", offer(name, "4P", "4E"))
            self.post(self.admin, f"clusters/{name}/uncordon")
            for limits in (f"clusters/{name}/policy", f"quotas/{name}"):
                self.admin.delete(f"{self.url}/api/v1/{limits}", timeout=LATE)
        borrowed = [self.reserve(self.cluster, "other") for _ in range(3)]
        lent = [self.reserve(self.other, "me") for _ in range(3)]
        token = self.post(self.admin, "tokens", {"uses": 1000})
        self.names = {
            "cluster": ["me", "other"],
            "reservation": [*borrowed, *lent, "rsv-none"],
            "token": [token["id"], "none"],
            "role": ["cluster"],
            "name": [self.applicant(token["token"]), "nobody"],
        }

    def applicant(self, token):
        """Asks to join, and has to wait for an administrator."""
        name = f"applicant-{next(self.turns)}"
        body = {"token": token, "name": name, "request": Applicant(name).request}
        with session() as anybody:
            anybody.verify = self.viewer.verify
            asked = anybody.post(self.enrolment, json.dumps(body), timeout=LATE)
        assert asked.status_code == 202, asked.text
        return name

    def reserve(self, caller, target):
        return self.post(caller, "reservations", request_body("1m", "1", targetClusterID=target))[
            "id"
        ]

    def post(self, caller, path, body=None):
        content = None if body is None else json.dumps(body)
        response = caller.post(f"{self.url}/api/v1/{path}", data=content, timeout=LATE)
        assert response.ok, response.text
        return response.json()

    def call(self, role, case):
        """Send a case, aimed at what is there, and hold the answer against the document."""
        self.aim(role, case)
        caller = getattr(self, role)
        patience = SOON if EVENT_STREAM in str(case.operation.responses) else LATE
        response = case.call(self.url, caller, verify=caller.verify, timeout=patience)
        case.validate_response(
            response,
            excluded_checks=unsaid(response),
            transport_kwargs={"session": caller, "verify": caller.verify},
        )
        answer = Answer(response.status_code, flat(response.headers), response.content)
        check_documented(response.request.method, urlsplit(response.request.url).path, answer)

    def aim(self, role, case):
        """Names drawn by lot are nobody's: put some in that get further, where the case allows it."""
        turn = next(self.turns)
        from schemathesis.core.parameters import ParameterLocation

        if not case.meta.is_negative_at(ParameterLocation.PATH):
            for name in case.path_parameters.keys() & self.names.keys():
                case.path_parameters[name] = self.names[name][turn % len(self.names[name])]
        if isinstance(case.body, dict) and is_name(case.body.get("clusterID")):
            case.body["clusterID"] = "me"
        if role == "cluster" and is_name(case.query.get("cluster")):
            case.query["cluster"] = "me"


def session(directory=None):
    import requests

    found = requests.Session()
    found.trust_env = False  # a bundle in the environment would stand in for our authority
    if directory:
        found.cert = (str(directory / "tls.crt"), str(directory / "tls.key"))
        found.verify = str(directory / "ca.crt")
    return found


def is_name(value):
    return isinstance(value, str) and len(value) <= 253 and validation.is_plain(value)


def unsaid(response):
    from schemathesis.specs.openapi import checks

    refused = response.status_code == 400 and UNSAYABLE.search(response.json()["detail"])
    return [checks.positive_data_acceptance] if refused else []


def flat(headers):
    return {name.title(): values[0] for name, values in headers.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def child(certificates, tmp_path_factory):
    longest = durations.format_duration(durations.MAX_DURATION)
    directory = tmp_path_factory.mktemp("schemathesis")
    async with brokers.child(
        certificates,
        directory,
        read_batch_seconds="0",
        max_duration=longest,
        max_wait=longest,
        max_waiting=str(10**6),
        ca_path=str(applicants.authority(certificates, directory)),
        enrol_port="0",
    ) as broker:
        yield broker
        await broker.stop()
    assert broker.logged("Request failed") == []
    brokers.audited(directory / "kubelend.db")


@pytest.fixture(scope="module")
def service(child):
    service = Service(child)
    yield service
    for caller in (service.cluster, service.other, service.viewer, service.admin):
        caller.close()


def test_the_document_is_the_one_that_is_served(service):
    served = service.viewer.get(f"{service.url}/openapi.json", timeout=LATE)
    assert served.json() == DOCUMENT


def let_in(route):
    """The roles that may call it; what the others get is tested in test_access.py."""
    return [role for role, word in roles.row_of(route.name)._asdict().items() if word != "no"]


@pytest.mark.parametrize(
    "role, route",
    [
        pytest.param(role, route, id=f"{role}-{route.name}")
        for route in routes.ROUTES
        for role in let_in(route)
    ],
)
def test_it_can_be_taken_at_its_word(service, role, route):
    """By the first of its roles thoroughly: what is checked after the role is the same for all."""
    service.prepare()
    explore(route, lambda case: service.call(role, case), thoroughly=role == let_in(route)[0])


def explore(route, call, *, thoroughly):
    """What `schema.parametrize` would do, whose tests have no names of their own in pytest 9.2."""
    from hypothesis import HealthCheck, settings
    from schemathesis.generation.hypothesis import builder

    modes = builder.HypothesisTestMode
    config = builder.HypothesisTestConfig(
        project=schema().config,
        modes=[modes.EXAMPLES, modes.COVERAGE, modes.FUZZING] if thoroughly else [modes.FUZZING],
        settings=settings(
            max_examples=10 if thoroughly else 2,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

    def each(case):
        call(case)

    operation = schema()[route.path][route.method]
    builder.create_test(operation=operation, test_func=each, config=config)()
