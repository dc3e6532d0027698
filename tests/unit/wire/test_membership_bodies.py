"""The names on the wire are API: pinned here, field by field."""

import msgspec
import pytest

from kubelend.wire import admin_bodies, bodies

FIELDS = {
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
}


def test_every_body_has_its_row():
    found = [kind for kind in vars(admin_bodies).values() if isinstance(kind, type)]
    assert {kind for kind in found if issubclass(kind, bodies.Body)} - {bodies.Body} == set(FIELDS)


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_fields_have_their_names(kind):
    assert [field.encode_name for field in msgspec.structs.fields(kind)] == FIELDS[kind].split()
