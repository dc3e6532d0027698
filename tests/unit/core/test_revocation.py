"""A revoked member stays revoked; what it lent and borrowed is released or kept as asked."""

import pytest

import make
from kubelend.core import commands, enrolment
from kubelend.core.errors import Conflict, NotFound, Revoked
from kubelend.core.lifecycle import Role
from kubelend.core.members import Certificate, MembershipStatus, Token, TokenId
from kubelend.core.models import ClusterId

A = ClusterId("a")


@pytest.fixture
def desk():
    return make.desk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")


def revoke(desk, name="a", role=Role.CLUSTER, *, release=False, why="stolen"):
    return desk.run(
        enrolment.revoke_member(
            desk.ledger, role, name, reason=why, by="alice", release=release, now=desk.now
        )
    )


def certify(desk, name="a", lifetime=make.HOUR, role=Role.CLUSTER, shown_until=None):
    issued = Certificate("01", desk.now, desk.now + lifetime, "sha256:ca")
    holder = enrolment.Applicant(role, name, "k1")
    return desk.run(enrolment.issue_certificate(desk.ledger, holder, issued, desk.now, shown_until))


def remove(desk, name="a", role=Role.CLUSTER):
    return desk.run(enrolment.remove_member(desk.ledger, role, name, "alice", desk.now))


def check(desk, not_before, name="a", role=Role.CLUSTER):
    desk.ledger.member_index.check_not_revoked(role, name, not_before)


def test_certificates_of_a_revoked_one_are_refused_old_and_new(desk):
    revoke(desk)
    for not_before in (desk.now - make.HOUR, desk.now + make.HOUR):
        with pytest.raises(Revoked, match="cluster a was revoked at 2026-01-01T12:00:00Z"):
            check(desk, not_before)
    check(desk, desk.now, "b")
    check(desk, desk.now, role=Role.ADMIN)


def test_after_a_return_only_older_certificates_are_refused(desk):
    revoke(desk)
    desk.run(enrolment.accept_member(desk.ledger, Role.CLUSTER, "a", "", "alice", desk.now))
    check(desk, desk.now)
    with pytest.raises(Revoked):
        check(desk, desk.now - make.MOMENT)


def test_certificate_of_a_return_within_one_second_is_revoked_too(desk):
    """It starts on the next whole second, which may be later than the second revocation."""

    def come_back():
        desk.run(enrolment.accept_member(desk.ledger, Role.CLUSTER, "a", "", "alice", desk.now))
        certify(desk)

    revoke(desk)
    come_back()
    assert revoke(desk).member.revoked_at == desk.now + make.SECOND
    come_back()
    with pytest.raises(Revoked):
        check(desk, desk.now + 0.999 * make.SECOND)
    check(desk, desk.now + make.SECOND)


def test_kept_reservations_stay_and_nothing_new_is_placed_there(desk):
    borrowed = desk.reserve("cpu=1,memory=1Gi", requester="a")
    lent = desk.reserve("cpu=1,memory=1Gi", requester="b")
    waits = desk.reserve("cpu=9,memory=1Gi", requester="a", wait=make.HOUR)
    done = revoke(desk)
    assert desk.target(borrowed) == "b"
    assert desk.target(lent) == "a"
    assert desk[waits].phase == "Released"
    assert (done.released, done.drained) == ([waits], [])
    assert desk.ledger.cluster(A).cordon == "revoked: stolen"
    assert desk.refused("cpu=1,memory=1Gi", requester="b") == (
        "0/2 clusters fit: 1 Cordoned, 1 IsRequester"
    )


def test_released_reservations_give_back_and_move(desk):
    desk.advertise("c")
    borrowed = desk.reserve("cpu=1,memory=1Gi", requester="a", pinned="b")
    lent = desk.reserve("cpu=1,memory=1Gi", requester="b", pinned="a")
    free = desk.reserve("cpu=3,memory=1Gi", requester="c", pinned="a")
    done = revoke(desk, release=True)
    assert (desk[borrowed].phase, desk[borrowed].reason) == ("Released", "ReleasedByAdmin")
    assert desk[borrowed].message == "Requester a was revoked"
    assert desk[lent].phase == "Released"  # it was for a alone
    assert desk[free].phase == "Released"
    assert (done.released, done.drained) == ([borrowed], [lent, free])
    assert not desk.reserved("a")


def test_what_a_revoked_one_lent_moves_to_others(desk):
    desk.advertise("c")
    lent = desk.reserve("cpu=4,memory=1Gi", requester="b")
    assert desk.target(lent) == "a"
    revoke(desk, release=True)
    assert desk.target(lent) == "c"


def test_release_may_follow_later(desk):
    borrowed = desk.reserve("cpu=1,memory=1Gi", requester="a")
    at = revoke(desk).member.revoked_at
    desk.pass_time(make.MINUTE)
    assert revoke(desk, release=True).released == [borrowed]
    assert desk.ledger.member_index.member(Role.CLUSTER, "a").revoked_at == at


def test_one_that_nobody_has_seen_is_refused_should_it_come(desk):
    done = revoke(desk, "nobody")
    assert not done.was_known
    with pytest.raises(Revoked):
        check(desk, desk.now, "nobody")
    assert revoke(desk, "a").was_known


def test_person_of_a_clusters_name_leaves_the_cluster_alone(desk):
    revoke(desk, "a", Role.VIEWER)
    assert desk.ledger.cluster(A).cordon is None
    check(desk, desk.now)


def test_revoking_one_who_asks_to_return_refuses_it(desk):
    revoke(desk)
    token = Token(
        TokenId("t"), "d" * 64, Role.CLUSTER, make.T0, "alice", make.T0 + make.HOUR, name="a"
    )
    desk.run(enrolment.create_token(desk.ledger, token, enrolment.JoinPolicy(), desk.now))
    decision = enrolment.decide_join(
        desk.ledger,
        enrolment.Applicant(Role.CLUSTER, "a", "k2"),
        token,
        enrolment.JoinPolicy(),
        desk.now,
    )
    assert desk.run(enrolment.join_member(desk.ledger, decision, None, desk.now)).asks == "k2"
    assert revoke(desk).member.asks == ""


# -- removal


def test_removed_member_stays_refused_until_its_last_certificate_has_ended(desk):
    certify(desk)
    left = remove(desk).member
    assert left is not None
    assert (left.standing, left.forget_at) == (MembershipStatus.REVOKED, desk.now + make.HOUR)
    assert A not in desk.ledger.clusters
    with pytest.raises(Revoked):
        check(desk, desk.now)
    desk.pass_time(make.HOUR - make.MOMENT)
    desk.run(enrolment.collect_expired(desk.ledger, desk.now))
    assert desk.ledger.member_index.members
    desk.pass_time(make.MOMENT)
    desk.run(enrolment.collect_expired(desk.ledger, desk.now))
    assert not desk.ledger.member_index.members


def test_removing_a_revoked_one_does_not_let_it_back_in(desk):
    revoke(desk, "nobody")
    assert remove(desk, "nobody").member is not None
    desk.pass_time(1000 * make.HOUR)
    desk.run(enrolment.collect_expired(desk.ledger, desk.now))
    with pytest.raises(Revoked):
        check(desk, make.T0, "nobody")


def test_certificate_that_a_cluster_advertised_with_counts_too(desk):
    until = desk.now + 5 * make.HOUR
    certify(desk, "c")
    offer = make.advertisement("c")
    desk.run(commands.advertise(desk.ledger, offer, make.STALE_AFTER, desk.now, until))
    assert remove(desk, "c").member.forget_at == until
    assert remove(desk, "c").member.forget_at == until  # though its cluster is gone by now


@pytest.mark.parametrize("role", [Role.CLUSTER, Role.ADMIN])
def test_certificate_that_was_shown_for_a_newer_one_counts_too(desk, role):
    until = desk.now + 5 * make.HOUR
    certify(desk, role=role, shown_until=until)
    assert remove(desk, role=role).member.forget_at == until


@pytest.mark.parametrize("returns", [False, True], ids=["revoked", "came back"])
def test_one_that_was_revoked_is_never_forgotten(desk, returns):
    """It may hold a certificate that nobody has seen here, which ends later than all others."""
    certify(desk)
    revoke(desk)
    if returns:
        desk.run(enrolment.accept_member(desk.ledger, Role.CLUSTER, "a", "", "alice", desk.now))
    assert remove(desk).member.forget_at is None
    desk.pass_time(1000 * make.HOUR)
    desk.run(enrolment.collect_expired(desk.ledger, desk.now))
    assert remove(desk).member is not None
    with pytest.raises(Revoked):
        check(desk, make.T0)


def test_revoking_a_removed_one_keeps_it_out_for_good(desk):
    certify(desk)
    remove(desk)
    assert revoke(desk).member.forget_at is None


def test_cluster_that_lends_is_not_removed_and_stays_a_member(desk):
    certify(desk)
    desk.reserve("cpu=1,memory=1Gi", requester="b")
    with pytest.raises(Conflict, match="a still lends 1 reservation"):
        remove(desk)
    check(desk, desk.now)


def test_cluster_without_membership_is_forgotten(desk):
    assert remove(desk).member is None
    assert A not in desk.ledger.clusters


def test_nobody_is_removed_who_is_not_known(desk):
    with pytest.raises(NotFound, match="no viewer 'a' exists"):
        remove(desk, role=Role.VIEWER)


# -- administrators


def make_token(desk, id, by):
    token = Token(TokenId(id), "d" * 64, Role.ADMIN, make.T0, by, make.T0 + make.HOUR, name=id)
    desk.run(enrolment.create_token(desk.ledger, token, enrolment.JoinPolicy(), desk.now))
    return token


def let_in(desk, token):
    who = enrolment.Applicant(token.role, token.name, "k1")
    decision = enrolment.decide_join(desk.ledger, who, token, enrolment.JoinPolicy(), desk.now)
    issued = Certificate("01", desk.now, desk.now + make.HOUR, "sha256:ca")
    desk.run(enrolment.join_member(desk.ledger, decision, issued, desk.now))


@pytest.mark.parametrize("put_out", [revoke, remove])
def test_administrator_leaves_no_token_behind_and_who_it_admitted_is_reported(desk, put_out):
    certify(desk, "mallory", role=Role.ADMIN)
    first, *_ = [make_token(desk, name, "mallory") for name in ("t1", "t2")]
    make_token(desk, "t3", "alice")
    let_in(desk, first)
    done = put_out(desk, "mallory", Role.ADMIN)
    assert done.left_behind == (("t1", "t2"), ("admin/t1",))
    assert set(desk.ledger.member_index.tokens) == {"t3"}


def test_tokens_of_an_administrator_outlive_the_cluster_of_its_name(desk):
    make_token(desk, "t1", "a")
    assert revoke(desk, "a").left_behind == ((), ())
    assert revoke(desk, "a", Role.VIEWER).left_behind == ((), ())
    assert set(desk.ledger.member_index.tokens) == {"t1"}


# -- sweeping


def test_expired_tokens_are_listed_for_a_day_and_while_somebody_waits(desk):
    for name in ("t1", "t2"):
        token = Token(TokenId(name), "d" * 64, Role.CLUSTER, make.T0, "alice", make.T0 + make.HOUR)
        desk.run(enrolment.create_token(desk.ledger, token, enrolment.JoinPolicy(), desk.now))
    decision = enrolment.decide_join(
        desk.ledger,
        enrolment.Applicant(Role.CLUSTER, "new", "k1"),
        desk.ledger.member_index.tokens[TokenId("t2")],
        enrolment.JoinPolicy(),
        desk.now,
    )
    desk.run(enrolment.join_member(desk.ledger, decision, None, desk.now))
    desk.pass_time(25 * make.HOUR - make.MOMENT)
    desk.run(enrolment.collect_expired(desk.ledger, desk.now))
    assert set(desk.ledger.member_index.tokens) == {"t1", "t2"}
    desk.pass_time(make.MOMENT)
    desk.run(enrolment.collect_expired(desk.ledger, desk.now))
    assert set(desk.ledger.member_index.tokens) == {"t2"}
