"""What is reserved follows from the live reservations, whatever happens to the advertisements."""

import pytest
from msgspec.structs import replace

import make
from kubelend.core import audit, errors
from kubelend.core.audit_log import AuditEntry
from kubelend.core.events import Advertised, Archived, ClusterDeleted, Event, WorkingSet
from kubelend.core.ledger import Ledger
from kubelend.core.models import (
    Advertisement,
    Cluster,
    ClusterId,
    RequestKey,
    Reservation,
    ReservationId,
)


def cpu(desk, cluster="a"):
    return desk.available(cluster).cpu


@pytest.fixture
def desk():
    """The provider of the contract's example: 10 CPU, of which its own pods use 1050m."""
    made = make.Desk()
    made.advertise("a", "cpu=10,memory=8025424Ki", allocated="cpu=1050m,memory=418Mi")
    return made


def test_available_is_allocatable_less_allocated_less_reserved(desk):
    assert desk.available("a") == make.resources("cpu=8950m,memory=7597392Ki")
    desk.reserve("cpu=500m,memory=256Mi")
    assert desk.reserved("a") == make.resources("cpu=500m,memory=256Mi")
    assert desk.available("a") == make.resources("cpu=8450m,memory=7335248Ki")


def test_locking_example_of_the_contract(desk):
    seen = [cpu(desk)]
    for wanted in ("cpu=3,memory=1Gi", "cpu=5,memory=1Gi"):
        desk.reserve(wanted)
        seen.append(cpu(desk))
    assert seen == [8950, 5950, 950]
    before = make.state(desk.ledger)
    assert desk.refused("cpu=2,memory=1Gi") == "0/1 cluster fits: 1 InsufficientCPU"
    assert make.state(desk.ledger) == before


def test_release_gives_back_exactly_once(desk):
    held = desk.reserve("cpu=3,memory=1Gi")
    desk.reserve("cpu=2,memory=1Gi")
    for _ in range(3):
        desk.release(held)
        assert cpu(desk) == 6950


def test_expiry_gives_back_exactly_once(desk):
    held = desk.reserve("cpu=3,memory=1Gi", duration=make.HOUR)
    desk.pass_time(make.HOUR - make.SECOND)
    desk.expire()
    assert cpu(desk) == 5950
    desk.pass_time(make.SECOND)
    for _ in range(3):
        desk.expire()
        assert cpu(desk) == 8950
    assert (desk[held].phase, desk[held].reason) == ("Released", "Expired")
    desk.release(held)
    assert cpu(desk) == 8950


def test_release_before_its_end_leaves_nothing_to_expire(desk):
    held = desk.reserve("cpu=3,memory=1Gi")
    desk.release(held)
    desk.pass_time(2 * make.HOUR)
    revision = desk.ledger.revision
    desk.expire()
    assert desk.ledger.revision == revision
    assert desk[held].reason == "ReleasedByRequester"


@pytest.mark.parametrize("offer", ["cpu=10,memory=8Gi", "cpu=4,memory=4Gi", "cpu=2,memory=1Gi"])
def test_changed_advertisement_loses_no_lock(desk, offer):
    desk.reserve("cpu=3,memory=1Gi")
    desk.advertise("a", offer)
    assert desk.reserved("a") == make.resources("cpu=3,memory=1Gi")
    assert desk.available("a") == make.resources(offer) - make.resources("cpu=3,memory=1Gi")


def test_recreated_advertisement_loses_no_lock(desk):
    """A store may have lost the cluster's record: its reservations are what says what is reserved."""
    held = desk.reserve("cpu=3,memory=1Gi")
    _, reservations, revision, *_ = desk.kept()
    restored = make.Desk(make.Recorder.restore(WorkingSet([], reservations, revision)))
    assert restored.reserved("a").cpu == 3000
    restored.advertise("a", "cpu=10,memory=8Gi")
    assert cpu(restored) == 7000
    restored.release(held)
    assert cpu(restored) == 10_000


def test_hold_on_a_cluster_that_is_unreachable_can_still_be_given_back(desk):
    held = desk.reserve("cpu=3,memory=1Gi")
    desk.reserve("cpu=9,memory=1Gi", wait=make.HOUR)
    _, reservations, revision, *_ = desk.kept()
    restored = make.Desk(make.Recorder.restore(WorkingSet([], reservations, revision)))
    restored.release(held)
    assert not restored.reserved("a")


def test_cluster_that_filled_up_under_its_promises_takes_nothing_new_and_recovers(desk):
    held = desk.reserve("cpu=8,memory=1Gi")
    desk.advertise("a", "cpu=10,memory=8Gi", allocated="cpu=5")
    assert cpu(desk) == -3000
    assert desk.refused("cpu=1m,memory=1") == "0/1 cluster fits: 1 InsufficientCPU"
    desk.release(held)
    assert cpu(desk) == 5000
    desk.reserve("cpu=5,memory=1Gi")


def test_what_an_agent_says_of_reserved_and_available_has_no_place_to_be_said():
    fields = set(make.advertisement().__struct_fields__)
    assert {"capacity", "allocatable", "allocated"} < fields
    assert not fields & {"reserved", "available", "used"}


def test_cordon_outlives_the_next_advertisement(desk):
    desk.cordon("a", "new disks")
    assert desk.advertise("a", "cpu=10,memory=8Gi").cordon == "new disks"


def test_removed_cluster_may_come_back_open_and_empty(desk):
    desk.cordon("a")
    desk.remove("a")
    assert not desk.ledger.clusters
    assert desk.advertise("a").cordon is None
    assert not desk.reserved("a")


def test_every_event_counts_once(desk):
    start = desk.ledger.revision
    held = desk.reserve("cpu=1,memory=1Gi")
    assert desk.ledger.revision == desk[held].revision == desk[held].ticket == start + 1
    desk.activate(held)
    assert desk.ledger.revision == desk[held].revision == start + 2
    assert desk[held].ticket == start + 1


@pytest.mark.parametrize("ask", ["cluster", "reservation"])
def test_unknown_names_are_not_found(ask):
    with pytest.raises(errors.NotFound, match=f"no {ask} 'x'"):
        getattr(Ledger(), ask)("x")


def test_unknown_event_is_a_mistake_of_ours():
    with pytest.raises(TypeError, match="unknown event: Event"):
        Ledger().apply(Event(make.T0))


def test_each_event_gives_what_a_store_has_to_keep():
    desk = make.Desk()
    desk.advertise("a")
    held = desk.reserve("cpu=1,memory=1Gi")
    desk.release(held)
    desk.pass_time(make.RETENTION)
    desk.expire()
    desk.remove("a")
    kinds = [type(change) for change in desk.changes]
    actions = [change.action for change in desk.changes if isinstance(change, AuditEntry)]
    assert [kind for kind in kinds if kind is not AuditEntry] == [
        Cluster,
        Reservation,
        Reservation,
        Archived,
        ClusterDeleted,
    ]
    assert actions == ["Advertised", "Requested", "Released", "ClusterRemoved"]
    assert desk.kept()[:3] == ([], [], desk.ledger.revision)


def test_touching_gives_both_sides_and_former_providers():
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=2,memory=8Gi")
    held = desk.reserve("cpu=1,memory=1Gi", requester="r")
    desk.refuse(held, "a")
    assert desk.target(held) == "b"
    for cluster in ("r", "a", "b"):
        assert [found.id for found in desk.ledger.by_cluster(ClusterId(cluster))] == [held]
    assert [found.id for found in desk.ledger.lent_by(ClusterId("b"))] == [held]
    assert desk.ledger.lent_by(ClusterId("a")) == []


def test_finished_reservations_are_forgotten_after_the_retention(desk):
    held = desk.reserve("cpu=1,memory=1Gi", requester="r", key="k")
    desk.release(held)
    desk.pass_time(make.RETENTION - make.SECOND)
    desk.expire()
    assert held in desk.ledger.reservations
    desk.pass_time(make.SECOND)
    desk.expire()
    assert held not in desk.ledger.reservations
    assert desk.ledger.by_key(ClusterId("r"), RequestKey("k")) is None
    assert list(desk.ledger.by_cluster(ClusterId("a"))) == []
    assert list(desk.ledger.by_cluster(ClusterId("r"))) == []


def test_next_deadline_is_never_after_the_end_of_a_reservation(desk):
    assert desk.ledger.next_deadline() is None
    desk.reserve("cpu=1,memory=1Gi", duration=2 * make.HOUR)
    held = desk.reserve("cpu=1,memory=1Gi", duration=make.HOUR)
    assert desk.ledger.next_deadline() == make.T0 + make.HOUR
    desk.renew(held, 3 * make.HOUR)
    desk.pass_time(make.HOUR)
    desk.expire()
    assert desk[held].is_live
    assert desk.ledger.next_deadline() == make.T0 + 2 * make.HOUR


def test_key_stays_with_who_had_it_last():
    """Two have it, as a follower may see for a moment, and the older one is updated before it goes."""
    old = make.reservation("old", make.request(key="k"), ticket=1)
    new = make.reservation("new", make.request(key="k"), ticket=2)
    ledger = Ledger()
    ledger.apply_changes([old, new, replace(old, message="over"), Archived(old.id)], 4)
    assert ledger.by_key(make.R, RequestKey("k")) == new
    ledger.apply_changes([Archived(new.id)], 5)
    assert ledger.by_key(make.R, RequestKey("k")) is None


def test_deadlines_of_the_finished_do_not_pile_up(desk):
    """A lease for years that is given back at once, again and again, must not cost memory for years."""
    kept = desk.reserve("cpu=1,memory=1Gi", duration=make.HOUR)
    for hours in range(2, 1000):
        desk.renew(kept, hours * make.HOUR)
        desk.release(desk.reserve("cpu=1,memory=1Gi", duration=100_000 * make.HOUR))
        desk.expire(retention=make.NO_TIME)
    assert len(desk.ledger.reservations) == 1
    assert len(desk.ledger._deadlines) < 100  # noqa: SLF001 - only its size shows the leak
    desk.pass_time(999 * make.HOUR)
    desk.expire()
    assert desk[kept].reason == "Expired"


def test_restored_ledger_is_the_one_that_was_kept():
    desk = make.desk(b="cpu=4,memory=8Gi,example.com/fpga=2", a="cpu=2,memory=4Gi,gpu=1")
    active = desk.reserve("cpu=1,memory=1Gi,example.com/fpga=1", requester="a", key="k")
    desk.activate(active)
    desk.release(desk.reserve("cpu=1,memory=1Gi"))
    low = desk.reserve("cpu=4,memory=1Gi", wait=make.HOUR)
    high = desk.reserve("cpu=4,memory=1Gi", wait=make.HOUR, priority=5)
    desk.cordon("a")
    restored = Ledger.restore(desk.kept())
    assert make.state(restored) == make.state(desk.ledger)
    assert [waiter.id for waiter in restored.waiting()] == [high, low]
    assert restored.by_key(ClusterId("a"), RequestKey("k")) == desk[active]


def test_restored_ledger_ends_and_forgets_in_the_order_of_time():
    desk = make.desk(a="cpu=9,memory=9Gi")
    late, soon, sooner = (
        desk.reserve("cpu=1,memory=1Gi", duration=hours * make.HOUR) for hours in (9, 2, 1)
    )
    ended = [desk.reserve("cpu=1,memory=1Gi") for _ in range(3)]
    for found in reversed(ended):
        desk.pass_time(make.MINUTE)
        desk.release(found)
    restored = make.Desk(make.Recorder.restore(desk.kept()), desk.now)
    assert restored.ledger.next_deadline() == desk[sooner].expires_at
    restored.expire(retention=90 * make.SECOND)
    assert ended[2] not in restored.ledger.reservations
    assert set(ended[:2]) <= restored.ledger.reservations.keys()
    restored.pass_time(3 * make.HOUR)
    restored.expire()
    assert [restored[found].phase for found in (late, soon, sooner)] == [
        "Reserved",
        "Released",
        "Released",
    ]


def test_every_field_of_an_advertisement_is_decided_by_or_known_not_to_be():
    """A new one is to be compared in `Cluster.offers_the_same_as`, or to be named here."""
    before = make.cluster("a")
    for name in Advertisement.__struct_fields__:
        changed = replace(before.advertisement, **{name: "another"})
        decisive = not replace(before, advertisement=changed).has_same_offer(before)
        assert decisive == (name not in {*NOT_DECIDED_BY, "cluster"}), name


NOT_DECIDED_BY = {"capacity", "name", "endpoint", "sent_at", "valid_for"}
"""How long it is valid is the broker's to say, in `Cluster.valid_until`; the others are only shown."""


@pytest.mark.parametrize(
    "news",
    [
        {"offer": "cpu=8,memory=8Gi"},
        {"offer": "cpu=4,memory=8Gi,example.com/fpga=1"},
        {"allocated": "cpu=1"},
        {"offer": "cpu=5,memory=8Gi", "allocated": "cpu=1"},
        {"labels": {"tier": "gold"}},
        {"prices": make.price_list(cpu="1")},
        {"policy": make.policy(keep_back="cpu=1")},
        {"valid_for": make.MINUTE},
        {},
    ],
    ids=str,
)
def test_whatever_an_advertisement_says_anew_is_decided_by(news):
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    desk.reserve("cpu=1,memory=1Gi", pinned="a")
    desk.pass_time(make.MINUTE)
    desk.advertise("a", **news)
    assert make.state(desk.ledger) == make.state(Ledger.restore(desk.kept()))
    assert audit.invariant_violations(desk.ledger) == []


def test_replayed_events_give_the_same_ledger():
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=2,memory=4Gi")
    held = desk.reserve("cpu=4,memory=1Gi")
    desk.reserve("cpu=3,memory=1Gi", wait=make.HOUR)
    desk.refuse(desk.reserve("cpu=2,memory=1Gi"), "b")
    desk.release(held)
    replayed = Ledger()
    for event in desk.ledger.events:
        replayed.apply(event)
    assert make.state(replayed) == make.state(desk.ledger)


def test_reservation_is_never_overwritten_by_another_of_its_id(desk):
    held = desk.reserve("cpu=3,memory=1Gi")
    twin = make.Desk(desk.ledger)
    with pytest.raises(errors.Conflict, match=f"{held} already exists"):
        twin.reserve("cpu=2,memory=1Gi", requester="other")
    assert desk[held].requester == "r"
    assert cpu(desk) == 5950


def test_stale_is_judged_by_when_it_came_and_not_by_the_clock_of_the_sender():
    old_clock = make.advertisement("a", sent_at=make.T0 - 24 * make.HOUR)
    fast_clock = make.advertisement("b", sent_at=make.T0 + 24 * make.HOUR)
    desk = make.desk(a=old_clock, b=fast_clock)
    desk.pass_time(make.STALE_AFTER - make.MOMENT)
    assert desk.target(desk.reserve("cpu=4,memory=1Gi")) == "a"
    assert desk.target(desk.reserve("cpu=3,memory=1Gi")) == "b"
    desk.pass_time(make.MOMENT)
    assert desk.refused("cpu=1,memory=1Gi") == "0/2 clusters fit: 2 Stale"


@pytest.mark.parametrize(
    "valid_for, believed_for",
    [
        (None, make.STALE_AFTER),
        (make.MINUTE, make.MINUTE),
        (make.HOUR, make.STALE_AFTER),
        (make.NO_TIME, make.NO_TIME),
    ],
    ids=["silent", "shorter", "longer", "not at all"],
)
def test_advertisement_is_believed_as_long_as_it_says_but_not_over_the_limit(
    valid_for, believed_for
):
    cluster = make.Desk().advertise("a", valid_for=valid_for)
    assert cluster.valid_until - cluster.received_at == believed_for
    assert cluster.is_stale(make.T0 + believed_for)


def test_apply_is_enough_to_build_a_ledger():
    ledger = Ledger()
    kept = ledger.apply(Advertised(make.T0, make.advertisement("a"), make.T0 + make.HOUR))
    assert kept == ledger.clusters[ClusterId("a")]
    assert ledger.capacity_freed == {"a"}
    assert ReservationId("a") not in ledger.reservations
