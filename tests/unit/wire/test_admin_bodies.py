"""Field names on the wire are API, pinned here; a misspelt field of an administrator is an error."""

import msgspec
import pytest

from kubelend.wire import admin_bodies, bodies

FIELDS = {
    admin_bodies.Actor: "name role remote via",
    admin_bodies.AuditLine: "number at actor action subject digest before after code message",
    admin_bodies.AuditLog: "lines next",
    admin_bodies.CertificateRequest: "request",
    admin_bodies.IssuedCertificate: "certificate authorities",
    admin_bodies.TokenRequest: "ttl role name uses",
    admin_bodies.NewToken: (
        "token id role expiresAt uses enrolPort caHash certificateLifetime name"
    ),
    admin_bodies.Token: "id state role usesLeft createdAt createdBy expiresAt name",
    admin_bodies.TokenList: "tokens",
    admin_bodies.MemberCertificate: "serial issuedAt endsAt authority",
    admin_bodies.Member: (
        "role name standing askedAt asks token decidedAt decidedBy certificate revokedAt reason"
    ),
    admin_bodies.MemberList: "members next",
    admin_bodies.AcceptRequest: "key keepOld",
    admin_bodies.RevokeRequest: "release reason",
    admin_bodies.Revocation: "member known released drained tokens letIn",
    admin_bodies.Removal: "refused refusedUntil tokens letIn",
    admin_bodies.JoinRequest: "token name request role",
    admin_bodies.JoinResult: "certificate authorities port",
    admin_bodies.JoinPending: "standing key",
    admin_bodies.PolicyRequest: "allow deny keepBack maxLent maxPerRequester hours",
    admin_bodies.PolicyStatus: "clusterID admin advertised effective",
    admin_bodies.QuotaRequest: "amounts reservations budget currency",
    admin_bodies.Quota: "amounts reservations budget currency",
    admin_bodies.QuotaUse: "held waitedFor reservations waiting spentToday",
    admin_bodies.QuotaStatus: "clusterID quota used",
    admin_bodies.QuotaList: "quotas next",
}


def kinds():
    found = [kind for kind in vars(admin_bodies).values() if isinstance(kind, type)]
    ours = [kind for kind in found if kind.__module__ == admin_bodies.__name__]
    return {kind for kind in ours if issubclass(kind, bodies.Body)}


def test_every_body_has_its_row():
    assert kinds() == set(FIELDS)


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_fields_have_their_names(kind):
    assert [field.encode_name for field in msgspec.structs.fields(kind)] == FIELDS[kind].split()


@pytest.mark.parametrize("kind", [admin_bodies.PolicyRequest, admin_bodies.QuotaRequest])
def test_a_misspelt_limit_is_rejected_where_an_administrator_sets_it(kind):
    with pytest.raises(msgspec.ValidationError, match="unknown field `keepback`"):
        msgspec.json.decode(b'{"keepback": {"cpu": "4"}}', type=kind)


def test_unknown_fields_of_a_newer_cluster_are_ignored():
    body = b'{"deny": ["x"], "weather": "fine"}'
    assert msgspec.json.decode(body, type=bodies.LendingPolicy) == bodies.LendingPolicy(deny=["x"])
