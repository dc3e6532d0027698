"""Use cases of the broker: lifecycle, reservations, failover, views and IDs."""

import asyncio
import contextlib
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

import make
from kubelend.broker import service
from kubelend.broker.metrics import BrokerMetrics
from kubelend.broker.service import Broker, BrokerRules
from kubelend.broker.streams import Subscription
from kubelend.broker.writer import FAILOVER_PAUSE
from kubelend.core import commands, failover
from kubelend.core.commands import WaitLimits
from kubelend.core.errors import (
    Conflict,
    NoCapacity,
    NotFound,
    NotReady,
    StoreFailed,
    Unavailable,
    WrongPhase,
)
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import ClusterId, Reservation, ReservationId
from virtual_time import in_virtual_time, settled
from waiting import until

A, B, R = ClusterId("a"), ClusterId("b"), ClusterId("r")
RULES = BrokerRules(stale_after=make.STALE_AFTER, retention=make.HOUR, waiting=WaitLimits(2))
pytestmark = pytest.mark.broker("service", rules=RULES, fails=True, offers={"a": ("4", "8Gi")})


@contextlib.asynccontextmanager
async def running(broker):
    task = asyncio.create_task(broker.run(retry_after=0.01))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_run_loads_as_soon_as_the_store_can_be_opened(store, clock):
    store.broken = StoreFailed("not yet")
    fresh = Broker(lambda: store, clock, RULES, BrokerMetrics())
    with pytest.raises(NotReady, match="starting: loading state from the store"):
        await fresh.holds(A)
    async with running(fresh):
        await until(lambda: fresh.unready == "without its store: not yet")
        store.broken = None
        await until(lambda: fresh.unready is None)
    await fresh.close()


async def test_run_expires_and_archives_reservations(broker, store, clock):
    held = await broker.reserve(make.request("cpu=1,memory=1Gi", duration=make.HOUR))
    waiting = await broker.reserve(make.request("cpu=9,memory=1Gi", wait=2 * make.HOUR))
    async with running(broker):
        clock.pass_time(make.HOUR)
        await until(lambda: phases(store) == {held.id: "Released", waiting.id: "Pending"})
        clock.pass_time(make.HOUR)
        await until(lambda: phases(store) == {waiting.id: "Failed"})
        clock.pass_time(make.HOUR)
        await until(lambda: phases(store) == {})
    found = await broker.reservation(held.id)
    assert (found.phase, found.reason) == (Phase.RELEASED, Reason.EXPIRED)


def phases(store):
    return {found.id: found.phase.value for found in store.kept.load().reservations}


async def test_run_reloads_after_a_failure_while_expiring(broker, store, clock):
    held = await broker.reserve(make.request(duration=make.HOUR))
    async with running(broker):
        store.broken = StoreFailed("for a moment")
        clock.pass_time(make.HOUR)
        await until(lambda: broker.unready is not None)
        store.broken = None
        await until(lambda: broker.unready is None)
        await until(lambda: phases(store) == {held.id: "Released"})


async def test_stopping_broker_finishes_pending_requests(store, clock):
    made = Broker(lambda: store, clock, RULES, BrokerMetrics())
    await made.load()
    store.hold()
    call = asyncio.create_task(made.advertise(make.advertisement("a")))
    await until(lambda: store.commits == 1)
    closing = asyncio.create_task(made.close())
    await asyncio.sleep(0)
    store.let_go()
    view, _ = await call
    await closing
    assert view.cluster.id == "a"
    assert [found.id for found in store.kept.load().clusters] == ["a"]
    with pytest.raises(NotReady, match="stopping"):
        await made.holds(A)


async def test_decision_includes_changes_that_are_not_durable_yet(broker, store):
    """Two at once cannot both have the last piece, however slow the disk is."""
    asked = store.prepared
    store.hold()
    calls = [
        asyncio.create_task(broker.reserve(make.request("cpu=3,memory=1Gi"))) for _ in range(2)
    ]
    await settled()
    assert store.prepared == asked + 1
    assert not any(call.done() for call in calls)
    store.let_go()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NoCapacity", "Reservation"]


@pytest.mark.parametrize("problem", [ValueError("a bug"), WrongPhase("too late")], ids=repr)
async def test_command_that_fails_after_an_event_changes_nothing(broker, store, problem):
    def halfway(ledger, now):
        yield from commands.advertise(ledger, make.advertisement("b"), make.STALE_AFTER, now)
        raise problem

    async with running(broker):
        with capture_logs() as logs, pytest.raises(type(problem)):
            await broker.change(halfway, lambda _, answer: answer)
        assert (broker.unready or "").startswith(
            "without its store: a command failed after applying events"
        )
        await until(lambda: broker.unready is None)
        assert list(broker.current()[0].clusters) == ["a"]
        await broker.reserve(make.request())
    assert [found.id for found in store.kept.load().clusters] == ["a"]
    (line,) = (line for line in logs if "exc_info" in line)
    assert (line["log_level"], line["exc_info"]) == ("error", problem)


async def test_expiry_that_fails_after_an_event_is_repeated(broker, store, monkeypatch):
    whole, tries = commands.expire_reservations, []

    def halfway_at_first(ledger, retention, now):
        tries.append(now)
        if len(tries) == 1:
            yield from commands.advertise(ledger, make.advertisement("b"), make.STALE_AFTER, now)
            raise ZeroDivisionError
        yield from whole(ledger, retention, now)

    monkeypatch.setattr(commands, "expire_reservations", halfway_at_first)
    async with running(broker):
        with capture_logs() as logs:
            await until(lambda: len(tries) > 1 and broker.unready is None)
        assert list(broker.current()[0].clusters) == ["a"]
    assert [line["log_level"] for line in logs if "exc_info" in line] == ["error"]


async def test_restarted_broker_answers_the_same(broker, store, clock):
    held = await broker.reserve(make.request("cpu=1,memory=1Gi", key="k"))
    used = await broker.reserve(make.request("cpu=1,memory=1Gi"))
    used = await broker.activate(used.id)
    waiting = await broker.reserve(make.request("cpu=4,memory=1Gi", wait=make.HOUR))
    heir = Broker(lambda: store, clock, RULES, BrokerMetrics())
    await heir.load()
    everything = service.PageRequest(0, 100)
    assert await heir.reservations(lambda _: True, None, everything) == [held, used, waiting]
    assert await heir.cluster(A) == await broker.cluster(A)
    assert await heir.holds(A) == [held]
    await heir.release(used.id, Reason.BY_ADMIN)
    await heir.release(held.id, Reason.BY_ADMIN)
    assert (await heir.reservation(waiting.id)).target == "a"
    await heir.close()


async def test_request_after_an_outage_is_rejected_only_when_clusters_had_time_to_advertise(
    broker, store, clock
):
    clock.pass_time(make.STALE_AFTER)
    heir = Broker(lambda: store, clock, RULES, BrokerMetrics())
    await heir.load()
    with pytest.raises(Unavailable, match="1 clusters have not advertised since") as raised:
        await heir.reserve(make.request(requester=R))
    assert raised.value.retry_after
    with pytest.raises(NoCapacity):  # its own advertisement changes nothing
        await heir.reserve(make.request(requester=A))
    clock.pass_time(service.RECOVERY_PERIOD)
    with pytest.raises(NoCapacity):
        await heir.reserve(make.request(requester=R))
    await heir.close()


async def test_released_reservation_is_found_and_released_again_also_in_the_archive(broker, clock):
    held = await broker.reserve(make.request())
    released = await broker.release(held.id, Reason.BY_REQUESTER)
    with pytest.raises(WrongPhase):
        await broker.activate(held.id)
    assert broker.unready is None, "a refused command is no failure"
    for _ in range(2):
        assert await broker.reservation(held.id) == released
        assert await broker.release(held.id, Reason.BY_ADMIN) == released
        clock.pass_time(2 * make.HOUR)
        await broker.expire()
    assert await broker.reservations(lambda _: True, None, service.PageRequest(0, 10)) == []
    for call in (broker.reservation, lambda name: broker.release(name, Reason.BY_ADMIN)):
        with pytest.raises(NotFound):
            await call(ReservationId("rsv-unknown"))


async def test_explanation_and_refusal_change_nothing(broker, store):
    before = store.commits
    explanation = await broker.explain(make.request("cpu=9,memory=1Gi", wait=make.HOUR), 10)
    assert explanation.fitting == 0
    with pytest.raises(NoCapacity) as refused:
        await broker.reserve(make.request("cpu=5,memory=1Gi"))
    assert refused.value.explanation is not None
    assert refused.value.explanation.suggestion is not None
    assert refused.value.hint == refused.value.explanation.suggestion.text
    assert store.commits == before
    assert await broker.reservations(lambda _: True, None, service.PageRequest(0, 10)) == []


async def test_stream_is_counted_while_open_and_closed_after_an_error(broker):
    async def use(fail):
        async with broker.stream(A, None) as opening:
            assert broker.streams.count(A) == 1
            assert opening.resumed is False
            if fail:
                raise ConnectionResetError

    await use(fail=False)
    with pytest.raises(ConnectionResetError):
        await use(fail=True)
    assert len(broker.streams) == 0


# -- listeners and records


MINE = ReservationId("mine")


async def test_listeners_get_committed_changes_and_reloads(broker, store):
    received = []
    broker.listeners.append(
        lambda changes: received.append(
            None if changes is None else [one for one in changes if isinstance(one, Reservation)]
        )
    )
    held = await broker.reserve(make.request())
    assert received == [[held]]
    await broker.load()
    assert received == [[held], None]


async def test_reservation_may_have_a_chosen_id(broker):
    held = await broker.reserve(make.request(key="one"), MINE)
    assert held.id == MINE
    assert await broker.reserve(make.request(key="one"), MINE) == held
    with pytest.raises(Conflict, match="mine already exists"):
        await broker.reserve(make.request(key="two"), MINE)
    await broker.release_and_archive(MINE, Reason.DELETED)
    assert (await broker.reserve(make.request(key="two"), MINE)).id == MINE


async def test_record_is_rewritten_unchanged(broker, store):
    held = await broker.reserve(make.request())
    before = store.commits
    await broker.rewrite_record(held)
    assert store.commits == before + 1
    revision = broker.current()[0].revision
    released = await broker.release(held.id, Reason.BY_ADMIN)
    before = store.commits
    await broker.rewrite_record(held)
    assert store.commits == before
    assert broker.current()[0].reservation(held.id) == released
    assert broker.current()[0].revision == revision + 1


# -- failover


FAILOVER_RULES = BrokerRules(stale_after=make.MINUTE, lost_after=make.MINUTE)
STEP = 5 * make.SECOND

with_failover = pytest.mark.broker(
    "service", rules=FAILOVER_RULES, fails=True, offers={"a": ("8", "8Gi"), "b": ("4", "4Gi")}
)


async def fill(broker):
    await broker.advertise(make.advertisement("a", "cpu=8,memory=8Gi"))
    await broker.advertise(make.advertisement("b", "cpu=4,memory=4Gi"))


@contextlib.asynccontextmanager
async def failing_over(store, clock, patience=0.01):
    """A running broker."""
    made = Broker(lambda: store, clock, FAILOVER_RULES, BrokerMetrics())
    task = asyncio.create_task(made.run(patience))
    try:
        await until(lambda: made.unready is None)
        await fill(made)
        yield made
    finally:
        task.cancel()
        await asyncio.wait([task])
        await made.close()


def targets(store):
    return {found.target for found in store.kept.load().reservations}


async def advance(broker, clock, duration):
    """Time passes while only `b` advertises."""
    until = clock.now + duration
    while clock.now < until:
        clock.pass_time(STEP)
        await broker.advertise(make.advertisement("b", "cpu=4,memory=4Gi"))
        await broker.expire()


async def target(broker, held):
    return (await broker.reservation(held.id)).target


@with_failover
async def test_both_sides_receive_the_failover(broker, clock):
    held = await broker.reserve(make.request())
    async with broker.stream(R, None) as requester, broker.stream(B, None) as provider:
        await advance(broker, clock, 2 * make.MINUTE)
        (moved,) = await requester.subscription.read(1.0)
        assert (moved.id, moved.target, moved.left) == (held.id, "b", ("a",))
        assert await provider.subscription.read(1.0) == [moved]
    async with broker.stream(A, None) as opening:
        assert moved in opening.changes, "it receives it when it comes back"


@in_virtual_time
@with_failover
async def test_large_failover_continues_after_a_short_pause(store, clock):
    patience, portions = 2.0, 3
    async with failing_over(store, clock, patience) as broker:
        wanted = make.request("cpu=1m,memory=1Mi")
        many = [
            broker.reserve(wanted)
            for _ in range((portions - 1) * failover.MAX_ATTEMPTS_PER_RUN + 1)
        ]
        await asyncio.gather(*many)
        await advance(broker, clock, 2 * make.MINUTE - STEP)
        clock.pass_time(STEP)
        # The usual pause is over when the first portion moves; the others follow more quickly.
        await until(lambda: targets(store) == {"b"}, patience + 2 * portions * FAILOVER_PAUSE)


@with_failover
async def test_store_failure_does_not_count_as_silence_of_providers(store, clock):
    async with failing_over(store, clock) as broker:
        held = await broker.reserve(make.request(duration=9 * make.HOUR))
        await advance(broker, clock, 2 * make.MINUTE - STEP)
        store.broken = StoreFailed("for a moment")
        with pytest.raises(StoreFailed):
            await broker.advertise(make.advertisement("b", "cpu=4,memory=4Gi"))
        clock.pass_time(STEP)
        store.broken = None
        await until(lambda: broker.unready is None)
        await advance(broker, clock, make.MINUTE - STEP)
        assert await target(broker, held) == "a"
        await advance(broker, clock, STEP)
        assert await target(broker, held) == "b"


# -- views


@pytest.fixture
def runner():
    return make.runner(a="cpu=8,memory=8Gi", b="cpu=4,memory=8Gi")


def opening(runner, cluster, after):
    return service.start_stream(
        runner.ledger, Subscription(ClusterId(cluster), runner.ledger.revision), after
    )


def ids(news):
    return [found.id for found in news]


def test_holds_are_the_reserved_reservations_oldest_first(runner):
    first, second, third, _ = [
        runner.reserve("cpu=1,memory=1Gi", pinned=target) for target in ("a", "a", "a", "b")
    ]
    runner.activate(second)
    assert ids(service.held_reservations(runner.ledger, A)) == [first, third]
    runner.release(first)
    assert ids(service.held_reservations(runner.ledger, A)) == [third]
    assert service.held_reservations(runner.ledger, ClusterId("nobody")) == []


@pytest.mark.parametrize("cluster", [None, R], ids=["all", "one cluster's"])
def test_pages_have_no_gap_and_no_repetition(runner, cluster):
    made = [runner.reserve("cpu=1m,memory=1Mi") for _ in range(10)]
    runner.renew(made[0], 9 * make.HOUR)
    runner.release(made[5])
    seen, after = [], 0
    while page := service.reservations_page(
        runner.ledger, lambda found: found.id != made[3], cluster, service.PageRequest(after, 3)
    ):
        assert len(page) <= 3
        seen += ids(page)
        after = page[-1].ticket
    assert seen == made[:3] + made[4:], "but what the filter leaves out"


def test_stream_is_not_resumed_from_a_future_or_compacted_revision(runner):
    over = runner.reserve("cpu=1,memory=1Gi")
    runner.release(over)
    ended = runner.ledger.revision
    assert opening(runner, "r", ended + 1).resumed is False
    assert opening(runner, "r", ended - 1).resumed is True
    runner.pass_time(make.RETENTION + make.SECOND)
    runner.expire()
    assert opening(runner, "r", ended - 1).resumed is False
    assert opening(runner, "r", ended).resumed is True


def test_resumed_stream_has_the_reservation_that_the_provider_refused(runner):
    made = runner.reserve("cpu=1,memory=1Gi", pinned=None)
    provider = runner.target(made)
    seen = runner.ledger.revision
    runner.refuse(made, provider)
    assert ids(opening(runner, provider, seen).changes) == [made]


# -- reservation IDs


LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@given(st.text(min_size=1, max_size=64))
@example("x" * 64)
def test_ids_are_unique_dns_labels_for_any_requester(requester):
    names = {service.new_reservation_id(ClusterId(requester)) for _ in range(200)}
    assert len(names) == 200
    for name in names:
        assert name.startswith("rsv-")
        assert LABEL.fullmatch(name)


@pytest.mark.parametrize(
    "requester, start",
    [
        ("agent-cluster-1", "rsv-agent-cluster-1-"),
        ("Team A/Cluster_1", "rsv-team-a-cluster-1-"),
        ("--x--", "rsv-x-"),
        ("日本", "rsv-cluster-"),
        ("ÄÖÜ", "rsv-cluster-"),
    ],
)
def test_id_begins_with_its_requester(requester, start):
    assert service.new_reservation_id(ClusterId(requester)).startswith(start)
