"""Joining with tokens, approval, certificates, revocation and removal."""

from contextlib import nullcontext

import pytest
from msgspec.structs import replace

import make
from kubelend.core import commands, enrolment
from kubelend.core.enrolment import Applicant, JoinPolicy
from kubelend.core.errors import Conflict, Forbidden, NotFound, Revoked, TokenRefused
from kubelend.core.lifecycle import Role
from kubelend.core.members import Certificate, MembershipStatus, Token, TokenId
from kubelend.core.models import ClusterId

DIGEST = "d" * 64
POLICY = JoinPolicy(auto_approve=("edge-*",))
ID = TokenId("abc")


def token(id="abc", role=Role.CLUSTER, ttl=make.HOUR, uses=1, name=""):
    return Token(TokenId(id), DIGEST, role, make.T0, "alice", make.T0 + ttl, uses, name)


def applicant(name="berlin", key="k1", role=Role.CLUSTER):
    return Applicant(role, name, key)


def certificate(runner, lifetime=make.HOUR):
    return Certificate("01", runner.now, runner.now + lifetime, "sha256:ca")


@pytest.fixture
def runner():
    return make.runner()


def create(runner, *tokens, policy=POLICY):
    for one in tokens or (token(),):
        runner.run(enrolment.create_token(runner.ledger, one, policy, runner.now))


def join(runner, who, id="abc", policy=POLICY):
    """As the broker does it: checks, decides, issues and records."""
    shown = enrolment.check_token(runner.ledger, TokenId(id), DIGEST)
    decision = enrolment.decide_join(runner.ledger, who, shown, policy, runner.now)
    issued = certificate(runner) if decision.is_approved else None
    member = runner.run(enrolment.join_member(runner.ledger, decision, issued, runner.now))
    return decision.is_approved, member


def accept(runner, name="berlin", key="", role=Role.CLUSTER, *, keep_old=False):
    who = (role, name, key, "alice")
    accepting = enrolment.approve_member(runner.ledger, *who, runner.now, keep_old=keep_old)
    return runner.run(accepting)


def reject(runner, name="berlin"):
    runner.run(enrolment.deny_join(runner.ledger, Role.CLUSTER, name, runner.now))


def certify(runner, name="a", key="k1", lifetime=make.HOUR, role=Role.CLUSTER, shown_until=None):
    issued = (applicant(name, key, role), certificate(runner, lifetime))
    issuing = enrolment.issue_certificate(runner.ledger, *issued, runner.now, shown_until)
    return runner.run(issuing)


def revoke(runner, name="a", role=Role.CLUSTER, *, release=False, why="stolen"):
    fields = {"reason": why, "by": "alice", "release": release, "now": runner.now}
    return runner.run(enrolment.revoke_member(runner.ledger, role, name, **fields))


def remove(runner, name="a", role=Role.CLUSTER):
    return runner.run(enrolment.remove_member(runner.ledger, role, name, "alice", runner.now))


def collect(runner):
    runner.run(enrolment.collect_expired(runner.ledger, runner.now))


def check(runner, not_before, name="a", role=Role.CLUSTER):
    runner.ledger.member_index.check_not_revoked(role, name, not_before)


def uses_left(runner, id="abc"):
    return runner.ledger.member_index.tokens[TokenId(id)].uses_left


def test_token_is_created_once_and_deleted(runner):
    create(runner)
    with pytest.raises(Conflict, match="token abc already exists"):
        create(runner)
    runner.run(enrolment.delete_token(runner.ledger, ID, runner.now))
    assert not runner.ledger.member_index.tokens
    with pytest.raises(NotFound, match="no token 'abc'"):
        runner.run(enrolment.delete_token(runner.ledger, ID, runner.now))


def test_no_token_is_for_a_proxy_nor_for_a_cluster_that_may_not_join(runner):
    with pytest.raises(Forbidden, match="role proxy cannot join"):
        create(runner, token(role=Role.PROXY))
    with pytest.raises(Forbidden, match="cluster 'berlin' is not allowed to join"):
        create(runner, token(name="berlin"), policy=JoinPolicy(allow=("edge-*",)))


def test_tokens_are_not_without_number(runner, monkeypatch):
    monkeypatch.setattr(enrolment, "MAX_TOKENS", 2)
    create(runner, token("a"), token("b"))
    with pytest.raises(Conflict, match="limit of 2 tokens reached"):
        create(runner, token("c"))


@pytest.mark.parametrize("id, digest", [("abc", "e" * 64), ("xyz", DIGEST), ("xyz", "0" * 64)])
def test_unknown_token_and_wrong_secret_give_the_same_error(runner, id, digest):
    create(runner)
    with pytest.raises(TokenRefused) as refused:
        enrolment.check_token(runner.ledger, TokenId(id), digest)
    assert refused.value.message == "unknown token or wrong secret"


def test_bound_token_lets_its_cluster_in_at_once(runner):
    create(runner, token(name="berlin"))
    is_approved, member = join(runner, applicant())
    assert is_approved
    assert (member.status, member.key, member.pending_key) == (MembershipStatus.APPROVED, "k1", "")
    assert (member.token, member.decided_by) == (ID, "alice")
    assert member.certificate == certificate(runner)
    assert uses_left(runner) == 0


def test_unbound_token_lets_in_at_once_only_who_is_expected(runner):
    create(runner, token(uses=2))
    assert join(runner, applicant("edge-1"))[0]
    is_approved, member = join(runner, applicant("berlin"))
    assert not is_approved
    assert (member.status, member.pending_key, member.key) == (MembershipStatus.PENDING, "k1", "")
    assert member.certificate is None


def test_person_is_expected_by_name_alone_whatever_the_pattern(runner):
    create(runner, token("a", Role.ADMIN), token("b", Role.VIEWER, name="victor"))
    assert not join(runner, applicant("edge-1", role=Role.ADMIN), "a")[0]
    assert join(runner, applicant("victor", role=Role.VIEWER), "b")[0]


def test_name_with_brackets_matches_itself(runner):
    policy = JoinPolicy(allow=("lab[1]", "edge-*"), auto_approve=("lab[1]",))
    create(runner, token(uses=2), policy=policy)
    assert join(runner, applicant("lab[1]"), policy=policy)[0]
    with pytest.raises(Forbidden, match="cluster 'lab' is not allowed to join"):
        join(runner, applicant("lab"), policy=policy)


def test_list_of_clusters_that_may_join_does_not_speak_of_people(runner):
    policy = JoinPolicy(allow=("edge-*",))
    create(runner, token("a", Role.ADMIN, name="alice"), token("b"), policy=policy)
    assert join(runner, applicant("alice", role=Role.ADMIN), "a", policy)[0]
    with pytest.raises(Forbidden, match="cluster 'berlin' is not allowed to join"):
        join(runner, applicant(), "b", policy)


@pytest.mark.parametrize(
    "made, who, why",
    [
        (token(name="paris"), applicant(), "is bound to 'paris'"),
        (token(role=Role.VIEWER), applicant(), "is for role viewer, not for role cluster"),
        (token(), applicant(role=Role.ADMIN), "is for role cluster, not for role admin"),
        (token(ttl=make.NO_TIME), applicant(), "expired at 2026-01-01T12:00:00Z"),
        (token(uses=0), applicant(), "has no uses left"),
    ],
    ids=["bound", "other-role", "higher-role", "expired", "used"],
)
def test_token_that_is_over_or_for_another_is_refused_and_changes_nothing(runner, made, who, why):
    create(runner, made)
    before = make.state(runner.ledger)
    with pytest.raises(TokenRefused, match=why):
        join(runner, who)
    assert make.state(runner.ledger) == before


def test_cluster_with_a_certificate_from_elsewhere_has_its_name_already(runner):
    """It never joined, but it advertises: a token alone must not give its name to another."""
    runner.advertise("edge-1")
    create(runner, token("a"), token("b", name="edge-1"))
    assert not join(runner, applicant("edge-1"), "a")[0]
    reject(runner, "edge-1")
    assert not join(runner, applicant("edge-1"), "b")[0]


def test_lost_answer_is_given_again_without_another_use(runner):
    create(runner, token(name="berlin", uses=2))
    join(runner, applicant())
    runner.pass_time(2 * make.HOUR)  # the token has expired by now
    is_approved, member = join(runner, applicant())
    assert is_approved
    assert uses_left(runner) == 1
    assert member.certificate == certificate(runner)


def test_waiting_one_asks_again_until_it_is_accepted(runner):
    create(runner)
    join(runner, applicant())
    revision = runner.ledger.revision
    assert not join(runner, applicant())[0]
    assert runner.ledger.revision == revision
    assert accept(runner).status is MembershipStatus.APPROVED
    revision = runner.ledger.revision
    assert accept(runner).status is MembershipStatus.APPROVED
    assert runner.ledger.revision == revision
    runner.pass_time(2 * make.HOUR)
    is_approved, member = join(runner, applicant())
    assert is_approved
    assert member.certificate is not None
    assert uses_left(runner) == 0


@pytest.mark.parametrize("keep_old", [False, True])
def test_name_that_is_taken_waits_for_an_administrator_who_may_keep_the_old_certificates(
    runner, keep_old
):
    create(runner, token("a", name="berlin"), token("b", name="berlin"))
    join(runner, applicant(key="k1"), "a")
    runner.pass_time(make.MINUTE)
    is_approved, member = join(runner, applicant(key="k2"), "b")
    assert not is_approved
    assert (member.status, member.key, member.pending_key) == (
        MembershipStatus.APPROVED,
        "k1",
        "k2",
    )
    with pytest.raises(Conflict, match="another key has requested"):
        accept(runner, key="k1")
    member = accept(runner, keep_old=keep_old)
    assert (member.status, member.key, member.pending_key) == (MembershipStatus.APPROVED, "k2", "")
    assert (member.decided_by, member.reason) == ("alice", "")
    assert join(runner, applicant(key="k2"), "b")[0]
    check(runner, runner.now, "berlin")
    with nullcontext() if keep_old else pytest.raises(Revoked):
        check(runner, make.T0, "berlin")


def test_same_key_with_another_token_needs_no_administrator(runner):
    create(runner, token("a", name="berlin"), token("b", name="berlin"))
    join(runner, applicant(), "a")
    assert join(runner, applicant(), "b")[0]
    assert uses_left(runner, "b") == 0


def test_second_key_cannot_push_in_before_one_that_waits(runner):
    create(runner, token("a"), token("b"))
    join(runner, applicant(key="k1"), "a")
    problem = "another key has already requested to join as cluster berlin"
    with pytest.raises(Conflict, match=problem):
        join(runner, applicant(key="k2"), "b")
    assert uses_left(runner, "b") == 1
    with pytest.raises(Conflict, match="another key has requested"):
        accept(runner, key="k2")


def test_token_of_another_does_not_fetch_what_was_accepted(runner):
    create(runner, token("a"), token("b", ttl=make.MOMENT))
    join(runner, applicant(), "a")
    accept(runner)
    runner.pass_time(make.SECOND)
    with pytest.raises(TokenRefused, match="expired at"):
        join(runner, applicant(), "b")


def test_nobody_is_accepted_who_never_asked(runner):
    with pytest.raises(NotFound, match="no cluster 'berlin' has joined"):
        accept(runner)


def test_rejected_applicant_is_deleted_and_its_token_is_used(runner):
    create(runner)
    join(runner, applicant())
    reject(runner)
    assert not runner.ledger.member_index.members
    with pytest.raises(TokenRefused, match="has no uses left"):
        join(runner, applicant())


def test_rejecting_another_key_leaves_the_member_in(runner):
    create(runner, token("a", name="berlin"), token("b"))
    join(runner, applicant(key="k1"), "a")
    join(runner, applicant(key="k2"), "b")
    reject(runner)
    member = runner.ledger.member_index.member(Role.CLUSTER, "berlin")
    assert (member.status, member.key, member.pending_key) == (MembershipStatus.APPROVED, "k1", "")
    with pytest.raises(NotFound, match="has no pending join request"):
        reject(runner)


def test_renewal_writes_the_newest_certificate_and_key(runner):
    create(runner, token(name="berlin"))
    join(runner, applicant())
    runner.pass_time(make.MINUTE)
    member = certify(runner, "berlin", "k2")
    assert (member.key, member.certificate) == ("k2", certificate(runner))
    create(runner, token("later", name="berlin"))
    assert not join(runner, applicant(), "later")[0]


def test_last_end_is_not_forgotten_when_lifetimes_become_shorter(runner):
    certify(runner, "berlin", lifetime=10 * make.HOUR)
    member = certify(runner, "berlin", lifetime=make.HOUR)
    assert member.certified_until == runner.now + 10 * make.HOUR


def test_holder_of_a_certificate_from_elsewhere_becomes_a_member(runner):
    member = certify(runner, "berlin", "k2")
    assert member.status is MembershipStatus.APPROVED
    assert (member.decided_by, member.was_admitted) == ("its older certificate", False)
    member = accept(runner)
    assert (member.key, member.was_admitted, member.revoked_at) == ("k2", True, None)


def test_certificate_from_elsewhere_of_one_that_joins_is_not_forgotten(runner):
    until = runner.now + 5 * make.HOUR
    offer = make.advertisement("berlin")
    runner.run(commands.advertise(runner.ledger, offer, make.STALE_AFTER, runner.now, until))
    create(runner)
    join(runner, applicant())
    accept(runner)
    assert join(runner, applicant())[1].certified_until == until


def test_renewal_of_the_true_one_leaves_the_other_waiting(runner):
    create(runner)
    join(runner, applicant(key="k1"))
    member = certify(runner, "berlin", "k2")
    assert (member.status, member.key, member.pending_key) == (
        MembershipStatus.APPROVED,
        "k2",
        "k1",
    )


def test_revoked_one_renews_nothing(runner):
    certify(runner, "berlin", "k2")
    revoke(runner, "berlin")
    with pytest.raises(Revoked):
        certify(runner, "berlin", "k2")


def test_revoked_one_is_not_let_in_by_its_old_token_nor_by_a_new_one_alone(runner):
    create(runner, token("a", name="berlin", uses=2), token("b", name="berlin"))
    join(runner, applicant(), "a")
    revoke(runner, "berlin")
    is_approved, member = join(runner, applicant(), "a")
    assert not is_approved
    assert (member.status, member.pending_key) == (MembershipStatus.REVOKED, "k1")
    with pytest.raises(Conflict):
        join(runner, applicant(key="k2"), "b")


def test_accepted_return_keeps_the_moment_of_revocation_and_opens_the_cluster(runner):
    create(runner, token("a", name="berlin"), token("b"))
    join(runner, applicant(), "a")
    runner.advertise("berlin")
    revoke(runner, "berlin")
    assert runner.ledger.cluster(ClusterId("berlin")).cordon == "revoked: stolen"
    join(runner, applicant(key="k2"), "b")
    member = accept(runner)
    assert (member.status, member.revoked_at) == (MembershipStatus.APPROVED, runner.now)
    assert runner.ledger.cluster(ClusterId("berlin")).cordon is None


def test_cordon_of_an_administrator_outlives_revocation_and_return(runner):
    runner.advertise("berlin")
    runner.cordon("berlin", "new switch")
    revoke(runner, "berlin")
    accept(runner)
    assert runner.ledger.cluster(ClusterId("berlin")).cordon == "new switch"


def test_revoked_one_can_be_accepted_without_asking_and_not_with_its_old_key(runner):
    """For certificates that another authority issues: what it shows from now on is believed."""
    create(runner, token("a", name="berlin"), token("b", name="berlin"))
    join(runner, applicant(), "a")
    revoke(runner, "berlin")
    member = accept(runner)
    assert (member.status, member.key) == (MembershipStatus.APPROVED, "")
    assert not join(runner, applicant(), "b")[0]


A = ClusterId("a")


@pytest.fixture
def lenders():
    return make.runner(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")


def test_certificates_of_a_revoked_one_are_refused_and_after_a_return_only_older_ones(lenders):
    revoke(lenders)
    for not_before in (lenders.now - make.HOUR, lenders.now, lenders.now + make.HOUR):
        with pytest.raises(Revoked, match="cluster a was revoked at 2026-01-01T12:00:00Z"):
            check(lenders, not_before)
    check(lenders, lenders.now, "b")  # another authority that the broker trusts may have issued it
    check(lenders, lenders.now, role=Role.ADMIN)
    accept(lenders, "a")
    check(lenders, lenders.now)
    with pytest.raises(Revoked):
        check(lenders, lenders.now - make.MOMENT)


def test_certificate_of_a_return_within_one_second_is_revoked_too(lenders):
    """It starts on the next whole second, which may be later than the second revocation."""

    def come_back():
        accept(lenders, "a")
        certify(lenders)

    revoke(lenders)
    come_back()
    assert revoke(lenders).member.revoked_at == lenders.now + make.SECOND
    come_back()
    with pytest.raises(Revoked):
        check(lenders, lenders.now + 0.999 * make.SECOND)
    check(lenders, lenders.now + make.SECOND)


def test_kept_reservations_stay_and_nothing_new_is_placed_there(lenders):
    borrowed = lenders.reserve("cpu=1,memory=1Gi", requester="a")
    lent = lenders.reserve("cpu=1,memory=1Gi", requester="b")
    waits = lenders.reserve("cpu=9,memory=1Gi", requester="a", wait=make.HOUR)
    done = revoke(lenders)
    assert lenders.target(borrowed) == "b"
    assert lenders.target(lent) == "a"
    assert lenders[waits].phase == "Released"
    assert (done.released, done.drained) == ([waits], [])
    assert lenders.ledger.cluster(A).cordon == "revoked: stolen"
    explanation = lenders.refused("cpu=1,memory=1Gi", requester="b")
    assert explanation == "0/2 clusters fit: 1 Cordoned, 1 IsRequester"


def test_released_reservations_give_back_and_move(lenders):
    lenders.advertise("c")
    borrowed = lenders.reserve("cpu=1,memory=1Gi", requester="a", pinned="b")
    lent = lenders.reserve("cpu=1,memory=1Gi", requester="b", pinned="a")
    free = lenders.reserve("cpu=3,memory=1Gi", requester="c", pinned="a")
    done = revoke(lenders, release=True)
    assert (lenders[borrowed].phase, lenders[borrowed].reason) == ("Released", "ReleasedByAdmin")
    assert lenders[borrowed].message == "Requester a was revoked"
    assert lenders[lent].phase == "Released"  # it was for a alone
    assert lenders[free].phase == "Released"
    assert (done.released, done.drained) == ([borrowed], [lent, free])
    assert not lenders.reserved("a")


def test_what_a_revoked_one_lent_moves_to_others(lenders):
    lenders.advertise("c")
    lent = lenders.reserve("cpu=4,memory=1Gi", requester="b")
    assert lenders.target(lent) == "a"
    revoke(lenders, release=True)
    assert lenders.target(lent) == "c"


def test_release_may_follow_later(lenders):
    borrowed = lenders.reserve("cpu=1,memory=1Gi", requester="a")
    at = revoke(lenders).member.revoked_at
    lenders.pass_time(make.MINUTE)
    assert revoke(lenders, release=True).released == [borrowed]
    assert lenders.ledger.member_index.member(Role.CLUSTER, "a").revoked_at == at


def test_one_that_nobody_has_seen_is_refused_should_it_come(lenders):
    done = revoke(lenders, "nobody")
    assert not done.was_known
    with pytest.raises(Revoked):
        check(lenders, lenders.now, "nobody")
    assert revoke(lenders, "a").was_known


def test_person_of_a_clusters_name_leaves_the_cluster_alone(lenders):
    revoke(lenders, "a", Role.VIEWER)
    assert lenders.ledger.cluster(A).cordon is None
    check(lenders, lenders.now)


def test_revoking_one_who_asks_to_return_refuses_it(lenders):
    revoke(lenders)
    create(lenders, token(name="a"))
    assert join(lenders, applicant("a", "k2"))[1].pending_key == "k2"
    assert revoke(lenders).member.pending_key == ""


def test_removed_member_stays_refused_until_its_last_certificate_has_ended(lenders):
    certify(lenders)
    left = remove(lenders).member
    assert left is not None
    assert (left.status, left.forget_at) == (MembershipStatus.REVOKED, lenders.now + make.HOUR)
    assert A not in lenders.ledger.clusters
    with pytest.raises(Revoked):
        check(lenders, lenders.now)
    lenders.pass_time(make.HOUR - make.MOMENT)
    collect(lenders)
    assert lenders.ledger.member_index.members
    lenders.pass_time(make.MOMENT)
    collect(lenders)
    assert not lenders.ledger.member_index.members


def test_certificate_that_a_cluster_advertised_with_counts_too(lenders):
    until = lenders.now + 5 * make.HOUR
    certify(lenders, "c")
    offer = make.advertisement("c")
    lenders.run(commands.advertise(lenders.ledger, offer, make.STALE_AFTER, lenders.now, until))
    assert remove(lenders, "c").member.forget_at == until
    assert remove(lenders, "c").member.forget_at == until  # though its cluster is gone by now


@pytest.mark.parametrize("role", [Role.CLUSTER, Role.ADMIN])
def test_certificate_that_was_shown_for_a_newer_one_counts_too(lenders, role):
    until = lenders.now + 5 * make.HOUR
    certify(lenders, role=role, shown_until=until)
    assert remove(lenders, role=role).member.forget_at == until


@pytest.mark.parametrize("case", ["revoked", "came back", "never seen"])
def test_one_that_was_revoked_is_never_forgotten(lenders, case):
    """It may hold a certificate that nobody has seen here, which ends later than all others."""
    name = "nobody" if case == "never seen" else "a"
    if case != "never seen":
        certify(lenders)
    revoke(lenders, name)
    if case == "came back":
        accept(lenders, name)
    assert remove(lenders, name).member.forget_at is None
    lenders.pass_time(1000 * make.HOUR)
    collect(lenders)
    assert remove(lenders, name).member is not None
    with pytest.raises(Revoked):
        check(lenders, make.T0, name)


def test_revoking_a_removed_one_keeps_it_out_for_good(lenders):
    certify(lenders)
    remove(lenders)
    assert revoke(lenders).member.forget_at is None


def test_cluster_that_lends_is_not_removed_and_stays_a_member(lenders):
    certify(lenders)
    lenders.reserve("cpu=1,memory=1Gi", requester="b")
    with pytest.raises(Conflict, match="a still lends 1 reservation"):
        remove(lenders)
    check(lenders, lenders.now)


def test_cluster_without_membership_is_forgotten(lenders):
    assert remove(lenders).member is None
    assert A not in lenders.ledger.clusters


def test_nobody_is_removed_who_is_not_known(lenders):
    with pytest.raises(NotFound, match="no viewer 'a' exists"):
        remove(lenders, role=Role.VIEWER)


def make_token(lenders, id, by):
    create(lenders, replace(token(id, Role.ADMIN, name=id), created_by=by))


@pytest.mark.parametrize("put_out", [revoke, remove])
def test_administrator_leaves_no_token_behind_and_who_it_admitted_is_reported(lenders, put_out):
    certify(lenders, "mallory", role=Role.ADMIN)
    for name, by in (("t1", "mallory"), ("t2", "mallory"), ("t3", "alice")):
        make_token(lenders, name, by)
    join(lenders, applicant("t1", role=Role.ADMIN), "t1")
    done = put_out(lenders, "mallory", Role.ADMIN)
    assert done.admin_actions == (("t1", "t2"), ("admin/t1",))
    assert set(lenders.ledger.member_index.tokens) == {"t3"}


def test_tokens_of_an_administrator_outlive_the_cluster_of_its_name(lenders):
    make_token(lenders, "t1", "a")
    assert revoke(lenders, "a").admin_actions == ((), ())
    assert revoke(lenders, "a", Role.VIEWER).admin_actions == ((), ())
    assert set(lenders.ledger.member_index.tokens) == {"t1"}


def test_expired_tokens_are_listed_for_a_day_and_while_somebody_waits(lenders):
    create(lenders, token("t1"), token("t2"))
    join(lenders, applicant("new"), "t2")
    lenders.pass_time(25 * make.HOUR - make.MOMENT)
    collect(lenders)
    assert set(lenders.ledger.member_index.tokens) == {"t1", "t2"}
    lenders.pass_time(make.MOMENT)
    collect(lenders)
    assert set(lenders.ledger.member_index.tokens) == {"t2"}
