"""Who is let in with a token, who waits, and who is refused; and that a lost answer costs nothing."""

import pytest

import make
from kubelend.core import commands, enrolment
from kubelend.core.enrolment import Applicant, JoinPolicy
from kubelend.core.errors import Conflict, Forbidden, NotFound, Revoked, TokenRefused
from kubelend.core.lifecycle import Role
from kubelend.core.members import Certificate, MembershipStatus, Token, TokenId
from kubelend.core.models import ClusterId

DIGEST = "d" * 64
POLICY = JoinPolicy(auto_accept=("edge-*",))
ID = TokenId("abc")


def token(id="abc", role=Role.CLUSTER, ttl=make.HOUR, uses=1, name=""):
    return Token(TokenId(id), DIGEST, role, make.T0, "alice", make.T0 + ttl, uses, name)


def applicant(name="berlin", key="k1", role=Role.CLUSTER):
    return Applicant(role, name, key)


def certificate(desk, lifetime=make.HOUR):
    return Certificate("01", desk.now, desk.now + lifetime, "sha256:ca")


@pytest.fixture
def desk():
    return make.desk()


def create(desk, *tokens, policy=POLICY):
    for one in tokens or (token(),):
        desk.run(enrolment.create_token(desk.ledger, one, policy, desk.now))


def join(desk, who, id="abc", policy=POLICY):
    """As the broker does it: checks, decides, issues and records."""
    shown = enrolment.check_token(desk.ledger, TokenId(id), DIGEST)
    decision = enrolment.decide_join(desk.ledger, who, shown, policy, desk.now)
    issued = certificate(desk) if decision.is_accepted else None
    member = desk.run(enrolment.join_member(desk.ledger, decision, issued, desk.now))
    return decision.is_accepted, member


def accept(desk, name="berlin", key="", role=Role.CLUSTER, *, keep_old=False):
    return desk.run(
        enrolment.accept_member(desk.ledger, role, name, key, "alice", desk.now, keep_old=keep_old)
    )


def revoke(desk, name="berlin"):
    return desk.run(
        enrolment.revoke_member(
            desk.ledger, Role.CLUSTER, name, reason="", by="alice", release=False, now=desk.now
        )
    )


def uses_left(desk, id="abc"):
    return desk.ledger.member_index.tokens[TokenId(id)].uses_left


# -- tokens


def test_token_is_created_once_and_deleted(desk):
    create(desk)
    with pytest.raises(Conflict, match="token abc already exists"):
        create(desk)
    desk.run(enrolment.delete_token(desk.ledger, ID, desk.now))
    assert not desk.ledger.member_index.tokens
    with pytest.raises(NotFound, match="no token 'abc'"):
        desk.run(enrolment.delete_token(desk.ledger, ID, desk.now))


def test_no_token_is_for_a_proxy_nor_for_a_cluster_that_may_not_join(desk):
    with pytest.raises(Forbidden, match="role proxy cannot join"):
        create(desk, token(role=Role.PROXY))
    with pytest.raises(Forbidden, match="cluster 'berlin' is not allowed to join"):
        create(desk, token(name="berlin"), policy=JoinPolicy(allow=("edge-*",)))


def test_tokens_are_not_without_number(desk, monkeypatch):
    monkeypatch.setattr(enrolment, "MAX_TOKENS", 2)
    create(desk, token("a"), token("b"))
    with pytest.raises(Conflict, match="limit of 2 tokens reached"):
        create(desk, token("c"))


@pytest.mark.parametrize("id, digest", [("abc", "e" * 64), ("xyz", DIGEST), ("xyz", "0" * 64)])
def test_unknown_token_and_wrong_secret_give_the_same_error(desk, id, digest):
    create(desk)
    with pytest.raises(TokenRefused) as refused:
        enrolment.check_token(desk.ledger, TokenId(id), digest)
    assert refused.value.message == "unknown token or wrong secret"


# -- judging


def test_bound_token_lets_its_cluster_in_at_once(desk):
    create(desk, token(name="berlin"))
    is_accepted, member = join(desk, applicant())
    assert is_accepted
    assert (member.standing, member.key, member.asks) == (MembershipStatus.ACCEPTED, "k1", "")
    assert (member.token, member.decided_by) == (ID, "alice")
    assert member.certificate == certificate(desk)
    assert uses_left(desk) == 0


def test_unbound_token_lets_in_at_once_only_who_is_expected(desk):
    create(desk, token(uses=2))
    assert join(desk, applicant("edge-1"))[0]
    is_accepted, member = join(desk, applicant("berlin"))
    assert not is_accepted
    assert (member.standing, member.asks, member.key) == (MembershipStatus.PENDING, "k1", "")
    assert member.certificate is None


def test_person_is_expected_by_name_alone_whatever_the_pattern(desk):
    create(desk, token("a", Role.ADMIN), token("b", Role.VIEWER, name="victor"))
    assert not join(desk, applicant("edge-1", role=Role.ADMIN), "a")[0]
    assert join(desk, applicant("victor", role=Role.VIEWER), "b")[0]


def test_name_with_brackets_matches_itself(desk):
    policy = JoinPolicy(allow=("lab[1]", "edge-*"), auto_accept=("lab[1]",))
    create(desk, token(uses=2), policy=policy)
    assert join(desk, applicant("lab[1]"), policy=policy)[0]
    with pytest.raises(Forbidden, match="cluster 'lab' is not allowed to join"):
        join(desk, applicant("lab"), policy=policy)


def test_list_of_clusters_that_may_join_does_not_speak_of_people(desk):
    policy = JoinPolicy(allow=("edge-*",))
    create(desk, token("a", Role.ADMIN, name="alice"), token("b"), policy=policy)
    assert join(desk, applicant("alice", role=Role.ADMIN), "a", policy)[0]
    with pytest.raises(Forbidden, match="cluster 'berlin' is not allowed to join"):
        join(desk, applicant(), "b", policy)


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
def test_token_that_is_over_or_for_another_is_refused_and_changes_nothing(desk, made, who, why):
    create(desk, made)
    before = make.state(desk.ledger)
    with pytest.raises(TokenRefused, match=why):
        join(desk, who)
    assert make.state(desk.ledger) == before


def test_cluster_with_a_certificate_from_elsewhere_has_its_name_already(desk):
    """It never joined, but it advertises: a token alone must not give its name to another."""
    desk.advertise("edge-1")
    create(desk, token("a"), token("b", name="edge-1"))
    assert not join(desk, applicant("edge-1"), "a")[0]
    desk.run(enrolment.reject_join(desk.ledger, Role.CLUSTER, "edge-1", desk.now))
    assert not join(desk, applicant("edge-1"), "b")[0]


# -- asking again


def test_lost_answer_is_given_again_without_another_use(desk):
    create(desk, token(name="berlin", uses=2))
    join(desk, applicant())
    desk.pass_time(2 * make.HOUR)  # the token has expired by now
    is_accepted, member = join(desk, applicant())
    assert is_accepted
    assert uses_left(desk) == 1
    assert member.certificate == certificate(desk)


def test_waiting_one_asks_again_until_it_is_accepted(desk):
    create(desk)
    join(desk, applicant())
    revision = desk.ledger.revision
    assert not join(desk, applicant())[0]
    assert desk.ledger.revision == revision
    assert accept(desk).standing is MembershipStatus.ACCEPTED
    desk.pass_time(2 * make.HOUR)
    is_accepted, member = join(desk, applicant())
    assert is_accepted
    assert member.certificate is not None
    assert uses_left(desk) == 0


def test_name_that_is_taken_waits_for_an_administrator(desk):
    create(desk, token("a", name="berlin"), token("b", name="berlin"))
    join(desk, applicant(key="k1"), "a")
    is_accepted, member = join(desk, applicant(key="k2"), "b")
    assert not is_accepted
    assert (member.standing, member.key, member.asks) == (MembershipStatus.ACCEPTED, "k1", "k2")
    assert accept(desk, key="k2").key == "k2"
    assert join(desk, applicant(key="k2"), "b")[0]


@pytest.mark.parametrize("keep_old", [False, True])
def test_certificates_of_a_key_that_was_replaced_are_refused_unless_they_are_kept(desk, keep_old):
    create(desk, token("a", name="berlin"), token("b", name="berlin"))
    join(desk, applicant(key="k1"), "a")
    desk.pass_time(make.MINUTE)
    join(desk, applicant(key="k2"), "b")
    with pytest.raises(Conflict, match="another key has requested"):
        accept(desk, key="k1")
    member = accept(desk, keep_old=keep_old)
    assert (member.standing, member.key, member.asks) == (MembershipStatus.ACCEPTED, "k2", "")
    assert (member.decided_by, member.reason) == ("alice", "")
    registry = desk.ledger.member_index
    registry.check_not_revoked(Role.CLUSTER, "berlin", desk.now)
    if keep_old:
        registry.check_not_revoked(Role.CLUSTER, "berlin", make.T0)
    else:
        with pytest.raises(Revoked):
            registry.check_not_revoked(Role.CLUSTER, "berlin", make.T0)


def test_same_key_with_another_token_needs_no_administrator(desk):
    create(desk, token("a", name="berlin"), token("b", name="berlin"))
    join(desk, applicant(), "a")
    assert join(desk, applicant(), "b")[0]
    assert uses_left(desk, "b") == 0


def test_second_key_cannot_push_in_before_one_that_waits(desk):
    create(desk, token("a"), token("b"))
    join(desk, applicant(key="k1"), "a")
    with pytest.raises(
        Conflict, match="another key has already requested to join as cluster berlin"
    ):
        join(desk, applicant(key="k2"), "b")
    assert uses_left(desk, "b") == 1
    with pytest.raises(Conflict, match="another key has requested"):
        accept(desk, key="k2")


def test_token_of_another_does_not_fetch_what_was_accepted(desk):
    create(desk, token("a"), token("b", ttl=make.MOMENT))
    join(desk, applicant(), "a")
    accept(desk)
    desk.pass_time(make.SECOND)
    with pytest.raises(TokenRefused, match="expired at"):
        join(desk, applicant(), "b")


# -- saying yes and no


def test_accepting_twice_changes_nothing(desk):
    create(desk)
    join(desk, applicant())
    accept(desk)
    revision = desk.ledger.revision
    assert accept(desk).standing is MembershipStatus.ACCEPTED
    assert desk.ledger.revision == revision


def test_nobody_is_accepted_who_never_asked(desk):
    with pytest.raises(NotFound, match="no cluster 'berlin' has joined"):
        accept(desk)


def test_rejected_newcomer_is_forgotten_and_its_token_is_used(desk):
    create(desk)
    join(desk, applicant())
    desk.run(enrolment.reject_join(desk.ledger, Role.CLUSTER, "berlin", desk.now))
    assert not desk.ledger.member_index.members
    with pytest.raises(TokenRefused, match="has no uses left"):
        join(desk, applicant())


def test_rejecting_another_key_leaves_the_member_in(desk):
    create(desk, token("a", name="berlin"), token("b"))
    join(desk, applicant(key="k1"), "a")
    join(desk, applicant(key="k2"), "b")
    desk.run(enrolment.reject_join(desk.ledger, Role.CLUSTER, "berlin", desk.now))
    member = desk.ledger.member_index.member(Role.CLUSTER, "berlin")
    assert (member.standing, member.key, member.asks) == (MembershipStatus.ACCEPTED, "k1", "")
    with pytest.raises(Conflict, match="has no pending join request"):
        desk.run(enrolment.reject_join(desk.ledger, Role.CLUSTER, "berlin", desk.now))


# -- renewal


def certify(desk, key="k2", lifetime=make.HOUR):
    issued = certificate(desk, lifetime)
    return desk.run(enrolment.issue_certificate(desk.ledger, applicant(key=key), issued, desk.now))


def test_renewal_writes_the_newest_certificate_and_key(desk):
    create(desk, token(name="berlin"))
    join(desk, applicant())
    desk.pass_time(make.MINUTE)
    member = certify(desk)
    assert (member.key, member.certificate) == ("k2", certificate(desk))
    assert not join_is_let_in(desk, key="k1")


def join_is_let_in(desk, key):
    create(desk, token("later", name="berlin"))
    return join(desk, applicant(key=key), "later")[0]


def test_last_end_is_not_forgotten_when_lifetimes_become_shorter(desk):
    certify(desk, lifetime=10 * make.HOUR)
    assert certify(desk, lifetime=make.HOUR).certified_until == desk.now + 10 * make.HOUR


def test_holder_of_a_certificate_from_elsewhere_becomes_a_member(desk):
    member = certify(desk)
    assert (member.standing, member.decided_by) == (
        MembershipStatus.ACCEPTED,
        "its older certificate",
    )
    assert not member.was_admitted
    member = accept(desk)
    assert (member.key, member.was_admitted, member.revoked_at) == ("k2", True, None)


def test_certificate_from_elsewhere_of_one_that_joins_is_not_forgotten(desk):
    until = desk.now + 5 * make.HOUR
    offer = make.advertisement("berlin")
    desk.run(commands.advertise(desk.ledger, offer, make.STALE_AFTER, desk.now, until))
    create(desk)
    join(desk, applicant())
    accept(desk)
    assert join(desk, applicant())[1].certified_until == until


def test_renewal_of_the_true_one_leaves_the_other_waiting(desk):
    create(desk)
    join(desk, applicant(key="k1"))
    member = certify(desk, key="k2")
    assert (member.standing, member.key, member.asks) == (MembershipStatus.ACCEPTED, "k2", "k1")


def test_revoked_one_renews_nothing(desk):
    certify(desk)
    revoke(desk)
    with pytest.raises(Revoked):
        certify(desk)


# -- coming back


def test_revoked_one_is_not_let_in_by_its_old_token_nor_by_a_new_one_alone(desk):
    create(desk, token("a", name="berlin", uses=2), token("b", name="berlin"))
    join(desk, applicant(), "a")
    revoke(desk)
    is_accepted, member = join(desk, applicant(), "a")
    assert not is_accepted
    assert (member.standing, member.asks) == (MembershipStatus.REVOKED, "k1")
    with pytest.raises(Conflict):
        join(desk, applicant(key="k2"), "b")


def test_accepted_return_keeps_the_moment_of_revocation_and_opens_the_cluster(desk):
    create(desk, token("a", name="berlin"), token("b"))
    join(desk, applicant(), "a")
    desk.advertise("berlin")
    revoke(desk)
    assert desk.ledger.cluster(ClusterId("berlin")).cordon == "revoked"
    join(desk, applicant(key="k2"), "b")
    member = accept(desk)
    assert (member.standing, member.revoked_at) == (MembershipStatus.ACCEPTED, desk.now)
    assert desk.ledger.cluster(ClusterId("berlin")).cordon is None


def test_cordon_of_an_administrator_outlives_revocation_and_return(desk):
    desk.advertise("berlin")
    desk.cordon("berlin", "new switch")
    revoke(desk)
    accept(desk)
    assert desk.ledger.cluster(ClusterId("berlin")).cordon == "new switch"


def test_revoked_one_can_be_accepted_without_asking_and_not_with_its_old_key(desk):
    """For certificates that another authority issues: what it shows from now on is believed."""
    create(desk, token("a", name="berlin"), token("b", name="berlin"))
    join(desk, applicant(), "a")
    revoke(desk)
    member = accept(desk)
    assert (member.standing, member.key) == (MembershipStatus.ACCEPTED, "")
    assert not join(desk, applicant(), "b")[0]
