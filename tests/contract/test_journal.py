"""The audit log and the few records beside the ledger, as every store has to keep them."""

import pytest

import make
from kubelend.core import audit_log
from kubelend.core.audit_log import CHAIN_START, Actor, AuditEntry
from kubelend.core.errors import StoreFailed
from kubelend.core.events import Archived, AuditLogTruncated, RecordDeleted
from kubelend.core.lending import LendingPolicy
from kubelend.core.lifecycle import Role
from kubelend.core.members import Certificate, Member, MembershipStatus, Token, TokenId
from kubelend.core.models import ClusterId, Limits, Quota, ReservationId
from shelves import KINDS, Shelf

MEMBER = Member(
    Role.CLUSTER,
    "b\u00e9rlin",
    MembershipStatus.REVOKED,
    make.T0,
    key="sha256:01",
    asks="sha256:02",
    token=TokenId("abc"),
    decided_at=make.T0,
    decided_by="alice",
    certificate=Certificate("1f", make.T0, make.T0 + make.HOUR, "sha256:00"),
    certified_until=make.T0 + make.HOUR,
    revoked_at=make.T0,
    reason="left",
    revision=3,
)
TOKEN = Token(TokenId("abc"), "d1", Role.VIEWER, make.T0, "alice", make.T0, 5, "paris", revision=4)
LIMITS = Limits(
    ClusterId("paris"),
    LendingPolicy(allow=("team-*",), max_lent={"gpu": 0}),
    Quota(amounts={"cpu": 1000}, reservations=3, budget=10**9, currency="EUR"),
    revision=5,
)


@pytest.fixture(params=KINDS)
def shelf(request):
    shelf = Shelf.of(request)
    yield shelf
    shelf.store.close()


def entries(*names):
    return [AuditEntry(make.T0, Actor("alice", "admin"), "Cordoned", name) for name in names]


def documents(shelf):
    loaded = shelf.reopened().load()
    return loaded.members, loaded.tokens, loaded.limits


def subjects(shelf, after=0, limit=100):
    return [
        audit_log.decode_line(line).subject for line in shelf.reopened().audit_lines(after, limit)
    ]


def cut(shelf, number):
    (last,) = shelf.store.audit_lines(number - 1, 1)
    shelf.commit(
        AuditLogTruncated(number), audit_log.truncation_entry(last, make.T0, make.T0), revision=1
    )


def is_whole(shelf):
    store = shelf.reopened()
    start, end = store.audit_log_bounds()
    return not list(audit_log.verify_chain(store.audit_lines(0, 1000), start, end))


def test_members_tokens_and_limits_are_kept_whole(shelf):
    shelf.commit(MEMBER, TOKEN, LIMITS, revision=5)
    assert documents(shelf) == ([MEMBER], [TOKEN], [LIMITS])


def test_later_one_wins_and_an_erased_one_is_gone(shelf):
    shelf.commit(MEMBER, TOKEN, LIMITS, revision=5)
    newer = Token(TOKEN.id, "d2", Role.VIEWER, make.T0, "alice", make.T0, 4)
    shelf.commit(
        RecordDeleted("member", MEMBER.id),
        TOKEN,
        newer,
        RecordDeleted("limits", LIMITS.id),
        revision=6,
    )
    assert documents(shelf) == ([], [newer], [])
    shelf.commit(RecordDeleted("token", TOKEN.id), RecordDeleted("token", "nobody"), revision=7)
    assert documents(shelf) == ([], [], [])


def test_kinds_with_equal_ids_do_not_meet(shelf):
    token = Token(TokenId("paris"), "d", Role.CLUSTER, make.T0, "alice", make.T0)
    shelf.commit(token, LIMITS, revision=1)
    shelf.commit(RecordDeleted("token", "paris"), revision=2)
    assert documents(shelf) == ([], [], [LIMITS])


def test_lines_are_chained_over_commits_and_restarts(shelf):
    assert shelf.store.audit_log_bounds() == (CHAIN_START, CHAIN_START)
    shelf.commit(make.cluster("a"), *entries("1", "2"), revision=1)
    shelf.reopened()
    shelf.commit(*entries("3"), revision=1)
    assert subjects(shelf) == ["1", "2", "3"]
    assert subjects(shelf, after=1, limit=1) == ["2"]
    assert shelf.store.audit_log_bounds()[1].number == 3
    assert is_whole(shelf)


def test_more_lines_than_one_statement_takes_are_kept_in_order(shelf):
    names = [str(number) for number in range(200)]
    shelf.commit(*entries(*names), revision=1)
    assert subjects(shelf, limit=1000) == names
    assert is_whole(shelf)


def test_refused_commit_tells_nothing(shelf):
    shelf.commit(*entries("1"), revision=1)
    with pytest.raises(StoreFailed):
        shelf.commit(*entries("2"), Archived(ReservationId("ghost")), revision=2)
    shelf.commit(*entries("3"), revision=2)
    assert subjects(shelf) == ["1", "3"]
    assert is_whole(shelf)


def test_cut_leaves_where_the_chain_stood(shelf):
    shelf.commit(*entries("1", "2", "3", "4"), revision=1)
    cut(shelf, 3)
    assert [audit_log.decode_line(line).number for line in shelf.reopened().audit_lines(0, 9)] == [
        4,
        5,
    ]
    start, end = shelf.reopened().audit_log_bounds()
    assert (start.number, end.number) == (3, 5)
    assert is_whole(shelf)
    cut(shelf, 5)
    shelf.commit(*entries("7"), revision=1)
    assert [audit_log.decode_line(line).number for line in shelf.reopened().audit_lines(0, 9)] == [
        6,
        7,
    ]
    assert is_whole(shelf)


@pytest.mark.parametrize("line", [0, 9])
def test_cut_of_lines_that_are_not_there_changes_nothing(shelf, line):
    shelf.commit(*entries("1", "2"), revision=1)
    shelf.commit(AuditLogTruncated(line), revision=1)
    assert subjects(shelf) == ["1", "2"]
    assert is_whole(shelf)
