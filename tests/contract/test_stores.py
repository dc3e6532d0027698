"""What the broker relies on, whatever keeps its records. A new kind is one more of `shelves.KINDS`."""

import tempfile
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import make
from kubelend.core.errors import KubelendError, StoreFailed
from kubelend.core.events import Archived, ClusterDeleted
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import Charge, ClusterId, RequestKey, ReservationId
from shelves import ARCHIVE_FOR, HERE, KINDS, Shelf, in_kubernetes


@pytest.fixture(params=KINDS)
def shelf(request):
    shelf = Shelf.of(request)
    yield shelf
    shelf.store.close()


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


def test_new_store_is_empty(shelf):
    assert shelf.contents() == ({}, {}, 0)


def test_what_is_committed_is_loaded_field_by_field(shelf):
    plain = make.cluster("plain"), make.reservation("rsv-plain")
    shelf.commit(FULL_CLUSTER, FULL_RESERVATION, *plain, revision=2**53 + 1)
    assert shelf.contents() == (
        by_id(FULL_CLUSTER, plain[0]),
        by_id(FULL_RESERVATION, plain[1]),
        2**53 + 1,
    )


def test_commit_in_one_step_keeps_the_same(shelf):
    shelf.store.commit([make.cluster("a"), make.reservation("rsv-1")], 7)
    clusters, reservations, revision = shelf.contents()
    assert (list(clusters), list(reservations), revision) == (["a"], ["rsv-1"], 7)


def test_what_is_prepared_and_never_finished_is_not_kept(shelf):
    shelf.commit(make.cluster("a"), revision=1)
    shelf.store.prepare([make.cluster("b"), make.reservation("rsv-1")], 3)
    clusters, reservations, revision = shelf.contents()
    assert (list(clusters), list(reservations), revision) == (["a"], [], 1)


def test_later_commit_changes_what_it_names_and_nothing_else(shelf):
    shelf.commit(make.cluster("a"), make.cluster("b"), make.reservation("rsv-1"), revision=3)
    closed = make.cluster("b", cordon="closed")
    shelf.commit(closed, make.reservation("rsv-2"), revision=5)
    assert shelf.contents() == (
        by_id(make.cluster("a"), closed),
        by_id(make.reservation("rsv-1"), make.reservation("rsv-2")),
        5,
    )


def test_last_change_of_a_record_in_a_commit_wins(shelf):
    waiting, placed = make.reservation("rsv-1"), make.reservation("rsv-1", phase=Phase.RESERVED)
    shelf.commit(
        make.cluster("a"),
        waiting,
        make.cluster("a", "cpu=8,memory=1Gi"),
        placed,
        make.cluster("a", "cpu=2,memory=1Gi"),
        revision=5,
    )
    assert shelf.contents() == (by_id(make.cluster("a", "cpu=2,memory=1Gi")), by_id(placed), 5)


@pytest.mark.parametrize(
    "changes, left",
    [
        pytest.param([ClusterDeleted(ClusterId("a"))], {"b"}, id="one of two"),
        pytest.param([ClusterDeleted(ClusterId("ghost"))], {"a", "b"}, id="one that is not there"),
        pytest.param(
            [make.cluster("c"), ClusterDeleted(ClusterId("c"))], {"a", "b"}, id="made before"
        ),
        pytest.param(
            [ClusterDeleted(ClusterId("a")), make.cluster("a")], {"a", "b"}, id="made again"
        ),
    ],
)
def test_dropped_clusters_are_gone(shelf, changes, left):
    shelf.commit(make.cluster("a"), make.cluster("b"), revision=2)
    shelf.commit(*changes, revision=4)
    assert shelf.contents()[0].keys() == left


def test_archived_reservation_leaves_the_working_set_and_is_still_found(shelf):
    gone, here = finished("rsv-1"), make.reservation("rsv-2")
    shelf.commit(gone, here, revision=2)
    shelf.commit(Archived(gone.id), revision=3)
    assert shelf.contents() == ({}, by_id(here), 3)
    assert shelf.archived("rsv-1") == gone


def test_reservation_that_lives_and_ends_within_one_commit_is_archived_as_it_ended(shelf):
    ended = finished("rsv-1", message="over")
    shelf.commit(make.reservation("rsv-1"), ended, Archived(ended.id), revision=3)
    assert shelf.contents() == ({}, {}, 3)
    assert shelf.archived("rsv-1") == ended


def test_reservation_that_comes_back_after_it_was_archived_is_in_the_working_set(shelf):
    again = make.reservation("rsv-1", message="again")
    shelf.commit(finished("rsv-1"), Archived(again.id), again, revision=3)
    assert shelf.contents() == ({}, by_id(again), 3)


@pytest.mark.parametrize("id", ["rsv-1", "ghost", "", "rsv-1\0", "\ud800"])
def test_archive_knows_nothing_of_what_was_not_archived(shelf, id):
    shelf.commit(finished("rsv-1"), revision=1)
    assert shelf.archived(id) is None


def test_archive_forgets_what_finished_too_long_before_the_newcomers(shelf):
    times = {
        "old": make.T0,
        "kept": make.T0 + timedelta(microseconds=1),
        "new": make.T0 + ARCHIVE_FOR + timedelta(microseconds=1),
    }
    for revision, (name, at) in enumerate(times.items(), start=1):
        shelf.commit(finished(name, at), Archived(ReservationId(name)), revision=revision)
    found = {name for name in times if shelf.archived(name) is not None}
    assert found == {"kept", "new"}


def test_archive_is_judged_by_the_newest_of_a_commit_in_any_order(shelf):
    new, old = finished("new", make.T0 + 2 * ARCHIVE_FOR), finished("old", make.T0)
    shelf.commit(new, old, Archived(new.id), Archived(old.id), revision=4)
    assert (shelf.archived("new"), shelf.archived("old")) == (new, None)


UNSTORABLE = [
    pytest.param(Archived(ReservationId("ghost")), id="archives what is not there"),
    pytest.param(Archived(ReservationId("rsv-1")), id="archives what has not ended"),
]


@pytest.mark.parametrize("bad", UNSTORABLE)
def test_commit_with_one_change_that_cannot_be_kept_keeps_nothing(shelf, bad):
    shelf.commit(make.cluster("a"), make.reservation("rsv-1"), finished("rsv-2"), revision=3)
    before = shelf.contents()
    with pytest.raises(StoreFailed):
        shelf.commit(
            make.cluster("b"),
            ClusterDeleted(ClusterId("a")),
            make.reservation("rsv-1", message="changed"),
            Archived(ReservationId("rsv-2")),
            bad,
            make.reservation("rsv-3"),
            revision=9,
        )
    assert shelf.contents() == before
    assert shelf.archived("rsv-2") is None


def test_store_that_refused_a_commit_takes_the_next_one_without_reopening(shelf):
    with pytest.raises(StoreFailed):
        shelf.commit(Archived(ReservationId("ghost")), revision=1)
    shelf.commit(make.cluster("a"), revision=1)
    assert shelf.contents() == (by_id(make.cluster("a")), {}, 1)


def test_commit_from_behind_the_store_is_refused(shelf):
    shelf.commit(make.cluster("a"), revision=5)
    with pytest.raises(StoreFailed, match="revision"):
        shelf.commit(make.cluster("b"), revision=4)
    assert shelf.contents() == (by_id(make.cluster("a")), {}, 5)


def test_empty_commit_keeps_its_revision_and_changes_nothing_else(shelf):
    shelf.commit(make.cluster("a"), revision=1)
    shelf.commit(revision=2)
    shelf.commit(revision=2)
    assert shelf.contents() == (by_id(make.cluster("a")), {}, 2)


STRANGE = [
    "ä",
    "a\u0308",
    "A",
    "a",
    "a ",
    " a",
    "日本",
    "🦀",
    "a\0b",
    "a'b\"c",
    "%s",
    "\u202e",
    "a" * 5000,
]


def test_strange_ids_stay_what_they_are_and_apart(shelf):
    clusters = [make.cluster(name) for name in STRANGE]
    reservations = [finished(name) for name in STRANGE]
    shelf.commit(*clusters, *reservations, revision=1)
    assert shelf.contents() == (by_id(*clusters), by_id(*reservations), 1)
    shelf.commit(*(Archived(found.id) for found in reservations), revision=2)
    shelf.commit(*(ClusterDeleted(found.id) for found in clusters), revision=3)
    assert shelf.contents() == ({}, {}, 3)
    assert [shelf.archived(found.id) for found in reservations] == reservations


LARGE = {"kubernetes": (500, "much more than one object holds " * 80)}
"""Each reservation is two calls there."""


@pytest.mark.timeout(120)
def test_large_commit_is_kept_whole(shelf, request):
    count, text = LARGE.get(request.node.callspec.params["shelf"], (20_000, ""))
    made = (make.reservation(f"rsv-{number}", message=text) for number in range(count))
    reservations = by_id(*made)
    shelf.commit(*reservations.values(), revision=count)
    assert shelf.contents() == ({}, reservations, count)


def test_loaded_lists_are_the_callers_own(shelf):
    shelf.commit(make.cluster("a"), revision=1)
    shelf.store.load().clusters.clear()
    assert shelf.contents()[0].keys() == {"a"}


def test_closing_twice_is_harmless(shelf):
    shelf.commit(make.cluster("a"), revision=1)
    shelf.store.close()
    shelf.store.close()
    assert shelf.contents()[0].keys() == {"a"}


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


@pytest.mark.parametrize("kind", HERE)
@given(orders=st.lists(ORDERS, min_size=5, max_size=60))
@settings(max_examples=150)
def test_ledger_restored_from_a_store_equals_the_live_one(kind, orders):
    with tempfile.TemporaryDirectory() as directory:
        check_restored(Shelf(HERE[kind](Path(directory))), orders)


@pytest.mark.timeout(180)
@given(orders=st.lists(ORDERS, min_size=20, max_size=60))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ledger_restored_from_kubernetes_equals_the_live_one(kube, orders):
    check_restored(Shelf(in_kubernetes(kube)), orders)


def check_restored(shelf, orders):
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=2,memory=4Gi,example.com/fpga=1")
    for order, *details in orders:
        if order == "commit":
            commit_all(shelf, desk)
        else:
            with suppress(KubelendError):
                give(desk, order, *details)
    commit_all(shelf, desk)
    restored = Ledger.restore(shelf.reopened().load())
    shelf.store.close()
    assert make.state(restored) == make.state(desk.ledger)


def commit_all(shelf, desk):
    shelf.commit(*desk.changes, revision=desk.ledger.revision)
    desk.changes.clear()


def give(desk, order, *details):
    match order, *details:
        case "advertise", name, size:
            desk.advertise(name, size)
        case "reserve", name, size, waits, key:
            wait = make.HOUR if waits else timedelta()
            asked = make.request(size, name, wait=wait, priority=key)
            desk.ask(replace(asked, key=RequestKey(str(key)) if key else None))
        case "expire", duration:
            desk.pass_time(duration)
            desk.expire()
        case "apply", name, size:
            if name not in desk.ledger.reservations:
                desk.ask_as(ReservationId(name), make.request(size))
        case (("cordon" | "uncordon" | "drain" | "remove" | "withdraw" | "retire"), name):
            getattr(desk, order)(name)
        case (("acknowledge" | "refuse"), number):
            found = ReservationId(f"rsv-{number}")
            getattr(desk, order)(found, desk[found].target)
        case (("activate" | "release"), number):
            getattr(desk, order)(ReservationId(f"rsv-{number}"))
