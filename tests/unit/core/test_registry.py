"""Members and tokens: put by events, and asked about every certificate."""

import pytest

import make
from kubelend.core.errors import NotFound, Revoked
from kubelend.core.events import (
    MemberAccepted,
    MemberRemoved,
    MemberRevoked,
    RecordDeleted,
    TokenCreated,
    TokenRemoved,
)
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Role
from kubelend.core.members import Member, MembershipStatus, Token, TokenId

BERLIN = Member(Role.CLUSTER, "berlin", MembershipStatus.ACCEPTED, make.T0)
TOKEN = Token(TokenId("abc"), "digest", Role.CLUSTER, make.T0, "alice", make.T0 + make.HOUR)


def revoked(at=make.T0, standing=MembershipStatus.REVOKED):
    return Member(Role.CLUSTER, "berlin", standing, make.T0, revoked_at=at)


@pytest.fixture
def ledger():
    return Ledger()


def test_records_are_put_with_the_ledgers_revision_and_taken_out(ledger):
    member = ledger.apply(MemberAccepted(make.T0, BERLIN))
    token = ledger.apply(TokenCreated(make.T0, TOKEN))
    assert (member.revision, token.revision) == (1, 2)
    assert ledger.member_index.member(Role.CLUSTER, "berlin") == member
    assert ledger.apply(MemberRemoved(make.T0, BERLIN.id)) == RecordDeleted("member", BERLIN.id)
    assert ledger.apply(TokenRemoved(make.T0, TOKEN.id)) == RecordDeleted("token", TOKEN.id)
    assert (dict(ledger.member_index.members), dict(ledger.member_index.tokens)) == ({}, {})
    with pytest.raises(NotFound, match="no cluster 'berlin' has joined"):
        ledger.member_index.member(Role.CLUSTER, "berlin")


def test_certificate_of_a_stranger_is_believed(ledger):
    """An authority that the broker trusts may have issued it elsewhere."""
    ledger.member_index.check_not_revoked(Role.CLUSTER, "paris", make.T0)


def test_every_certificate_of_a_revoked_member_is_refused(ledger):
    ledger.apply(MemberRevoked(make.T0, revoked()))
    for not_before in (make.T0 - make.HOUR, make.T0, make.T0 + make.HOUR):
        with pytest.raises(Revoked, match="cluster berlin was revoked"):
            ledger.member_index.check_not_revoked(Role.CLUSTER, "berlin", not_before)


def test_person_of_the_same_name_is_not_meant(ledger):
    ledger.apply(MemberRevoked(make.T0, revoked()))
    ledger.member_index.check_not_revoked(Role.VIEWER, "berlin", make.T0)


def test_after_a_return_only_the_old_certificates_are_refused(ledger):
    ledger.apply(MemberAccepted(make.T0, revoked(make.T0, MembershipStatus.ACCEPTED)))
    ledger.member_index.check_not_revoked(Role.CLUSTER, "berlin", make.T0)
    with pytest.raises(Revoked):
        ledger.member_index.check_not_revoked(Role.CLUSTER, "berlin", make.T0 - make.SECOND)
