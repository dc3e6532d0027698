"""What is reserved follows from the live reservations, whatever happens to the advertisements."""

import pytest
from msgspec.structs import replace

import make
from kubelend.core import audit
from kubelend.core.events import Archived, Event, Nominated, WorkingSet
from kubelend.core.ledger import Ledger
from kubelend.core.models import Advertisement, ClusterId, RequestKey


def cpu(runner, cluster="a"):
    return runner.available(cluster).cpu


@pytest.fixture
def runner():
    """The provider of the contract's example: 10 CPU, of which its own pods use 1050m."""
    made = make.CommandRunner()
    made.advertise("a", "cpu=10,memory=8025424Ki", allocated="cpu=1050m,memory=418Mi")
    return made


def test_locking_example_of_the_contract(runner):
    assert runner.available("a") == make.resources("cpu=8950m,memory=7597392Ki")
    runner.reserve("cpu=3,memory=256Mi")
    assert runner.reserved("a") == make.resources("cpu=3,memory=256Mi")
    assert runner.available("a") == make.resources("cpu=5950m,memory=7335248Ki")
    runner.reserve("cpu=5,memory=1Gi")
    assert cpu(runner) == 950
    before = make.state(runner.ledger)
    assert runner.refused("cpu=2,memory=1Gi") == "0/1 cluster fits: 1 InsufficientCPU"
    assert make.state(runner.ledger) == before


@pytest.mark.parametrize("how", ["released", "expired"])
def test_release_and_expiry_give_back_exactly_once(runner, how):
    held = runner.reserve("cpu=3,memory=1Gi", duration=make.HOUR)
    runner.reserve("cpu=2,memory=1Gi", duration=9 * make.HOUR)
    runner.pass_time(make.HOUR - make.SECOND)
    runner.expire()
    assert cpu(runner) == 3950
    if how == "released":
        runner.release(held)
    for _ in range(3):
        runner.pass_time(make.SECOND)
        runner.expire()
        runner.release(held)
        assert cpu(runner) == 6950
    assert runner[held].reason == ("Expired" if how == "expired" else "ReleasedByRequester")


def test_recreated_advertisement_loses_no_lock(runner):
    """A store may have lost the cluster's record: its reservations are what says what is reserved."""
    held = runner.reserve("cpu=3,memory=1Gi")
    _, reservations, revision, *_ = runner.kept()
    restored = make.CommandRunner(make.Recorder.restore(WorkingSet([], reservations, revision)))
    assert restored.reserved("a").cpu == 3000
    restored.advertise("a", "cpu=10,memory=8Gi")
    assert cpu(restored) == 7000
    restored.release(held)
    assert cpu(restored) == 10_000


def test_cluster_that_filled_up_under_its_promises_takes_nothing_new_and_recovers(runner):
    held = runner.reserve("cpu=8,memory=1Gi")
    runner.advertise("a", "cpu=10,memory=8Gi", allocated="cpu=5")
    assert cpu(runner) == -3000
    assert runner.refused("cpu=1m,memory=1") == "0/1 cluster fits: 1 InsufficientCPU"
    runner.release(held)
    assert cpu(runner) == 5000
    runner.reserve("cpu=5,memory=1Gi")


def test_removed_cluster_may_come_back_open_and_empty(runner):
    runner.cordon("a")
    runner.remove("a")
    assert not runner.ledger.clusters
    assert runner.advertise("a").cordon is None
    assert not runner.reserved("a")


def test_every_event_counts_once(runner):
    start = runner.ledger.revision
    held = runner.reserve("cpu=1,memory=1Gi")
    assert runner.ledger.revision == runner[held].revision == runner[held].ticket == start + 1
    runner.activate(held)
    assert runner.ledger.revision == runner[held].revision == start + 2
    assert runner[held].ticket == start + 1


def test_unknown_event_is_a_mistake_of_ours():
    with pytest.raises(TypeError, match="unknown event: Event"):
        Ledger().apply(Event(make.T0))


def test_finished_reservations_are_forgotten_after_the_retention(runner):
    held = runner.reserve("cpu=1,memory=1Gi", requester="r", key="k")
    runner.release(held)
    runner.pass_time(make.RETENTION - make.SECOND)
    runner.expire()
    assert held in runner.ledger.reservations
    runner.pass_time(make.SECOND)
    runner.expire()
    assert held not in runner.ledger.reservations
    assert runner.ledger.by_key(ClusterId("r"), RequestKey("k")) is None
    assert list(runner.ledger.by_cluster(ClusterId("a"))) == []
    assert list(runner.ledger.by_cluster(ClusterId("r"))) == []


def test_next_deadline_is_never_after_the_end_of_a_reservation(runner):
    assert runner.ledger.next_deadline() is None
    runner.reserve("cpu=1,memory=1Gi", duration=2 * make.HOUR)
    held = runner.reserve("cpu=1,memory=1Gi", duration=make.HOUR)
    assert runner.ledger.next_deadline() == make.T0 + make.HOUR
    runner.renew(held, 3 * make.HOUR)
    runner.pass_time(make.HOUR)
    runner.expire()
    assert runner[held].is_live
    assert runner.ledger.next_deadline() == make.T0 + 2 * make.HOUR


def test_key_stays_with_who_had_it_last():
    """Two have it, as a replica may see for a moment, and the older one is updated before it goes."""
    old = make.reservation("old", make.request(key="k"), ticket=1)
    new = make.reservation("new", make.request(key="k"), ticket=2)
    ledger = Ledger()
    ledger.apply_changes([old, new, replace(old, message="over"), Archived(old.id)], 4)
    assert ledger.by_key(make.R, RequestKey("k")) == new
    ledger.apply_changes([Archived(new.id)], 5)
    assert ledger.by_key(make.R, RequestKey("k")) is None


def test_deadlines_of_the_finished_do_not_pile_up(runner):
    """A lease for years that is given back at once, again and again, must not cost memory for years."""
    kept = runner.reserve("cpu=1,memory=1Gi", duration=make.HOUR)
    for hours in range(2, 1000):
        runner.renew(kept, hours * make.HOUR)
        runner.release(runner.reserve("cpu=1,memory=1Gi", duration=100_000 * make.HOUR))
        runner.expire(retention=make.NO_TIME)
    assert len(runner.ledger.reservations) == 1
    assert len(runner.ledger._deadlines) < 100  # noqa: SLF001 - only its size shows the leak
    runner.pass_time(999 * make.HOUR)
    runner.expire()
    assert runner[kept].reason == "Expired"


def test_restored_ledger_ends_and_forgets_in_the_order_of_time():
    runner = make.runner(a="cpu=9,memory=9Gi")
    late, soon, sooner = (
        runner.reserve("cpu=1,memory=1Gi", duration=hours * make.HOUR) for hours in (9, 2, 1)
    )
    ended = [runner.reserve("cpu=1,memory=1Gi") for _ in range(3)]
    for found in reversed(ended):
        runner.pass_time(make.MINUTE)
        runner.release(found)
    restored = make.CommandRunner(make.Recorder.restore(runner.kept()), runner.now)
    assert restored.ledger.next_deadline() == runner[sooner].expires_at
    restored.expire(retention=90 * make.SECOND)
    assert ended[2] not in restored.ledger.reservations
    assert set(ended[:2]) <= restored.ledger.reservations.keys()
    restored.pass_time(3 * make.HOUR)
    restored.expire()
    phases = [restored[found].phase for found in (late, soon, sooner)]
    assert phases == ["Reserved", "Released", "Released"]


def test_every_field_of_an_advertisement_is_decided_by_or_known_not_to_be():
    """A new one is to be compared in `Cluster.has_same_offer`, or to be named here."""
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
    runner = make.runner(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    runner.reserve("cpu=1,memory=1Gi", pinned="a")
    runner.pass_time(make.MINUTE)
    runner.advertise("a", **news)
    assert make.state(runner.ledger) == make.state(Ledger.restore(runner.kept()))
    assert audit.invariant_violations(runner.ledger) == []


def test_stale_is_judged_by_when_it_came_and_not_by_the_clock_of_the_sender():
    old_clock = make.advertisement("a", sent_at=make.T0 - 24 * make.HOUR)
    fast_clock = make.advertisement("b", sent_at=make.T0 + 24 * make.HOUR)
    runner = make.runner(a=old_clock, b=fast_clock)
    runner.pass_time(make.STALE_AFTER - make.MOMENT)
    assert runner.target(runner.reserve("cpu=4,memory=1Gi")) == "a"
    assert runner.target(runner.reserve("cpu=3,memory=1Gi")) == "b"
    runner.pass_time(make.MOMENT)
    assert runner.refused("cpu=1,memory=1Gi") == "0/2 clusters fit: 2 Stale"


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
    cluster = make.CommandRunner().advertise("a", valid_for=valid_for)
    assert cluster.valid_until - cluster.received_at == believed_for
    assert cluster.is_stale(make.T0 + believed_for)


def test_replica_follows_nominations_that_moved_within_a_commit():
    """A commit has the last state of each record only; a displaced waiter may get its cluster back."""
    runner = make.runner(a="cpu=4,memory=8Gi")
    runner.reserve("cpu=4,memory=1Gi")
    low = runner.reserve("cpu=3,memory=1Gi", wait=make.HOUR)
    high = runner.reserve("cpu=3,memory=1Gi", wait=make.HOUR, priority=1)
    displaced = runner.ledger.events.index(Nominated(runner.now, low, None))
    runner.release(high)
    assert runner.nominations() == {low: "a"}
    leader, replica = Ledger(), Ledger()
    replica.apply_changes([leader.apply(e) for e in runner.ledger.events[:displaced]], displaced)
    for event in runner.ledger.events[displaced:]:
        leader.apply(event)
    last = [leader.reservation(low), leader.reservation(high)]
    replica.apply_changes(last, leader.revision)
    assert make.state(replica) == make.state(leader)
