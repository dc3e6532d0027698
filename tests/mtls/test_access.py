"""Who calls, and who may call what: the verified certificate decides, and nothing else does.

Every route is tried by every kind of caller, against the table in `roles`, which is not made from the routes
on purpose: a route that lets in too many fails here, and so does documentation that says otherwise."""

import itertools
import json
import re
import ssl

import aiohttp
import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

import applicants
import roles
from applicants import Applicant
from callers import DOCUMENT, offer, request_body
from kubelend.cli import generate
from kubelend.core.lifecycle import Role
from kubelend.pki import identity
from kubelend.pki.identity import BROKER_NAME, Profile
from kubelend.wire import routes
from kubelend.wire.route import EVENT_STREAM

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
    "reserve": lambda _: request_body(),
    "explain": lambda _: request_body(),
    "exchange_handshake": lambda _: {"clusterID": "liqo"},
    "set_policy": lambda _: {"deny": ["somebody"]},
    "set_quota": lambda _: {"reservations": 1_000_000},
    "renew_certificate": lambda caller: {"request": Applicant(*who(caller)).request},
}
"""What to send where a body has to be; anywhere else none is sent."""

NO_STATE = {"version", "openapi", "grant_keys", "audit_log"}
"""Lists that no change shows in, or rejections as well."""


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


def another_authority(broker):
    return broker.holder(broker.certificates.stranger("provider"))


def expired(broker):
    return broker.holder(broker.certificates.expired("provider"))


def early(broker):
    return broker.holder(broker.certificates.early("provider"))


def revoked(broker):
    """By an administrator, before the walk began."""
    return broker.cluster("outcast")


KEPT_OUT = {
    revoked: 403,
    proxy: 403,
    namesake_of_the_broker: 403,
    broker_itself: NO_CONNECTION,
    nobody: NO_CONNECTION,
    another_authority: NO_CONNECTION,
    expired: NO_CONNECTION,
    early: NO_CONNECTION,
}
"""Who may nothing at all, and how that shows."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def enrolling(certificates, tmp_path_factory):
    directory = tmp_path_factory.mktemp("roles")
    async with applicants.enrolling(certificates, directory, trust_proxies=True) as broker:
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
    enrolling, route
):
    broker, expected = enrolling, expectation(route)
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
    return (await applicants.token(broker)).split(".")[1]


async def cluster(_):
    return "cluster"


async def applicant(broker):
    """Who waits to be accepted."""
    found = Applicant(f"applicant-{next(COUNT)}")
    assert (await found.ask(broker, await applicants.token(broker))).status == 202
    return found.name


OBJECTS = {
    "cluster": provider,
    "reservation": reservation,
    "token": token,
    "role": cluster,
    "name": applicant,
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
    operation = DOCUMENT["paths"][route.path][route.method.lower()]
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


def ids(listed):
    return [found["id"] for found in listed["reservations"]]


async def test_cluster_lists_only_what_concerns_it(broker):
    a, b, c = (broker.cluster(name) for name in "abc")
    await a.advertise("100", "100Gi")
    mine, others = await b.reserve(), await c.reserve()
    assert ids(await b.read("reservations")) == [mine["id"]]
    assert ids(await c.read("reservations")) == [others["id"]]
    assert ids(await a.read("reservations")) == [mine["id"], others["id"]]
    assert ids(await broker.viewer().read("reservations")) == [mine["id"], others["id"]]
    assert (await b.get("reservations", cluster="c")).refusal == (403, "Forbidden")
    assert ids(await b.read("reservations", cluster="b")) == [mine["id"]]


async def test_what_is_hidden_looks_like_what_is_not_there(broker):
    await broker.cluster("a").advertise()
    made = await broker.cluster("b").reserve()
    stranger = broker.cluster("stranger")
    real = await stranger.get("reservations", made["id"])
    invented = await stranger.get("reservations", "rsv-b-invented")
    assert real.problem.detail.replace(made["id"], "rsv-b-invented") == invented.problem.detail
    for name in ("a", "nobody"):
        answer = await broker.cluster("b").get("advertisements", name)
        assert answer.refusal == (403, "Forbidden")
    assert (await broker.admin().get("advertisements", "nobody")).refusal == (404, "NotFound")


async def test_only_the_certificate_says_for_which_cluster_somebody_speaks(broker):
    a = broker.cluster("a")
    await a.advertise()
    for impostor in (broker.cluster("b"), broker.admin("a")):
        answer = await impostor.post("advertisements", offer("a", "1"))
        assert answer.refusal == (403, "Forbidden")
    assert (await a.read("advertisements", "a"))["resources"]["capacity"]["cpu"] == "4"
    body = request_body(requesterID="c", clusterID="c")
    assert (await broker.cluster("b").post("reservations", body)).json["requesterID"] == "b"


async def test_organisation_gives_the_role_and_any_other_one_is_a_cluster(broker, certificates):
    def holder(*organisations):
        return broker.holder(certificate(certificates, "ops", *organisations), "ops")

    for organisations in ((), ("kubelend:cluster",), ("LiqoResourceAgent", "Example Ltd")):
        await holder(*organisations).advertise()
        assert (await holder(*organisations).get("clusters")).refusal == (403, "Forbidden")
    admin, viewer = holder("Example Ltd", "kubelend:admin"), holder("kubelend:viewer")
    assert (await admin.post("clusters", "ops", "cordon")).status == 200
    assert (await viewer.get("clusters")).status == 200
    assert (await viewer.post("clusters", "ops", "uncordon")).refusal == (403, "Forbidden")
    nameless = broker.holder(certificate(certificates, None, "LiqoResourceAgent"))
    assert (await nameless.get("version")).refusal == (403, "InvalidIdentity")


ODD_NAMES = ["Team A/Cluster_1", "Zürich – Süd 日本", "50%25 off{b}", "what?#&=+;'\" \\name", "..."]


def certificate(certificates, name, *organisations, usage=ExtendedKeyUsageOID.CLIENT_AUTH):
    """A directory with a certificate for this subject, whatever our own profiles would say to it."""
    subject = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, found) for found in organisations]
    if name is not None:
        subject.append(x509.NameAttribute(NameOID.COMMON_NAME, name))
    return certificates.write(
        f"odd-{name}-{'-'.join(organisations)}", Profile(x509.Name(subject), usage)
    )


async def test_nobody_is_served_without_tls(broker):
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://localhost:{broker.port}/healthz")


@pytest.mark.parametrize("name", ODD_NAMES)
async def test_name_that_is_no_dns_label_works_through_the_whole_life(broker, name):
    """It lends, borrows, is found under its name in any path, and is steered by admins."""
    odd, plain, admin = broker.cluster(name), broker.cluster("plain"), broker.admin()
    published = await odd.advertise()
    assert published["advertisement"]["clusterID"] == name
    assert (await odd.read("advertisements", name))["clusterID"] == name
    lent = await plain.reserve(targetClusterID=name)
    assert lent["status"]["message"] == f"Resources locked in cluster {name}"
    assert [found["id"] for found in await odd.read("instructions")] == [lent["id"]]
    assert (await odd.post("instructions", lent["id"], "acknowledge")).status == 200

    await plain.advertise()
    borrowed = await odd.reserve()
    assert borrowed["requesterID"] == name
    assert re.fullmatch(r"rsv-[a-z0-9][a-z0-9-]*-[a-z0-9]{13,}", borrowed["id"])
    assert len(borrowed["id"]) <= 63
    for step in ("activate", "renew"):
        assert (await odd.post("reservations", borrowed["id"], step)).status == 200
    assert (await odd.delete("reservations", borrowed["id"])).status == 200
    async with odd.stream() as stream:
        _, hold = await stream.events(2)
        assert hold.instruction == ("provider", "Hold", lent["id"])

    listed = await admin.read("reservations", cluster=name, role="provider")
    assert [found["id"] for found in listed["reservations"]] == [lent["id"]]
    for step in ("cordon", "uncordon", "drain"):
        assert (await admin.post("clusters", name, step)).status == 200
    assert (await admin.delete("clusters", name)).status == 204
    assert (await odd.get("advertisements", name)).status == 404


def rejected(broker, route, code):
    return broker.metric("kubelend_http_requests_rejected_total", route=route, code=code)


OTHERS_NAME = "clusterID 'a' is not the certificate's 'b'"
LARGE = request_body(policy=" " * 300_000)


@pytest.mark.parametrize(
    "kind, name, call, logged",
    [
        ("cluster", "b", ("advertisements", offer("a")), "publish Forbidden"),
        ("viewer", "victor", ("clusters", "a", "drain"), "drain Forbidden"),
        ("own_name", "", ("explain", request_body()), "explain InvalidIdentity"),
        ("cluster", "r", ("reservations", LARGE), "reserve BodyTooLarge"),
    ],
    ids=["other cluster", "role", "name of the broker", "body too large"],
)
async def test_rejected_call_is_logged_with_who_and_what_and_counted(
    broker, certificates, log, kind, name, call, logged
):
    own_name = certificate(certificates, BROKER_NAME, "LiqoResourceBroker")
    directory = getattr(certificates, kind)(name) if name else own_name
    await broker.holder(directory).post(*call)
    route, code = logged.split()
    (line,) = log.lines("Request rejected")
    expected = {"route": route, "code": code, "level": "warning", "remote": "127.0.0.1"}
    assert line.items() >= expected.items()
    assert (line["caller"] or "") == name
    assert (line["error"] == OTHERS_NAME) == (route == "publish")
    assert rejected(broker, route, code) == 1


async def test_too_many_calls_are_counted_and_logged_once_for_each_caller(start, log):
    broker = await start(rate_limit=0.001, rate_burst=1)
    for caller in (broker.cluster("x"), broker.admin("x")):
        for _ in range(20):
            await caller.get("version")
    lines = log.lines("Request rejected")
    assert [(line["caller"], line["code"]) for line in lines] == [("x", "RateLimited")] * 2
    assert rejected(broker, "version", "RateLimited") == 38


async def test_ordinary_refusals_are_counted_and_not_logged(broker, log):
    r = broker.cluster("r")
    await r.post("reservations", request_body())
    await r.post("reservations", request_body("no"))
    await r.get("/api/v1/%1b%5b31mred")
    assert log.lines("Request rejected") == []
    assert rejected(broker, "reserve", "NoCapacity") == 1
    assert rejected(broker, "reserve", "InvalidQuantity") == 1
    assert rejected(broker, "unknown", "NotFound") == 1


@pytest.mark.parametrize("kind", ["stranger", "expired"])
async def test_a_handshake_that_is_refused_is_logged_and_counted(broker, certificates, log, kind):
    with pytest.raises(aiohttp.ClientError):
        await broker.holder(getattr(certificates, kind)("a")).get("version")
    text = "TLS handshake rejected: client certificate not trusted or expired"
    (line,) = log.lines(text)  # however often the client tried
    assert line["remote"] == "127.0.0.1"
    assert "CERTIFICATE" in line["reason"]
    assert rejected(broker, "handshake", "HandshakeRefused") >= 1
