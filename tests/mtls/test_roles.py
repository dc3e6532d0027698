"""Who may call what: every route, tried by every kind of caller, against the table in `roles`.

The table is not made from the routes on purpose: a route that lets in too many fails here, and so does
documentation that says otherwise.
"""

import itertools
import json
import re
import ssl

import aiohttp
import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

import newcomers
import roles
from callers import offer, wish
from kubelend.cli import generate
from kubelend.core.lifecycle import Role
from kubelend.pki import identity
from kubelend.wire import openapi, routes
from kubelend.wire.route import EVENT_STREAM
from newcomers import Newcomer

MAY = "may"
NO_CONNECTION = "no connection"

CLUSTERS = ("requester", "provider", "stranger")
"""The provider is the cluster in every path, and lends the reservation there; a stranger has its own."""

OUTCOMES = {
    ("yes", ""): (MAY, MAY, MAY),
    ("no", ""): (403, 403, 403),
    ("its own", "{cluster}"): (403, MAY, 403),
    ("its own", "{reservation}"): (MAY, MAY, 404),
    ("requester", "{reservation}"): (MAY, 403, 404),
    ("provider", "{reservation}"): (403, MAY, 404),
}
"""What each of CLUSTERS gets, by the table's word and what is in the path."""

PEOPLE = {"yes": MAY, "no": 403}

PLENTY = ("100", "100Gi")

BODIES = {
    "publish": lambda caller: offer(caller.name, *PLENTY),
    "reserve": lambda _: wish(),
    "explain": lambda _: wish(),
    "set_policy": lambda _: {"deny": ["somebody"]},
    "set_quota": lambda _: {"reservations": 1_000_000},
    "renew_certificate": lambda caller: {"request": Newcomer(*who(caller)).request},
}
"""What to send where a body has to be; anywhere else none is sent."""

NO_STATE = {"version", "openapi", "grant_keys", "audit_log"}
"""Lists that no change shows in, or refusals as well."""


def proxy(broker):
    """Trusted, but it passes on no certificate."""
    return broker.holder(
        broker.certificates.write("proxy", identity.client_profile("envoy", Role.PROXY))
    )


def namesake_of_the_broker(broker):
    """The broker's own name, in a certificate that is good for clients."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.BROKER_NAME)])
    profile = identity.Profile(name, ExtendedKeyUsageOID.CLIENT_AUTH)
    return broker.holder(broker.certificates.write("namesake", profile))


def broker_itself(broker):
    """The very files that it serves with, which say that they are for serving."""
    return broker.holder(broker.certificates.server())


def nobody(broker):
    """Trusts the broker, and shows no certificate."""
    found = broker.holder(broker.certificates.cluster("nobody"))
    found.context = ssl.create_default_context(cafile=broker.certificates.server() / "ca.crt")
    return found


def of_another_authority(broker):
    return broker.holder(broker.certificates.stranger("provider"))


def expired(broker):
    return broker.holder(broker.certificates.expired("provider"))


def revoked(broker):
    """By an administrator, before the walk began."""
    return broker.cluster("outcast")


KEPT_OUT = {
    revoked: 403,
    proxy: 403,
    namesake_of_the_broker: 403,
    broker_itself: NO_CONNECTION,
    nobody: NO_CONNECTION,
    of_another_authority: NO_CONNECTION,
    expired: NO_CONNECTION,
}
"""Who may nothing at all, and how that shows."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def broker(certificates, tmp_path_factory):
    directory = tmp_path_factory.mktemp("roles")
    async with newcomers.enrolling(certificates, directory, trust_proxies=True) as broker:
        for name in ("provider", "stranger", "outcast"):
            await broker.cluster(name).advertise(*PLENTY)
        answer = await broker.admin().post("members", "cluster", "outcast", "revoke")
        assert answer.status == 200
        yield broker


def expectation(route):
    """What each kind of caller has to get, from the table alone."""
    cluster, viewer, admin = roles.row_of(route.name)
    outcomes = OUTCOMES.get((cluster, "")) or OUTCOMES[cluster, placeholder(route)]
    return (
        dict(zip(CLUSTERS, outcomes, strict=True))
        | {"viewer": PEOPLE[viewer], "admin": PEOPLE[admin]}
        | {kind.__name__: outcome for kind, outcome in KEPT_OUT.items()}
    )


def placeholder(route):
    return route.path[route.path.find("{") : route.path.find("}") + 1]


def callers_of(broker):
    return (
        {name: broker.cluster(name) for name in CLUSTERS}
        | {"viewer": broker.viewer(), "admin": broker.admin()}
        | {kind.__name__: kind(broker) for kind in KEPT_OUT}
    )


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("route", routes.ROUTES, ids=lambda route: route.name)
async def test_each_caller_gets_what_the_table_says_and_a_refused_one_changes_nothing(
    broker, route
):
    expected = expectation(route)
    everybody = callers_of(broker)
    names = await objects(broker, route)
    permitted = [kind for kind, outcome in expected.items() if outcome == MAY]
    refused = {kind: outcome for kind, outcome in expected.items() if outcome != MAY}
    before = await snapshot(broker)
    assert {kind: await attempt(everybody[kind], route, names) for kind in refused} == refused
    assert await snapshot(broker) == before
    assert {kind: await attempt(everybody[kind], route, names) for kind in permitted} == (
        dict.fromkeys(permitted, MAY)
    )


async def objects(broker, route):
    """What stands in the path for each name in braces; whatever the walk has done so far, it is there."""
    names = re.findall(r"{(\w+)}", route.path)
    assert set(names) <= OBJECTS.keys(), f"{route.name}: say in OBJECTS what stands in its path"
    return {name: await OBJECTS[name](broker) for name in names}


async def provider(broker):
    """Open, and with limits that bound nothing: they can be looked at and lifted."""
    admin = broker.admin()
    await broker.cluster("provider").advertise(*PLENTY)
    assert (await admin.post("clusters", "provider", "uncordon")).status == 200
    assert (await admin.put("clusters", "provider", "policy", {"deny": ["nobody"]})).status == 200
    assert (await admin.put("quotas", "provider", {})).status == 200
    return "provider"


async def reservation(broker):
    lent = await broker.cluster("requester").reserve(targetClusterID=await provider(broker))
    return lent["id"]


async def token(broker):
    return (await newcomers.token(broker)).split(".")[1]


async def cluster(_):
    return "cluster"


async def newcomer(broker):
    """Who waits to be accepted."""
    found = Newcomer(f"newcomer-{next(COUNT)}")
    assert (await found.ask(broker, await newcomers.token(broker))).status == 202
    return found.name


OBJECTS = {
    "cluster": provider,
    "reservation": reservation,
    "token": token,
    "role": cluster,
    "name": newcomer,
}
COUNT = itertools.count()


async def attempt(caller, route, names):
    """How it ended: let in, the status of the refusal, or no connection at all."""
    path = route.path.format_map(names)
    try:
        status = await status_of(caller, route, path)
    except aiohttp.ClientError:
        return NO_CONNECTION
    return status if status in {401, 403, 404} or status >= 500 else MAY


async def status_of(caller, route, path):
    if route.media_type == EVENT_STREAM:  # it would be read for ever
        async with caller.session.get(path) as response:
            return response.status
    return (await caller.call(route.method, path, content=body_of(caller, route))).status


def who(caller):
    person = {"victor": Role.VIEWER, "alice": Role.ADMIN}
    return caller.name or "nobody", person.get(caller.name, Role.CLUSTER)


def body_of(caller, route):
    if route.name in BODIES:
        return json.dumps(BODIES[route.name](caller)).encode()
    operation = openapi.document("test")["paths"][route.path][route.method.lower()]
    needed = operation.get("requestBody", {}).get("required", False)
    assert not needed, f"{route.name} needs a body: say in BODIES which"
    return None


async def snapshot(broker):
    """All that an administrator can list, so also what is refused to others and not shown to them."""
    return {
        route.name: (await broker.admin().get(route.path, **whole(route))).content
        for route in routes.ROUTES
        if route.method == "GET"
        and not placeholder(route)
        and route.media_type == "application/json"
        and route.name not in NO_STATE
        and roles.row_of(route.name).admin == "yes"
    }


def whole(route):
    return {"limit": "1000"} if any(p.name == "limit" for p in route.parameters) else {}


def test_the_documentation_says_the_same():
    documented = {}
    for line in generate.rest_routes().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in {"GET", "POST", "PUT", "PATCH", "DELETE"}:
            documented[cells[0], cells[1].strip("`")] = tuple(cells[2:5])
    assert documented == {
        (route.method, route.path): roles.row_of(route.name) for route in routes.ROUTES
    }


def test_the_table_has_no_row_too_many():
    assert roles.TABLE.keys() == routes.ROUTES_BY_NAME.keys()
