"""A store that is stopped between any two writes is, opened anew, as before the commit or as after it."""

import itertools
from contextlib import closing

import pytest
from msgspec.structs import replace

import kube_stores
import make
from kube_stores import Fate, Place, told
from kubelend.core import audit_log
from kubelend.core.audit_log import Actor, AuditEntry
from kubelend.core.errors import StoreFailed
from kubelend.core.events import Archived, AuditLogTruncated, ClusterDeleted, RecordDeleted
from kubelend.core.lifecycle import Phase, Reason, Role
from kubelend.core.members import Member, MembershipStatus, Token, TokenId
from kubelend.core.models import ClusterId, Limits, Quota, ReservationId
from kubelend.stores.kubernetes import head
from kubelend.stores.memory import MemoryStore
from shelves import ARCHIVE_FOR


def entries(count):
    return [
        AuditEntry(make.T0, Actor("alice", "admin"), "Cordoned", f"s/{n}") for n in range(count)
    ]


def placed(name, target, **fields):
    where = ClusterId(target)
    return make.reservation(name, phase=Phase.RESERVED, target=where, reserved_at=make.T0, **fields)


def finished(name, at=make.T0):
    return make.reservation(name, phase=Phase.RELEASED, reason=Reason.EXPIRED, finished_at=at)


def cutting(number):
    """The line that tells of a cut names the digest of the last line that goes."""
    *_, last = audit_log.chain_entries(entries(number), audit_log.CHAIN_START)
    return [AuditLogTruncated(number), audit_log.truncation_entry(last, make.T0, make.T0)]


MEMBER = Member(Role.CLUSTER, "berlin", MembershipStatus.ACCEPTED, make.T0)
TOKEN = Token(TokenId("abc"), "d1", Role.VIEWER, make.T0, "alice", make.T0, 5)
LIMITS = Limits(ClusterId("a"), None, Quota(reservations=3))
BASE = [
    make.cluster("a", "cpu=4,memory=8Gi", labels={"tier": "gold"}),
    make.cluster("b", "cpu=4,memory=8Gi"),
    placed("rsv-1", "a"),
    placed("rsv-2", "b"),
    finished("rsv-3"),
    finished("rsv-4"),
    MEMBER,
    TOKEN,
    *entries(3),
]
LATER = make.T0 + 2 * ARCHIVE_FOR
NAMES = ["rsv-1", "rsv-2", "rsv-3", "rsv-4", "rsv-5"]

COMMITS = {
    "creates": [make.cluster("c"), placed("rsv-5", "c"), LIMITS, *entries(1)],
    "changes": [
        make.cluster("a", "cpu=5,memory=8Gi"),
        replace(placed("rsv-1", "a"), phase=Phase.ACTIVE, activated_at=make.T0),
        replace(TOKEN, uses_left=4),
    ],
    "moves": [placed("rsv-1", "b", left=(ClusterId("a"),)), *entries(2)],
    "releases": [finished("rsv-1"), placed("rsv-5", "a")],
    "archives": [
        Archived(ReservationId("rsv-3")),
        finished("rsv-1"),
        Archived(ReservationId("rsv-1")),
    ],
    "forgets": [
        finished("rsv-2", LATER),
        Archived(ReservationId("rsv-2")),
        Archived(ReservationId("rsv-3")),
    ],
    "drops": [ClusterDeleted(ClusterId("a")), make.cluster("c")],
    "erases": [RecordDeleted("member", MEMBER.id), RecordDeleted("token", TOKEN.id), LIMITS],
}


@pytest.fixture(params=[False, True], ids=["before it was sent", "when it was done"])
def fate(request):
    """Which happens again and again, each time one write later."""
    return lambda: Fate(is_sent=request.param)


def expected(*commits):
    """What a store that cannot be stopped would tell."""
    store = MemoryStore(archive_for=ARCHIVE_FOR)
    for revision, changes in enumerate(commits, start=1):
        store.commit(changes, revision)
    return told(store, NAMES)


def interrupted(place, fate, after, changes):
    """Commit, and be cut off so many writes later; whether the store has said that it was kept."""
    with closing(place.open(kube_stores.connecting(fate.around))) as store:
        store.load()
        fate.left = after
        try:
            store.commit(changes, 2)
        except StoreFailed:
            return False
    return True


def gone_on(place):
    """What is told behind one commit more: by then all of the one before has to be in the objects."""
    with closing(place.open()) as store:
        store.commit([], store.load().revision)
    return told(place.open(), NAMES)


def check_gaps(kube, new_fate, base, changes):
    """Gives after how many writes the commit was through."""
    before, after = expected(base), expected(base, changes)
    assert before != after
    for writes in itertools.count(1):
        place, fate = Place(kube), new_fate()
        with closing(place.open()) as store:
            store.commit(base, 1)
        was_kept = interrupted(place, fate, writes, changes)
        found = told(place.open(), NAMES)
        assert found in (before, after), f"stopped at write {writes}"
        assert found == told(place.look(), NAMES) == gone_on(place)
        if was_kept:
            assert found == after
            return writes
    raise AssertionError("unreachable")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", COMMITS)
def test_commit_that_is_stopped_anywhere_is_kept_whole_or_not_at_all(kube, fate, name):
    assert check_gaps(kube, fate, BASE, COMMITS[name]) > 2


@pytest.mark.timeout(120)
def test_commit_too_large_for_one_object_is_kept_whole_or_not_at_all(kube, fate, monkeypatch):
    monkeypatch.setattr(head, "MAX_OBJECT_BYTES", 2000)
    changes = [*COMMITS["creates"], *COMMITS["moves"], finished("rsv-2")]
    assert check_gaps(kube, fate, BASE, changes) > 8


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "base, changes",
    [
        pytest.param(entries(3), entries(600), id="moves lines out of the head"),
        pytest.param(entries(1200), cutting(1100), id="cuts two blocks off"),
    ],
)
def test_journal_that_is_stopped_anywhere_is_kept_whole_or_not_at_all(kube, fate, base, changes):
    assert check_gaps(kube, fate, base, changes) > 2


def test_store_that_gets_one_write_further_each_time_gets_there(kube):
    place, changes = Place(kube), [*COMMITS["creates"], *COMMITS["releases"]]
    with closing(place.open()) as store:
        store.commit(BASE, 1)
    assert not interrupted(place, Fate(is_sent=True), 1, changes)
    for _ in range(20):
        fate = Fate(is_sent=True)
        with closing(place.open(kube_stores.connecting(fate.around))) as store:
            fate.left = 1
            try:
                store.load()
            except StoreFailed:
                continue
            break
    assert told(place.open(), NAMES) == expected(BASE, changes)


def test_reader_sees_a_commit_that_no_object_tells_of_yet(kube):
    place = Place(kube)
    with closing(place.open()) as store:
        store.commit(BASE, 1)
    assert not interrupted(place, Fate(is_sent=True), 1, COMMITS["archives"])
    assert told(place.look(), NAMES) == expected(BASE, COMMITS["archives"])
