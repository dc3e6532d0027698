"""The client of the broker, over real mutual TLS: every route, errors by class, retries, pages."""

import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from kubelend.apps.agent_settings import AgentSettings
from kubelend.apps.settings import BrokerSettings
from kubelend.core import errors
from kubelend.kits.backoff import Backoff
from kubelend.transports import session
from kubelend.transports.client import BrokerClient
from kubelend.transports.session import ConnectionPool
from kubelend.wire import admin_bodies as admin
from kubelend.wire import bodies, route, routes
from scripted_broker import body, events, hang_up, problem, raw

QUICK = Backoff(retries=2, first=timedelta(milliseconds=1))
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
AMOUNTS = bodies.Quantities("500m", "256Mi")
REQUEST = bodies.ReservationRequest(AMOUNTS, duration="1h")
RESERVATION = bodies.Reservation(
    "rsv-a-1", "a", "b", AMOUNTS, bodies.ReservationStatus("Reserved", "Locked"), NOW
)
ADVERTISEMENT = bodies.Advertisement("a", bodies.Metrics(AMOUNTS))
CLUSTER = bodies.Cluster(
    ADVERTISEMENT, bodies.ClusterStatus("Active", True, "1.00", "Limited", NOW, NOW)
)
EXPLANATION = bodies.Explanation("1/1 cluster fits", 1, 1, {})
TOKEN = admin.Token("id", "Valid", "cluster", 1, NOW, "alice", NOW)
MEMBER = admin.Member("cluster", "a", "Approved", NOW)
POLICY = admin.PolicyStatus("a", admin=bodies.LendingPolicy(deny=["b"]))
QUOTA = admin.QuotaStatus("a", admin.Quota(), admin.QuotaUse())
LINE = admin.AuditLine(1, NOW, admin.Actor("a", "cluster"), "reserve", "x/y", "d")
PUBLISHED = bodies.PublishResult(ADVERTISEMENT)
RESERVATIONS = bodies.ReservationList([RESERVATION])
DRAINED = bodies.DrainResult(CLUSTER, [RESERVATION])
ISSUED = admin.IssuedCertificate("certificate", "authorities")
NEW_TOKEN = admin.NewToken("kl1.id.x", "id", "cluster", NOW, 1, 8444, "sha256:0", "1h")
REVOKED, REMOVED = admin.Revocation(MEMBER, True), admin.Removal(False)
DENY = admin.PolicyRequest(deny=["b"])
RESERVATION_EXPLAIN = "/reservations/r/explain"
ACCEPT, REVOKE = "/members/cluster/a%2Fb/approve", "/members/cluster/a/revoke"

pytestmark = pytest.mark.broker("scripted")


async def test_a_broker_that_is_not_ready_says_why(broker, client):
    broker.responses.append(raw(b"not ready: replaying", 503))
    with pytest.raises(errors.NotReady, match="the broker is not ready: replaying"):
        await client.readyz()


async def test_bodies_are_sent_as_the_contract_has_them(broker, client):
    broker.responses.append(body(RESERVATION, 201))
    await client.reserve(REQUEST, key="k-1")
    assert msgspec.json.decode(broker.seen[0].body) == {
        "requestedResources": {"cpu": "500m", "memory": "256Mi"},
        "duration": "1h",
    }
    assert broker.seen[0].headers["Idempotency-Key"] == "k-1"
    assert broker.seen[0].headers["Content-Type"] == "application/json"
    assert "Kubelend-Agent" not in broker.seen[0].headers


async def test_an_agent_names_itself_in_every_call(broker, certificates):
    broker.responses += [
        body(CLUSTER),
        body(RESERVATION, 201),
        events(b"event: reset\ndata: {}\n\n"),
    ]
    once = Backoff(retries=0)
    directory = certificates.cluster("a")
    async with BrokerClient(broker.url, directory, backoff=once, instance="one") as client:
        await client.get_cluster("a")
        await client.reserve(REQUEST, key="k-1")
        with pytest.raises(errors.BrokerUnreachable):
            await anext(client.stream())
    assert [seen.headers["Kubelend-Agent"] for seen in broker.seen] == ["one"] * 3
    assert broker.seen[1].headers["Idempotency-Key"] == "k-1"


async def test_a_dry_run_is_a_reservation_that_changes_nothing(broker, client):
    broker.responses.append(body(EXPLANATION))
    assert await client.reserve_dry_run(REQUEST) == EXPLANATION
    assert broker.seen[0].query == {"dryRun": "true"}


@pytest.mark.parametrize(
    "call, page, item, query",
    [
        (
            lambda client: client.all_reservations(phase="Reserved"),
            bodies.ReservationList,
            RESERVATION,
            {"phase": "Reserved", "limit": "1000"},
        ),
        (lambda client: client.all_clusters(), bodies.ClusterList, CLUSTER, {}),
        (lambda client: client.policies.all(), admin.PolicyList, POLICY, {}),
        (lambda client: client.quotas.all(), admin.QuotaList, QUOTA, {}),
        (lambda client: client.members.all(), admin.MemberList, MEMBER, {}),
    ],
    ids=["reservations", "clusters", "policies", "quotas", "members"],
)
async def test_pages_are_followed_to_the_end(broker, client, call, page, item, query):
    broker.responses += [body(page([item], "x")), body(page([item]))]
    assert await call(client) == [item, item]
    assert [seen.query for seen in broker.seen] == [query, {**query, "continue": "x"}]


async def test_null_instructions_are_none(broker, client):
    broker.responses.append(raw(b"null\n"))
    assert await client.instructions() == []


@pytest.mark.parametrize("name", ["a/b", "a b?c=d#e", "100%", "zürich", "..", ".", "a;b"])
async def test_a_name_stays_one_segment_whatever_is_in_it(broker, client, name):
    broker.responses.append(body(CLUSTER))
    await client.cordon(name)
    assert broker.seen[0].path.count("/") == f"{route.API}/clusters/x/cordon".count("/")
    assert broker.seen[0].query == {}


@pytest.mark.parametrize(
    "key", ["a\r\nX-Evil: 1", "ü", "x" * 256], ids=["lines", "letters", "long"]
)
async def test_a_key_that_no_header_can_carry_and_an_empty_name_are_no_calls(broker, client, key):
    with pytest.raises(errors.InvalidInput, match="not a valid idempotency key"):
        await client.reserve(REQUEST, key=key)
    with pytest.raises(errors.InvalidInput, match="empty name"):
        await client.remove_cluster("")
    assert broker.seen == []


def all_errors(kind=errors.KubelendError):
    return [kind, *(found for child in kind.__subclasses__() for found in all_errors(child))]


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
async def test_the_error_of_the_broker_is_raised_by_its_own_class(broker, client, kind):
    broker.responses.append(problem(kind("what", hint="do")))
    with pytest.raises(errors.KubelendError) as raised:
        await client.drain("a")
    assert type(raised.value) is (errors.NotFound if kind is errors.Hidden else kind)
    assert str(raised.value) == "what; do"


@pytest.mark.parametrize(
    "answer",
    [raw(b"<html>nginx</html>", 404), raw(b"", 302, {"Location": "/x"}), raw(b"{", 200)],
    ids=["another server", "a redirect", "half a body"],
)
async def test_an_answer_that_is_none_of_ours_is_unexpected(broker, client, answer):
    broker.responses.append(answer)
    with pytest.raises(errors.UnexpectedResponse):
        await client.version()


@pytest.mark.parametrize("status", [200, 500])
async def test_an_answer_without_end_is_given_up(broker, client, status):
    sent = 0

    async def endless(request):
        nonlocal sent
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        while sent < 10 * session.MAX_RESPONSE_BYTES:
            await response.write(bytes(2**20))
            sent += 2**20
        return response

    broker.responses.append(endless)
    with pytest.raises(errors.UnexpectedResponse, match="more than 33554432 bytes"):
        await client.version()
    assert sent < 2 * session.MAX_RESPONSE_BYTES


GATEWAY = raw(b"<html>gateway</html>", 502)
VERSION = bodies.Version("1")


@pytest.mark.parametrize(
    "answers, call, result",
    [
        ([problem(errors.NotReady("starting")), hang_up], lambda c: c.version(), VERSION),
        ([GATEWAY], lambda c: c.version(), VERSION),
        ([hang_up], lambda c: c.refuse("x"), RESERVATION),
    ],
    ids=["a read", "a proxy without a broker", "a refusal whose response was lost"],
)
async def test_a_call_is_repeated_while_that_may_help(broker, client, answers, call, result):
    broker.responses += [*answers, body(result)]
    assert await call(client) == result


NOT_READY, LIMITED = errors.NotReady("starting"), errors.RateLimited("slow")


@pytest.mark.parametrize(
    "answer, call, error, count",
    [
        (problem(NOT_READY), lambda c: c.get_reservation("r"), errors.NotReady, 1 + QUICK.retries),
        (problem(NOT_READY), lambda c: c.drain("x"), errors.NotReady, 1),
        (hang_up, lambda c: c.tokens.create(admin.TokenRequest()), errors.BrokerUnreachable, 1),
        (problem(errors.NotFound("r")), lambda c: c.get_reservation("r"), errors.NotFound, 1),
        (problem(LIMITED, {"Retry-After": "3600"}), lambda c: c.version(), errors.RateLimited, 1),
    ],
    ids=["at most so often", "not idempotent", "a new token", "no use", "too long a wait"],
)
async def test_a_call_is_not_repeated_for_ever_nor_in_vain(
    broker, client, answer, call, error, count
):
    broker.responses.append(answer)
    with pytest.raises(error) as raised:
        await call(client)
    assert len(broker.seen) == count
    assert raised.value.retry_after == (3600 if error is errors.RateLimited else 0)


async def test_the_retries_of_a_reservation_have_the_same_key_and_the_next_has_another(
    broker, client
):
    broker.responses += [hang_up, problem(errors.StoreFailed("full")), body(RESERVATION, 201)]
    await client.reserve(REQUEST)
    await client.reserve(REQUEST)
    *retried, other = [seen.headers["Idempotency-Key"] for seen in broker.seen]
    assert (len(retried), len(set(retried))) == (3, 1)
    assert other not in retried


async def test_calls_share_a_connection(broker, client):
    broker.responses.append(body(bodies.Version("1")))
    for _ in range(5):
        await client.version()
    assert len(broker.connections) == 1


async def test_a_client_that_is_not_open_says_so(certificates):
    with pytest.raises(RuntimeError, match="async with"):
        await BrokerClient("https://localhost:1", certificates.cluster("a")).version()


async def test_a_client_that_was_closed_says_so(broker, certificates):
    async with BrokerClient(broker.url, certificates.cluster("a"), backoff=QUICK) as client:
        pass
    with pytest.raises(errors.BrokerUnreachable, match="was closed on this side"):
        await client.version()


def test_importing_the_client_is_light():
    heavy = "{'numpy', 'rich', 'typer', 'cryptography', 'structlog', 'uvloop'}"
    code = f"import sys, kubelend.transports.client; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


CALLS = {
    "publish": (lambda c: c.publish(ADVERTISEMENT), "/advertisements", PUBLISHED),
    "get_advertisement": (lambda c: c.get_advertisement("a"), "/advertisements/a", ADVERTISEMENT),
    "reserve": (lambda c: c.reserve(REQUEST), "/reservations", RESERVATION),
    "list_reservations": (lambda c: c.list_reservations(), "/reservations", RESERVATIONS),
    "get_reservation": (lambda c: c.get_reservation("r"), "/reservations/r", RESERVATION),
    "release": (lambda c: c.release("r"), "/reservations/r", RESERVATION),
    "activate": (lambda c: c.activate("r"), "/reservations/r/activate", RESERVATION),
    "renew": (lambda c: c.renew("r", "2h"), "/reservations/r/renew", RESERVATION),
    "explain_reservation": (lambda c: c.explain_reservation("r"), RESERVATION_EXPLAIN, EXPLANATION),
    "explain": (lambda c: c.explain(REQUEST), "/explain", EXPLANATION),
    "instructions": (lambda c: c.instructions(), "/instructions", [RESERVATION]),
    "acknowledge": (lambda c: c.acknowledge("r"), "/instructions/r/acknowledge", RESERVATION),
    "refuse": (lambda c: c.refuse("r", "no"), "/instructions/r/refuse", RESERVATION),
    "list_clusters": (lambda c: c.list_clusters(), "/clusters", bodies.ClusterList([CLUSTER])),
    "get_cluster": (lambda c: c.get_cluster("a"), "/clusters/a", CLUSTER),
    "cordon": (lambda c: c.cordon("a", "why"), "/clusters/a/cordon", CLUSTER),
    "uncordon": (lambda c: c.uncordon("a"), "/clusters/a/uncordon", CLUSTER),
    "drain": (lambda c: c.drain("a"), "/clusters/a/drain", DRAINED),
    "remove_cluster": (lambda c: c.remove_cluster("a"), "/clusters/a", None),
    "renew_certificate": (lambda c: c.certificates.renew("request"), "/certificates", ISSUED),
    "version": (lambda c: c.version(), "/version", bodies.Version("1.2.3")),
    "grant_keys": (lambda c: c.grant_keys(), "/keys", bodies.KeySet([])),
    "create_token": (lambda c: c.tokens.create(admin.TokenRequest()), "/tokens", NEW_TOKEN),
    "delete_token": (lambda c: c.tokens.delete("id"), "/tokens/id", None),
    "list_members": (lambda c: c.members.page(), "/members", admin.MemberList([MEMBER])),
    "approve_member": (lambda c: c.members.approve("cluster", "a/b"), ACCEPT, MEMBER),
    "deny_member": (lambda c: c.members.deny("cluster", "a"), "/members/cluster/a/deny", None),
    "revoke_member": (lambda c: c.members.revoke("cluster", "a", release=True), REVOKE, REVOKED),
    "remove_member": (lambda c: c.members.remove("cluster", "a"), "/members/cluster/a", REMOVED),
    "list_policies": (lambda c: c.policies.page(), "/policies", admin.PolicyList([POLICY])),
    "get_policy": (lambda c: c.policies.get("a/b"), "/clusters/a%2Fb/policy", POLICY),
    "set_policy": (lambda c: c.policies.set("a", DENY), "/clusters/a/policy", POLICY),
    "clear_policy": (lambda c: c.policies.clear("a"), "/clusters/a/policy", None),
    "list_quotas": (lambda c: c.quotas.page(), "/quotas", admin.QuotaList([QUOTA])),
    "get_quota": (lambda c: c.quotas.get("a"), "/quotas/a", QUOTA),
    "set_quota": (lambda c: c.quotas.set("a", admin.QuotaRequest()), "/quotas/a", QUOTA),
    "clear_quota": (lambda c: c.quotas.clear("a"), "/quotas/a", None),
    "exchange_handshake": (
        lambda c: c.exchange_handshake("r", bodies.Handshake("liqo")),
        "/reservations/r/handshake",
        bodies.HandshakeResult(bodies.Handshake("other"), "a.b.c"),
    ),
    "audit_log": (lambda c: c.audit.page({}), "/audit", admin.AuditLog([LINE])),
}
OTHERS = {
    "list_tokens": (lambda c: c.tokens.all(), body(admin.TokenList([TOKEN])), [TOKEN]),
    "grant": (lambda c: c.grant("r"), body(bodies.SignedGrant("a.b.c")), "a.b.c"),
    "openapi": (lambda c: c.openapi(), body({"openapi": "3.1.0"}), {"openapi": "3.1.0"}),
    "healthz": (lambda c: c.healthz(), raw(b"ok"), "ok"),
    "readyz": (lambda c: c.readyz(), raw(b"ok"), "ok"),
}
"""Those whose methods return something else than the body."""


def test_every_route_has_a_method():
    # The stream has its own tests.
    assert CALLS.keys() | OTHERS.keys() | {"stream"} == routes.ROUTES_BY_NAME.keys()


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_goes_to_its_route_and_returns_its_body(broker, client, name):
    call, path, content = CALLS[name]
    status = min(s for s in routes.ROUTES_BY_NAME[name].responses if s < 300)
    broker.responses.append(raw(b"", 204) if content is None else body(content, status))
    assert await call(client) == content
    assert broker.seen[0].path == route.API + path
    assert broker.seen[0].method == routes.ROUTES_BY_NAME[name].method


@pytest.mark.parametrize("name", OTHERS)
async def test_the_other_routes_answer_too(broker, client, name):
    call, answer, result = OTHERS[name]
    broker.responses.append(answer)
    assert await call(client) == result
    assert broker.seen[0].method == routes.ROUTES_BY_NAME[name].method


def test_a_connection_waits_for_the_next_advertisement_but_not_for_the_broker_to_close_it():
    broker = BrokerSettings(http_cert_path=Path("certs"))
    agent = AgentSettings()
    assert agent.advertisement_requeue_interval < session.KEEP_ALIVE < broker.idle_timeout


async def test_every_generation_keeps_its_connections_for_so_long():
    generation = ConnectionPool(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    try:
        kept = vars(generation.session.connector)["_keepalive_timeout"]
        assert kept == session.KEEP_ALIVE.total_seconds()
    finally:
        await generation.session.close()
