"""Of all that is received about a reservation the newest counts, and subscribers get changes only."""

import asyncio
import itertools

import pytest
from msgspec.structs import replace

import make
from fake_broker import FakeBroker
from kubelend.agent import reservation_cache
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.core.errors import BrokerUnreachable, NotFound
from kubelend.core.lifecycle import Phase
from kubelend.wire import bodies
from virtual_time import in_virtual_time, now, settled


def body(id="rsv-1", *, revision=0, phase=Phase.RESERVED, message=""):
    return bodies.Reservation(
        id=id,
        requester_id="r",
        target_cluster_id="a",
        requested_resources=bodies.Quantities("1", "1Gi"),
        status=bodies.ReservationStatus(phase.value, message),
        created_at=make.T0,
        revision=revision,
    )


@pytest.fixture
def known():
    return ReservationCache()


@pytest.fixture
def changes(known):
    changes: list[str] = []
    known.subscribe(changes.append)
    return changes


# -- the order


def test_newest_revision_stays_in_whatever_order_they_arrive():
    states = [body(revision=number, message=str(number)) for number in range(1, 5)]
    for order in itertools.permutations(states):
        known = ReservationCache()
        known.put_instructions(order)
        assert known.find("rsv-1") == states[-1]


def test_duplicate_or_older_state_is_no_change(known, changes):
    assert known.put(body(revision=3)) is True
    assert known.put(body(revision=3)) is False
    assert known.put(body(revision=2, phase=Phase.RELEASED)) is False
    assert changes == ["rsv-1"]


def test_without_revisions_the_last_state_counts(known, changes):
    for phase in [Phase.RESERVED, Phase.ACTIVE, Phase.RELEASED]:
        assert known.put(body(phase=phase)) is True
    assert known.put(body(phase=Phase.RELEASED)) is False
    assert changes == ["rsv-1"] * 3


def test_each_reservation_has_its_own_order(known):
    known.put(body("rsv-1", revision=9))
    assert known.put(body("rsv-2", revision=1)) is True
    assert known.put(body("rsv-2", revision=2)) is True
    assert known.find("rsv-2") == body("rsv-2", revision=2)


# -- gaps


def test_after_a_gap_the_response_to_a_later_call_is_stored_though_it_seems_older(known, changes):
    known.put(body(revision=100, phase=Phase.ACTIVE))
    known.mark_gap()
    sent_at = known.sequence()
    assert known.put(body(revision=5), sent_at) is True
    assert known.find("rsv-1") == body(revision=5)
    assert known.put(body(revision=4), sent_at) is False, "from here on its own order counts"
    assert known.put(body(revision=6), sent_at) is True
    assert changes == ["rsv-1"] * 3


def test_without_a_gap_no_response_replaces_a_newer_state(known):
    known.mark_gap()
    known.put(body(revision=9))
    assert known.put(body(revision=4), known.sequence()) is False


def test_after_a_gap_the_response_to_an_earlier_call_replaces_nothing(known):
    known.put(body(revision=4))
    sent_at = known.sequence()
    known.put(body(revision=9, phase=Phase.ACTIVE))
    known.mark_gap()
    assert known.put(body(revision=5), sent_at) is False
    assert known.put(body(revision=5)) is False
    assert known.find("rsv-1") == body(revision=9, phase=Phase.ACTIVE)


def test_unfinished_reservations_without_an_update_since_then_are_named(known):
    known.put_instructions(
        [body("same"), body("silent"), body("over", phase=Phase.RELEASED), body("gone")]
    )
    since = known.sequence()
    known.put_instructions([body("same"), body("new")])
    known.remove("gone")
    assert known.not_updated_since(since) == ["silent"]


# -- subscribers


def test_subscribers_find_the_new_state_when_they_are_called(known, changes):
    found: list[object] = []
    known.subscribe(lambda name: found.append(known.find(name)))
    known.put(body(revision=5))
    known.remove("rsv-1")
    known.remove("rsv-1")
    assert known.put(body(revision=4)) is True, "a removed one may come again"
    known.put(body("rsv-2"))
    assert found == [body(revision=5), None, body(revision=4), body("rsv-2")]
    assert changes == ["rsv-1"] * 3 + ["rsv-2"]


def test_all_who_wait_for_a_reconnect_are_called(known):
    calls: list[str] = []
    known.on_reconnect(lambda: calls.append("one"))
    known.on_reconnect(lambda: calls.append("two"))
    known.notify_reconnected()
    assert calls == ["one", "two"]


def test_unfinished_reservations_may_change_while_they_are_iterated(known):
    for phase in Phase:
        known.put(body(phase.value, phase=phase))
    assert {found.id for found in known.unfinished()} == {"Pending", "Reserved", "Active"}
    for found in known.unfinished():
        known.remove(found.id)
        known.put(body(f"{found.id}-again"))
    assert len(known.unfinished()) == 3


# -- fetching


@pytest.fixture
def broker():
    return FakeBroker("me", make.runner(me="cpu=4,memory=8Gi"))


@pytest.fixture
def reserved(broker):
    return broker.runner.reserve("cpu=1,memory=1Gi")


@in_virtual_time
async def test_fetched_state_is_cached(broker, known, reserved):
    assert await known.fetch(broker, reserved) == broker.body(reserved)
    assert known.find(reserved) == broker.body(reserved)


@in_virtual_time
async def test_state_that_arrives_during_a_fetch_is_newer(broker, known, reserved):
    newer = replace(broker.body(reserved), revision=1000)
    broker.seconds["find"] = 1
    fetch = asyncio.create_task(known.fetch(broker, reserved))
    await settled()
    known.put(newer)
    assert await fetch == newer


@in_virtual_time
async def test_reservation_that_the_broker_does_not_know_is_removed(broker, known, reserved):
    known.put(broker.body(reserved))
    broker.errors["find"] = NotFound("none")
    assert await known.fetch(broker, reserved) is None
    assert known.find(reserved) is None


@in_virtual_time
async def test_broker_that_hangs_is_unreachable_and_the_known_state_stays(broker, known, reserved):
    known.put(broker.body(reserved))
    broker.seconds["find"] = 1000
    with pytest.raises(BrokerUnreachable, match="within 10s"):
        await known.fetch(broker, reserved)
    assert now() - make.T0 == reservation_cache.CALL_TIMEOUT
    assert known.find(reserved) is not None
