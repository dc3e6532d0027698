"""The names on the wire are API: pinned here, field by field."""

import msgspec
import pytest

from kubelend.wire import bodies, membership_bodies

FIELDS = {
    membership_bodies.TokenRequest: "ttl role name uses",
    membership_bodies.NewToken: (
        "token id role expiresAt uses enrolPort caHash certificateLifetime name"
    ),
    membership_bodies.Token: "id state role usesLeft createdAt createdBy expiresAt name",
    membership_bodies.TokenList: "tokens",
    membership_bodies.MemberCertificate: "serial issuedAt endsAt authority",
    membership_bodies.Member: (
        "role name standing askedAt asks token decidedAt decidedBy certificate revokedAt reason"
    ),
    membership_bodies.MemberList: "members next",
    membership_bodies.AcceptRequest: "key keepOld",
    membership_bodies.RevokeRequest: "release reason",
    membership_bodies.Revocation: "member known released drained tokens letIn",
    membership_bodies.Removal: "refused refusedUntil tokens letIn",
    membership_bodies.JoinRequest: "token name request role",
    membership_bodies.JoinResult: "certificate authorities port",
    membership_bodies.JoinPending: "standing key",
}


def test_every_body_has_its_row():
    found = [kind for kind in vars(membership_bodies).values() if isinstance(kind, type)]
    assert {kind for kind in found if issubclass(kind, bodies.Body)} - {bodies.Body} == set(FIELDS)


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_fields_have_their_names(kind):
    assert [field.encode_name for field in msgspec.structs.fields(kind)] == FIELDS[kind].split()
