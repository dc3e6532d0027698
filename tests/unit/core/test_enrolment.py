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


def test_tokens_are_few_created_once_for_who_may_join_and_deleted(runner, monkeypatch):
    create(runner)
    for made, problem in (
        (token(), "token abc already exists"),
        (token("b", Role.PROXY), "role proxy cannot join"),
        (token("b", name="berlin"), "cluster 'berlin' is not allowed to join"),
    ):
        with pytest.raises((Conflict, Forbidden), match=problem):
            create(runner, made, policy=JoinPolicy(allow=("edge-*",)))
    monkeypatch.setattr(enrolment, "MAX_TOKENS", 1)
    with pytest.raises(Conflict, match="limit of 1 tokens reached"):
        create(runner, token("b"))
    runner.run(enrolment.delete_token(runner.ledger, ID, runner.now))
    assert not runner.ledger.member_index.tokens
    with pytest.raises(NotFound, match="no token 'abc'"):
        runner.run(enrolment.delete_token(runner.ledger, ID, runner.now))


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
    """A person is expected by name alone, whatever the patterns, which are for clusters."""
    create(runner, token(uses=2), token("a", Role.ADMIN), token("v", Role.VIEWER, name="victor"))
    assert join(runner, applicant("edge-1"))[0]
    is_approved, member = join(runner, applicant("berlin"))
    assert not is_approved
    assert (member.status, member.pending_key, member.key) == (MembershipStatus.PENDING, "k1", "")
    assert member.certificate is None
    assert not join(runner, applicant("edge-1", role=Role.ADMIN), "a")[0]
    allows_edge = replace(POLICY, allow=("edge-*",))
    assert join(runner, applicant("victor", role=Role.VIEWER), "v", allows_edge)[0]


def test_name_with_brackets_matches_itself(runner):
    policy = JoinPolicy(allow=("lab[1]", "edge-*"), auto_approve=("lab[1]",))
    create(runner, token(uses=2), policy=policy)
    assert join(runner, applicant("lab[1]"), policy=policy)[0]
    with pytest.raises(Forbidden, match="cluster 'lab' is not allowed to join"):
        join(runner, applicant("lab"), policy=policy)


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
    with pytest.raises(NotFound, match="no cluster 'berlin' has joined"):
        accept(runner)
    create(runner, token(), token("b", ttl=make.RETENTION), token("over", name="berlin"))
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
    with pytest.raises(TokenRefused, match="expired at"):
        join(runner, applicant(), "over")
    assert join(runner, applicant(), "b")[0], "the same key with another token"
    assert uses_left(runner, "b") == 0


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


def test_second_key_cannot_push_in_before_one_that_waits(runner):
    create(runner, token("a"), token("b"))
    join(runner, applicant(key="k1"), "a")
    problem = "another key has already requested to join as cluster berlin"
    with pytest.raises(Conflict, match=problem):
        join(runner, applicant(key="k2"), "b")
    assert uses_left(runner, "b") == 1
    with pytest.raises(Conflict, match="another key has requested"):
        accept(runner, key="k2")


def test_rejected_applicant_is_deleted_and_its_token_is_used(runner):
    create(runner, token(), token("a", name="berlin"), token("b"))
    join(runner, applicant())
    reject(runner)
    assert not runner.ledger.member_index.members
    with pytest.raises(TokenRefused, match="has no uses left"):
        join(runner, applicant())
    join(runner, applicant(key="k1"), "a")
    join(runner, applicant(key="k2"), "b")
    reject(runner)
    member = runner.ledger.member_index.member(Role.CLUSTER, "berlin")
    assert (member.status, member.key, member.pending_key) == (MembershipStatus.APPROVED, "k1", "")
    with pytest.raises(NotFound, match="has no pending join request"):
        reject(runner)


def test_renewal_writes_the_newest_certificate_and_key_until_it_is_revoked(runner):
    create(runner, token(name="berlin"))
    join(runner, applicant())
    certify(runner, "berlin", lifetime=10 * make.HOUR)
    until = runner.now + 10 * make.HOUR
    runner.pass_time(make.MINUTE)
    member = certify(runner, "berlin", "k2")
    assert (member.key, member.certificate) == ("k2", certificate(runner))
    assert member.certified_until == until, "the last end, though lifetimes have become shorter"
    create(runner, token("later", name="berlin"))
    assert not join(runner, applicant(), "later")[0]
    revoke(runner, "berlin")
    with pytest.raises(Revoked):
        certify(runner, "berlin", "k2")


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


def test_revoked_one_is_not_let_in_by_its_old_token_nor_by_a_new_one_alone(runner):
    """But without asking: what it shows from then on is believed, as another authority may issue it."""
    create(runner, token("a", name="berlin", uses=2), token("b", name="berlin"))
    join(runner, applicant(), "a")
    revoke(runner, "berlin")
    is_approved, member = join(runner, applicant(), "a")
    assert not is_approved
    assert (member.status, member.pending_key) == (MembershipStatus.REVOKED, "k1")
    with pytest.raises(Conflict):
        join(runner, applicant(key="k2"), "b")
    reject(runner)
    member = accept(runner)
    assert (member.status, member.key) == (MembershipStatus.APPROVED, "")
    assert not join(runner, applicant(), "b")[0], "not with its old key"


@pytest.mark.parametrize("cordon", [None, "new switch"])
def test_accepted_return_keeps_the_moment_of_revocation_and_opens_the_cluster(runner, cordon):
    """Unless an administrator has cordoned it."""
    create(runner, token("a", name="berlin"), token("b"))
    join(runner, applicant(), "a")
    runner.advertise("berlin")
    if cordon:
        runner.cordon("berlin", cordon)
    revoke(runner, "berlin")
    cluster = ClusterId("berlin")
    assert runner.ledger.cluster(cluster).cordon == (cordon or "revoked: stolen")
    join(runner, applicant(key="k2"), "b")
    member = accept(runner)
    assert (member.status, member.revoked_at) == (MembershipStatus.APPROVED, runner.now)
    assert runner.ledger.cluster(cluster).cordon == cordon


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
    create(lenders, token(name="a"))
    assert join(lenders, applicant("a", "k2"))[1].pending_key == "k2"
    assert revoke(lenders).member.pending_key == "", "its wish to return is refused"
    accept(lenders, "a")
    check(lenders, lenders.now)
    with pytest.raises(Revoked):
        check(lenders, lenders.now - make.MOMENT)
    revoke(lenders, "b", Role.VIEWER)  # a person of a cluster's name
    assert lenders.ledger.cluster(ClusterId("b")).cordon is None
    check(lenders, lenders.now, "b")


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


def test_released_reservations_give_back_and_move_also_later(lenders):
    lenders.advertise("c")
    borrowed = lenders.reserve("cpu=1,memory=1Gi", requester="a", pinned="b")
    pinned = lenders.reserve("cpu=1,memory=1Gi", requester="b", pinned="a")
    moves = lenders.reserve("cpu=3,memory=1Gi", requester="b", excluded="c")
    lenders.advertise("d")
    at = revoke(lenders).member.revoked_at
    lenders.pass_time(make.MINUTE)
    done = revoke(lenders, release=True)
    assert (lenders[borrowed].phase, lenders[borrowed].reason) == ("Released", "ReleasedByAdmin")
    assert lenders[borrowed].message == "Requester a was revoked"
    assert lenders[pinned].phase == "Released"
    assert lenders.target(moves) == "d"
    assert (done.released, done.drained) == ([borrowed], [pinned, moves])
    assert not lenders.reserved("a")
    assert lenders.ledger.member_index.member(Role.CLUSTER, "a").revoked_at == at


def test_removed_member_stays_refused_until_its_last_certificate_has_ended(lenders):
    certify(lenders)
    certify(lenders, "b")
    left = remove(lenders).member
    assert left is not None
    assert (left.status, left.forget_at) == (MembershipStatus.REVOKED, lenders.now + make.HOUR)
    assert A not in lenders.ledger.clusters
    with pytest.raises(Revoked):
        check(lenders, lenders.now)
    remove(lenders, "b")
    assert revoke(lenders, "b").member.forget_at is None, "for good"
    lenders.pass_time(make.HOUR - make.MOMENT)
    collect(lenders)
    assert {one.name for one in lenders.ledger.member_index.members.values()} == {"a", "b"}
    lenders.pass_time(make.MOMENT)
    collect(lenders)
    assert {one.name for one in lenders.ledger.member_index.members.values()} == {"b"}


@pytest.mark.parametrize("role", [Role.CLUSTER, Role.ADMIN])
def test_certificate_that_was_shown_for_a_newer_one_or_to_advertise_counts_too(lenders, role):
    until = lenders.now + 5 * make.HOUR
    certify(lenders, role=role, shown_until=until)
    assert remove(lenders, role=role).member.forget_at == until
    certify(lenders, "c")
    offer = make.advertisement("c")
    lenders.run(commands.advertise(lenders.ledger, offer, make.STALE_AFTER, lenders.now, until))
    for _ in range(2):  # the second time its cluster is gone
        assert remove(lenders, "c").member.forget_at == until


@pytest.mark.parametrize("case", ["revoked", "came back", "never seen"])
def test_one_that_was_revoked_is_never_forgotten(lenders, case):
    """It may hold a certificate that nobody has seen here, which ends later than all others."""
    name = "nobody" if case == "never seen" else "a"
    if case != "never seen":
        certify(lenders)
    assert revoke(lenders, name).was_known == (case != "never seen")
    if case == "came back":
        accept(lenders, name)
    assert remove(lenders, name).member.forget_at is None
    lenders.pass_time(1000 * make.HOUR)
    collect(lenders)
    assert remove(lenders, name).member is not None
    with pytest.raises(Revoked):
        check(lenders, make.T0, name)


def test_cluster_that_lends_is_not_removed_and_stays_a_member(lenders):
    certify(lenders)
    lenders.reserve("cpu=1,memory=1Gi", requester="b")
    with pytest.raises(Conflict, match="a still lends 1 reservation"):
        remove(lenders)
    check(lenders, lenders.now)


def test_cluster_without_membership_is_forgotten_and_nobody_else_removed(lenders):
    assert remove(lenders).member is None
    assert A not in lenders.ledger.clusters
    with pytest.raises(NotFound, match="no viewer 'a' exists"):
        remove(lenders, role=Role.VIEWER)


@pytest.mark.parametrize("put_out", [revoke, remove])
def test_administrator_leaves_no_token_behind_and_who_it_admitted_is_reported(lenders, put_out):
    certify(lenders, "mallory", role=Role.ADMIN)
    for name, by in (("t1", "mallory"), ("t2", "mallory"), ("t3", "a")):
        create(lenders, replace(token(name, Role.ADMIN, name=name), created_by=by))
    join(lenders, applicant("t1", role=Role.ADMIN), "t1")
    done = put_out(lenders, "mallory", Role.ADMIN)
    assert done.admin_actions == (("t1", "t2"), ("admin/t1",))
    assert set(lenders.ledger.member_index.tokens) == {"t3"}
    for role in (Role.CLUSTER, Role.VIEWER):  # of the name of the administrator who made it
        assert revoke(lenders, "a", role).admin_actions == ((), ())


def test_expired_tokens_are_listed_for_a_day_and_while_somebody_waits(lenders):
    create(lenders, token("t1"), token("t2"))
    join(lenders, applicant("new"), "t2")
    lenders.pass_time(25 * make.HOUR - make.MOMENT)
    collect(lenders)
    assert set(lenders.ledger.member_index.tokens) == {"t1", "t2"}
    lenders.pass_time(make.MOMENT)
    collect(lenders)
    assert set(lenders.ledger.member_index.tokens) == {"t2"}
