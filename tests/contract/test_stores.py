"""The contract of all stores: records, archive, documents and the audit log."""

import tempfile
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import make
from kubelend.core import audit_log
from kubelend.core.audit_log import CHAIN_START, Actor, AuditEntry
from kubelend.core.errors import KubelendError, StoreFailed
from kubelend.core.events import Archived, AuditLogTruncated, ClusterDeleted, RecordDeleted
from kubelend.core.ledger import Ledger
from kubelend.core.lending import LendingPolicy
from kubelend.core.lifecycle import Phase, Reason, Role
from kubelend.core.members import Certificate, Member, MembershipStatus, Token, TokenId
from kubelend.core.models import Charge, ClusterId, Limits, Quota, RequestKey, ReservationId
from store_kinds import ARCHIVE_FOR, KINDS, LOCAL_KINDS, StoreUnderTest, in_kubernetes


@pytest.fixture(params=KINDS)
def opened(request):
    opened = StoreUnderTest.of(request)
    yield opened
    opened.store.close()


def finished(id, at=make.T0, **fields):
    return make.reservation(
        id, phase=Phase.RELEASED, reason=Reason.EXPIRED, finished_at=at, **fields
    )


def by_id(*records):
    return {record.id: record for record in records}


FULL_CLUSTER = make.cluster(
    "full",
    "cpu=64,memory=1Ti,gpu=8,storage=10Ti,example.com/fpga=2",
    allocated="cpu=1500m,memory=3Gi",
    labels={"tier": "gold", "schlüssel": 'Wert "x"\n'},
    region="eu-west",
    prices=make.price_list("EUR", cpu="0.05", memory="0.000000001"),
    valid_for=timedelta(seconds=90, microseconds=1),
    cordon="maintenance",
    received_at=make.T0 + timedelta(microseconds=1),
    policy=make.policy(
        allow=["team-*"],
        deny=["x"],
        keep_back="cpu=4,example.com/fpga=1",
        max_lent="gpu=0",
        max_per_requester="cpu=8",
        hours=["Mon-Fri 18:00-08:00 Europe/Rome"],
    ),
)

FULL_REQUEST = make.request(
    "cpu=500m,memory=1Gi,gpu=1,example.com/fpga=1",
    "borrower",
    duration=timedelta(hours=2, microseconds=3),
    priority=-7,
    wait=timedelta(seconds=30),
    policy="cost",
    weights={"cost": 0.1, "headroom": 1e-300},
    region="eu-west",
    pinned="full",
    excluded=("a", "b"),
    max_price="0.123456789",
    currency="EUR",
    key="key/1",
)

FULL_RESERVATION = make.reservation(
    "rsv-full",
    FULL_REQUEST,
    phase=Phase.ACTIVE,
    reason=Reason.IN_USE,
    message="Resources in use in cluster full",
    target=ClusterId("full"),
    left=(ClusterId("a"), ClusterId("b")),
    nominated_cluster=ClusterId("c"),
    ticket=17,
    wait_until=make.T0 + make.SECOND,
    reserved_at=make.T0 + 2 * make.SECOND,
    expires_at=make.T0 + make.HOUR,
    acknowledged_at=make.T0 + 3 * make.SECOND,
    activated_at=make.T0 + timedelta(microseconds=999_999),
    finished_at=datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    hourly=10**27 + 1,
    currency="EUR",
    charges=(Charge(make.T0, make.T0 + make.SECOND, 7, "USD"),),
    revision=2**53 + 1,
)


def test_every_committed_field_is_loaded(opened):
    plain = make.cluster("plain"), make.reservation("rsv-plain")
    opened.commit(FULL_CLUSTER, FULL_RESERVATION, *plain, revision=2**53 + 1)
    assert opened.contents() == (
        by_id(FULL_CLUSTER, plain[0]),
        by_id(FULL_RESERVATION, plain[1]),
        2**53 + 1,
    )


def test_unfinished_prepare_stores_nothing(opened):
    opened.commit(make.cluster("a"), revision=1)
    opened.store.prepare([make.cluster("b"), make.reservation("rsv-1")], 3)
    clusters, reservations, revision = opened.contents()
    assert (list(clusters), list(reservations), revision) == (["a"], [], 1)


def test_later_commit_changes_only_its_records(opened):
    opened.commit(make.cluster("a"), make.cluster("b"), make.reservation("rsv-1"), revision=3)
    closed = make.cluster("b", cordon="closed")
    opened.commit(closed, make.reservation("rsv-2"), revision=5)
    assert opened.contents() == (
        by_id(make.cluster("a"), closed),
        by_id(make.reservation("rsv-1"), make.reservation("rsv-2")),
        5,
    )


def test_last_change_of_a_record_in_a_commit_wins(opened):
    waiting, placed = make.reservation("rsv-1"), make.reservation("rsv-1", phase=Phase.RESERVED)
    opened.commit(
        make.cluster("a"),
        waiting,
        make.cluster("a", "cpu=8,memory=1Gi"),
        placed,
        make.cluster("a", "cpu=2,memory=1Gi"),
        revision=5,
    )
    assert opened.contents() == (by_id(make.cluster("a", "cpu=2,memory=1Gi")), by_id(placed), 5)


@pytest.mark.parametrize(
    "changes, left",
    [
        pytest.param([ClusterDeleted(ClusterId("a"))], {"b"}, id="one of two"),
        pytest.param(
            [ClusterDeleted(ClusterId("unknown"))], {"a", "b"}, id="one that is not there"
        ),
        pytest.param(
            [make.cluster("c"), ClusterDeleted(ClusterId("c"))], {"a", "b"}, id="made before"
        ),
        pytest.param(
            [ClusterDeleted(ClusterId("a")), make.cluster("a")], {"a", "b"}, id="made again"
        ),
    ],
)
def test_deleted_clusters_are_not_loaded(opened, changes, left):
    opened.commit(make.cluster("a"), make.cluster("b"), revision=2)
    opened.commit(*changes, revision=4)
    assert opened.contents()[0].keys() == left


def test_archived_reservation_is_only_in_the_archive(opened):
    gone, here = finished("rsv-1"), make.reservation("rsv-2")
    opened.commit(gone, here, revision=2)
    opened.commit(Archived(gone.id), revision=3)
    assert opened.contents() == ({}, by_id(here), 3)
    assert opened.archived("rsv-1") == gone


def test_reservation_changed_and_archived_in_one_commit_has_its_last_state(opened):
    ended = finished("rsv-1", message="over")
    opened.commit(make.reservation("rsv-1"), ended, Archived(ended.id), revision=3)
    assert opened.contents() == ({}, {}, 3)
    assert opened.archived("rsv-1") == ended


def test_reservation_written_after_its_archival_is_in_the_working_set(opened):
    again = make.reservation("rsv-1", message="again")
    opened.commit(finished("rsv-1"), Archived(again.id), again, revision=3)
    assert opened.contents() == ({}, by_id(again), 3)


@pytest.mark.parametrize("id", ["rsv-1", "unknown", "", "rsv-1\0", "\ud800"])
def test_archive_has_only_archived_reservations(opened, id):
    opened.commit(finished("rsv-1"), revision=1)
    assert opened.archived(id) is None


def test_archive_evicts_by_finish_time(opened):
    times = {
        "old": make.T0,
        "kept": make.T0 + timedelta(microseconds=1),
        "new": make.T0 + ARCHIVE_FOR + timedelta(microseconds=1),
    }
    for revision, (name, at) in enumerate(times.items(), start=1):
        opened.commit(finished(name, at), Archived(ReservationId(name)), revision=revision)
    found = {name for name in times if opened.archived(name) is not None}
    assert found == {"kept", "new"}


def test_newest_finish_time_of_a_commit_counts_in_any_order(opened):
    new, old = finished("new", make.T0 + 2 * ARCHIVE_FOR), finished("old", make.T0)
    opened.commit(new, old, Archived(new.id), Archived(old.id), revision=4)
    assert (opened.archived("new"), opened.archived("old")) == (new, None)


UNSTORABLE = [
    pytest.param(Archived(ReservationId("unknown")), id="archives what is not there"),
    pytest.param(Archived(ReservationId("rsv-1")), id="archives what has not ended"),
]


@pytest.mark.parametrize("bad", UNSTORABLE)
def test_commit_with_one_invalid_change_stores_nothing(opened, bad):
    opened.commit(make.cluster("a"), make.reservation("rsv-1"), finished("rsv-2"), revision=3)
    before = opened.contents()
    with pytest.raises(StoreFailed):
        opened.commit(
            make.cluster("b"),
            ClusterDeleted(ClusterId("a")),
            make.reservation("rsv-1", message="changed"),
            Archived(ReservationId("rsv-2")),
            bad,
            make.reservation("rsv-3"),
            revision=9,
        )
    assert opened.contents() == before
    assert opened.archived("rsv-2") is None
    opened.commit(make.cluster("b"), revision=4)
    assert opened.contents()[0].keys() == {"a", "b"}


def test_commit_with_an_older_revision_is_rejected(opened):
    opened.commit(make.cluster("a"), revision=5)
    with pytest.raises(StoreFailed, match="revision"):
        opened.commit(make.cluster("b"), revision=4)
    assert opened.contents() == (by_id(make.cluster("a")), {}, 5)


def test_empty_commit_stores_its_revision(opened):
    assert opened.contents() == ({}, {}, 0)
    opened.commit(make.cluster("a"), revision=1)
    opened.commit(revision=2)
    opened.store.commit([], 2)
    assert opened.contents() == (by_id(make.cluster("a")), {}, 2)


STRANGE = ["ä", "a\u0308", "A", "a", "a ", " a", "日本", "🦀", "a\0b", "a'b\"c", "%s", "\u202e"]
STRANGE.append("a" * 5000)


def test_unusual_ids_are_distinct_and_unchanged(opened):
    clusters = [make.cluster(name) for name in STRANGE]
    reservations = [finished(name) for name in STRANGE]
    opened.commit(*clusters, *reservations, revision=1)
    assert opened.contents() == (by_id(*clusters), by_id(*reservations), 1)
    opened.commit(*(Archived(found.id) for found in reservations), revision=2)
    opened.commit(*(ClusterDeleted(found.id) for found in clusters), revision=3)
    assert opened.contents() == ({}, {}, 3)
    assert [opened.archived(found.id) for found in reservations] == reservations


LARGE = {"kubernetes": (500, "much more than one object holds " * 80)}
"""Each reservation is two calls there."""


@pytest.mark.timeout(120)
def test_large_commit_is_stored(opened, request):
    count, text = LARGE.get(request.node.callspec.params["opened"], (20_000, ""))
    made = (make.reservation(f"rsv-{number}", message=text) for number in range(count))
    reservations = by_id(*made)
    opened.commit(*reservations.values(), revision=count)
    assert opened.contents() == ({}, reservations, count)


def test_loaded_lists_are_copies(opened):
    opened.commit(make.cluster("a"), revision=1)
    opened.store.load().clusters.clear()
    assert opened.contents()[0].keys() == {"a"}


def test_close_is_idempotent(opened):
    opened.commit(make.cluster("a"), revision=1)
    opened.store.close()
    opened.store.close()
    assert opened.contents()[0].keys() == {"a"}


# -- replay equals live

NAMES = st.sampled_from("abc")

NUMBERS = st.integers(0, 9)

SIZES = st.sampled_from(
    ["cpu=1,memory=1Gi", "cpu=3,memory=2Gi", "cpu=2,memory=1Gi,example.com/fpga=1"]
)

ORDERS = st.one_of(
    st.tuples(st.just("advertise"), NAMES, SIZES),
    st.tuples(st.just("reserve"), NAMES, SIZES, st.booleans(), NUMBERS),
    st.tuples(st.sampled_from(["activate", "release", "acknowledge", "refuse"]), NUMBERS),
    st.tuples(st.sampled_from(["cordon", "uncordon", "drain", "remove", "withdraw"]), NAMES),
    st.tuples(st.just("apply"), NAMES, SIZES),
    st.tuples(st.just("retire"), NAMES),
    st.tuples(st.just("expire"), st.sampled_from([make.MINUTE, make.HOUR, 2 * make.RETENTION])),
    st.tuples(st.just("commit")),
)


@pytest.mark.parametrize("kind", LOCAL_KINDS)
@given(orders=st.lists(ORDERS, min_size=5, max_size=60))
def test_ledger_restored_from_a_store_equals_the_live_one(kind, orders):
    with tempfile.TemporaryDirectory() as directory:
        check_restored(StoreUnderTest(LOCAL_KINDS[kind](Path(directory))), orders)


@pytest.mark.timeout(180)
@given(orders=st.lists(ORDERS, min_size=20, max_size=60))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ledger_restored_from_kubernetes_equals_the_live_one(kube, orders):
    check_restored(StoreUnderTest(in_kubernetes(kube)), orders)


def check_restored(opened, orders):
    runner = make.runner(a="cpu=4,memory=8Gi", b="cpu=2,memory=4Gi,example.com/fpga=1")
    for order, *details in orders:
        if order == "commit":
            commit_all(opened, runner)
        else:
            with suppress(KubelendError):
                give(runner, order, *details)
    commit_all(opened, runner)
    restored = Ledger.restore(opened.reopened().load())
    opened.store.close()
    assert make.state(restored) == make.state(runner.ledger)


def commit_all(opened, runner):
    opened.commit(*runner.changes, revision=runner.ledger.revision)
    runner.changes.clear()


def give(runner, order, *details):
    match order, *details:
        case "advertise", name, size:
            runner.advertise(name, size)
        case "reserve", name, size, waits, key:
            wait = make.HOUR if waits else timedelta()
            asked = make.request(size, name, wait=wait, priority=key)
            runner.ask(replace(asked, key=RequestKey(str(key)) if key else None))
        case "expire", duration:
            runner.pass_time(duration)
            runner.expire()
        case "apply", name, size:
            if name not in runner.ledger.reservations:
                runner.ask_as(ReservationId(name), make.request(size))
        case (("cordon" | "uncordon" | "drain" | "remove" | "withdraw" | "retire"), name):
            getattr(runner, order)(name)
        case (("acknowledge" | "refuse"), number):
            found = ReservationId(f"rsv-{number}")
            getattr(runner, order)(found, runner[found].target)
        case (("activate" | "release"), number):
            getattr(runner, order)(ReservationId(f"rsv-{number}"))


# -- documents and the audit log

MEMBER = Member(
    Role.CLUSTER,
    "b\u00e9rlin",
    MembershipStatus.REVOKED,
    make.T0,
    key="sha256:01",
    pending_key="sha256:02",
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


def entries(*names):
    return [AuditEntry(make.T0, Actor("alice", "admin"), "Cordoned", name) for name in names]


def documents(opened):
    loaded = opened.reopened().load()
    return loaded.members, loaded.tokens, loaded.limits


def subjects(opened, after=0, limit=100):
    return [
        audit_log.decode_line(line).subject for line in opened.reopened().audit_lines(after, limit)
    ]


def cut(opened, number):
    (last,) = opened.store.audit_lines(number - 1, 1)
    opened.commit(
        AuditLogTruncated(number), audit_log.truncation_entry(last, make.T0, make.T0), revision=1
    )


def is_whole(opened):
    store = opened.reopened()
    start, end = store.audit_log_bounds()
    return not list(audit_log.verify_chain(store.audit_lines(0, 1000), start, end))


def test_members_tokens_and_limits_are_loaded(opened):
    opened.commit(MEMBER, TOKEN, LIMITS, revision=5)
    assert documents(opened) == ([MEMBER], [TOKEN], [LIMITS])


def test_last_document_wins_and_a_deleted_one_is_not_loaded(opened):
    opened.commit(MEMBER, TOKEN, LIMITS, revision=5)
    newer = Token(TOKEN.id, "d2", Role.VIEWER, make.T0, "alice", make.T0, 4)
    deleted = RecordDeleted("member", MEMBER.id), RecordDeleted("limits", LIMITS.id)
    opened.commit(*deleted, TOKEN, newer, revision=6)
    assert documents(opened) == ([], [newer], [])
    opened.commit(RecordDeleted("token", TOKEN.id), RecordDeleted("token", "nobody"), revision=7)
    assert documents(opened) == ([], [], [])


def test_documents_of_two_kinds_may_share_an_id(opened):
    token = Token(TokenId("paris"), "d", Role.CLUSTER, make.T0, "alice", make.T0)
    opened.commit(token, LIMITS, revision=1)
    opened.commit(RecordDeleted("token", "paris"), revision=2)
    assert documents(opened) == ([], [], [LIMITS])


def test_lines_are_chained_over_commits_and_restarts(opened):
    assert opened.store.audit_log_bounds() == (CHAIN_START, CHAIN_START)
    opened.commit(make.cluster("a"), *entries("1", "2"), revision=1)
    opened.reopened()
    opened.commit(*entries("3"), revision=1)
    assert subjects(opened) == ["1", "2", "3"]
    assert subjects(opened, after=1, limit=1) == ["2"]
    assert opened.store.audit_log_bounds()[1].number == 3
    assert is_whole(opened)


def test_many_audit_lines_are_stored_in_order(opened):
    names = [str(number) for number in range(200)]
    opened.commit(*entries(*names), revision=1)
    assert subjects(opened, limit=1000) == names
    assert is_whole(opened)


def test_rejected_commit_appends_no_audit_line(opened):
    opened.commit(*entries("1"), revision=1)
    with pytest.raises(StoreFailed):
        opened.commit(*entries("2"), Archived(ReservationId("unknown")), revision=2)
    opened.commit(*entries("3"), revision=2)
    assert subjects(opened) == ["1", "3"]
    assert is_whole(opened)


def test_truncation_stores_the_chain_head(opened):
    opened.commit(*entries("1", "2", "3", "4"), revision=1)
    cut(opened, 3)
    assert [line.number for line in opened.reopened().audit_lines(0, 9)] == [4, 5]
    start, end = opened.reopened().audit_log_bounds()
    assert (start.number, end.number) == (3, 5)
    assert is_whole(opened)
    cut(opened, 5)
    opened.commit(*entries("7"), revision=1)
    assert [line.number for line in opened.reopened().audit_lines(0, 9)] == [6, 7]
    assert is_whole(opened)


@pytest.mark.parametrize("line", [0, 9])
def test_truncation_of_missing_lines_changes_nothing(opened, line):
    opened.commit(*entries("1", "2"), revision=1)
    opened.commit(AuditLogTruncated(line), revision=1)
    assert subjects(opened) == ["1", "2"]
    assert is_whole(opened)
