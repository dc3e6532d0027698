"""Every route has its method at the client, which sends to the right place and reads what comes back."""

from datetime import UTC, datetime

import pytest

from kubelend.wire import admin_bodies, bodies, route, routes
from scripted_broker import body, raw

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
TOKEN = admin_bodies.Token("id", "Valid", "cluster", 1, NOW, "alice", NOW)
MEMBER = admin_bodies.Member("cluster", "a", "Accepted", NOW)
POLICY = admin_bodies.PolicyStatus("a", admin=bodies.LendingPolicy(deny=["b"]))
QUOTA = admin_bodies.QuotaStatus("a", admin_bodies.Quota(), admin_bodies.QuotaUse())
LINE = admin_bodies.AuditLine(1, NOW, admin_bodies.Actor("a", "cluster"), "reserve", "x/y", "d")


CALLS = {
    "publish": (
        lambda c: c.publish(ADVERTISEMENT),
        "/advertisements",
        bodies.PublishResult(ADVERTISEMENT),
    ),
    "get_advertisement": (lambda c: c.get_advertisement("a"), "/advertisements/a", ADVERTISEMENT),
    "reserve": (lambda c: c.reserve(REQUEST), "/reservations", RESERVATION),
    "list_reservations": (
        lambda c: c.list_reservations(),
        "/reservations",
        bodies.ReservationList([RESERVATION]),
    ),
    "get_reservation": (lambda c: c.get_reservation("r"), "/reservations/r", RESERVATION),
    "release": (lambda c: c.release("r"), "/reservations/r", RESERVATION),
    "activate": (lambda c: c.activate("r"), "/reservations/r/activate", RESERVATION),
    "renew": (lambda c: c.renew("r", "2h"), "/reservations/r/renew", RESERVATION),
    "explain_reservation": (
        lambda c: c.explain_reservation("r"),
        "/reservations/r/explain",
        EXPLANATION,
    ),
    "explain": (lambda c: c.explain(REQUEST), "/explain", EXPLANATION),
    "instructions": (lambda c: c.instructions(), "/instructions", [RESERVATION]),
    "acknowledge": (lambda c: c.acknowledge("r"), "/instructions/r/acknowledge", RESERVATION),
    "refuse": (lambda c: c.refuse("r", "no"), "/instructions/r/refuse", RESERVATION),
    "list_clusters": (lambda c: c.list_clusters(), "/clusters", bodies.ClusterList([CLUSTER])),
    "get_cluster": (lambda c: c.get_cluster("a"), "/clusters/a", CLUSTER),
    "cordon": (lambda c: c.cordon("a", "why"), "/clusters/a/cordon", CLUSTER),
    "uncordon": (lambda c: c.uncordon("a"), "/clusters/a/uncordon", CLUSTER),
    "drain": (
        lambda c: c.drain("a"),
        "/clusters/a/drain",
        bodies.DrainResult(CLUSTER, [RESERVATION]),
    ),
    "renew_certificate": (
        lambda c: c.certificates.renew("request"),
        "/certificates",
        admin_bodies.IssuedCertificate("certificate", "authorities"),
    ),
    "version": (lambda c: c.version(), "/version", bodies.Version("1.2.3")),
    "grant_keys": (lambda c: c.grant_keys(), "/keys", bodies.KeySet([])),
    "create_token": (
        lambda c: c.tokens.create(admin_bodies.TokenRequest()),
        "/tokens",
        admin_bodies.NewToken("kl1.id.x", "id", "cluster", NOW, 1, 8444, "sha256:0", "1h"),
    ),
    "list_members": (
        lambda c: c.members.page(),
        "/members",
        admin_bodies.MemberList([MEMBER]),
    ),
    "accept_member": (
        lambda c: c.members.approve("cluster", "a/b"),
        "/members/cluster/a%2Fb/accept",
        MEMBER,
    ),
    "revoke_member": (
        lambda c: c.members.revoke("cluster", "a", release=True),
        "/members/cluster/a/revoke",
        admin_bodies.Revocation(MEMBER, True),
    ),
    "remove_member": (
        lambda c: c.members.remove("cluster", "a"),
        "/members/cluster/a",
        admin_bodies.Removal(False),
    ),
    "get_policy": (lambda c: c.policies.get("a/b"), "/clusters/a%2Fb/policy", POLICY),
    "set_policy": (
        lambda c: c.policies.set("a", admin_bodies.PolicyRequest(deny=["b"])),
        "/clusters/a/policy",
        POLICY,
    ),
    "list_quotas": (lambda c: c.quotas.page(), "/quotas", admin_bodies.QuotaList([QUOTA])),
    "get_quota": (lambda c: c.quotas.get("a"), "/quotas/a", QUOTA),
    "set_quota": (
        lambda c: c.quotas.set("a", admin_bodies.QuotaRequest(reservations=1)),
        "/quotas/a",
        QUOTA,
    ),
    "audit_log": (lambda c: c.audit.page({}), "/audit", admin_bodies.AuditLog([LINE])),
}
OTHERS = {
    "remove_cluster": (lambda c: c.remove_cluster("a"), raw(b"", 204), None),
    "delete_token": (lambda c: c.tokens.delete("id"), raw(b"", 204), None),
    "clear_policy": (lambda c: c.policies.clear("a"), raw(b"", 204), None),
    "clear_quota": (lambda c: c.quotas.clear("a"), raw(b"", 204), None),
    "reject_member": (lambda c: c.members.deny("cluster", "a"), raw(b"", 204), None),
    "list_tokens": (
        lambda c: c.tokens.all(),
        body(admin_bodies.TokenList([TOKEN])),
        [TOKEN],
    ),
    "grant": (lambda c: c.grant("r"), body(bodies.SignedGrant("a.b.c")), "a.b.c"),
    "openapi": (lambda c: c.openapi(), body({"openapi": "3.1.0"}), {"openapi": "3.1.0"}),
    "healthz": (lambda c: c.healthz(), raw(b"ok"), "ok"),
    "readyz": (lambda c: c.readyz(), raw(b"ok"), "ok"),
}
"""Those whose methods give something else than the body."""

pytestmark = pytest.mark.broker("scripted")


def test_every_route_has_a_method():
    # The stream has its own tests.
    assert CALLS.keys() | OTHERS.keys() | {"stream"} == routes.ROUTES_BY_NAME.keys()


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_goes_to_its_route_and_gives_its_body(broker, client, name):
    call, path, content = CALLS[name]
    broker.responses.append(
        body(content, status=min(s for s in routes.ROUTES_BY_NAME[name].responses if s < 300))
    )
    assert await call(client) == content
    assert broker.seen[0].path == route.API + path
    assert broker.seen[0].method == routes.ROUTES_BY_NAME[name].method


@pytest.mark.parametrize("name", OTHERS)
async def test_the_other_routes_answer_too(broker, client, name):
    call, answer, result = OTHERS[name]
    broker.responses.append(answer)
    assert await call(client) == result
    assert broker.seen[0].method == routes.ROUTES_BY_NAME[name].method
