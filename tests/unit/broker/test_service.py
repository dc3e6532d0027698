"""The broker's use cases without a network: its rules of time, its readiness, and what it does by itself."""

import asyncio
import contextlib

import pytest
from structlog.testing import capture_logs

import make
from kubelend.broker import service
from kubelend.broker.metrics import Metrics
from kubelend.broker.service import Broker, BrokerRules
from kubelend.core import commands
from kubelend.core.errors import KeyReused, NoCapacity, NotFound, NotReady, StoreFailed, WrongPhase
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import ClusterId, ReservationId
from virtual_time import settled
from waiting import until

A, R = ClusterId("a"), ClusterId("r")
RULES = BrokerRules(stale_after=make.STALE_AFTER, retention=make.HOUR, max_waiting=2)

pytestmark = pytest.mark.broker("service", rules=RULES, fails=True, offers={"a": ("4", "8Gi")})


@contextlib.asynccontextmanager
async def running(broker):
    task = asyncio.create_task(broker.run(retry_after=0.01))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_nothing_is_answered_before_it_is_loaded(store, clock):
    fresh = Broker(lambda: store, clock, RULES, Metrics())
    with pytest.raises(NotReady, match="starting: loading state from the store"):
        await fresh.holds(A)
    await fresh.close()


async def test_run_loads_as_soon_as_the_store_can_be_opened(store, clock):
    store.broken = StoreFailed("not yet")
    fresh = Broker(lambda: store, clock, RULES, Metrics())
    async with running(fresh):
        await until(lambda: fresh.unready == "without its store: not yet")
        store.broken = None
        await until(lambda: fresh.unready is None)
    await fresh.close()


async def test_run_ends_what_is_over_and_archives_what_ended_long_ago(broker, store, clock):
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


async def test_stopping_broker_refuses_what_is_new(store, clock):
    made = Broker(lambda: store, clock, RULES, Metrics())
    await made.load()
    await made.close()
    with pytest.raises(NotReady, match="stopping"):
        await made.holds(A)


async def test_stopping_broker_finishes_what_it_has_begun(store, clock):
    made = Broker(lambda: store, clock, RULES, Metrics())
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


async def test_decision_is_made_on_what_is_assumed_before_it_is_durable(broker, store):
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
async def test_command_that_fails_halfway_leaves_nothing_behind(broker, store, problem):
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
    (told,) = (line for line in logs if "exc_info" in line)
    assert (told["log_level"], told["exc_info"]) == ("error", problem)


async def test_sweep_that_fails_halfway_is_made_up_for(broker, store, monkeypatch):
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


async def test_command_that_is_refused_before_its_first_event_is_no_failure(broker):
    held = await broker.reserve(make.request())
    await broker.release(held.id, Reason.BY_REQUESTER)
    with pytest.raises(WrongPhase):
        await broker.activate(held.id)
    assert broker.unready is None


async def test_refusal_carries_the_explanation(broker):
    with pytest.raises(NoCapacity) as refused:
        await broker.reserve(make.request("cpu=5,memory=1Gi"))
    explanation = refused.value.explanation
    assert explanation is not None
    assert explanation.suggestion is not None
    assert refused.value.hint == explanation.suggestion.text


async def test_key_gives_the_same_reservation_and_none_other(broker):
    asked = make.request("cpu=1,memory=1Gi", key="k")
    first, *again = await asyncio.gather(*(broker.reserve(asked) for _ in range(5)))
    assert {found.id for found in again} == {first.id}
    with pytest.raises(KeyReused):
        await broker.reserve(make.request("cpu=2,memory=1Gi", key="k"))


async def test_stale_advertisement_is_judged_by_our_clock(broker, clock):
    clock.pass_time(make.STALE_AFTER)
    with pytest.raises(NoCapacity, match="1 Stale"):
        await broker.reserve(make.request())
    await broker.advertise(make.advertisement("a", sent_at=make.T0 - 99 * make.HOUR))
    assert (await broker.reserve(make.request())).target == "a"


async def test_another_broker_on_the_same_store_answers_the_same(broker, store, clock):
    held = await broker.reserve(make.request("cpu=1,memory=1Gi", key="k"))
    used = await broker.reserve(make.request("cpu=1,memory=1Gi"))
    used = await broker.activate(used.id)
    waiting = await broker.reserve(make.request("cpu=4,memory=1Gi", wait=make.HOUR))
    heir = Broker(lambda: store, clock, RULES, Metrics())
    await heir.load()
    everything = service.PageRequest(0, 100)
    assert await heir.reservations(lambda _: True, None, everything) == [held, used, waiting]
    assert await heir.cluster(A) == await broker.cluster(A)
    assert await heir.holds(A) == [held]
    await heir.release(used.id, Reason.BY_ADMIN)
    await heir.release(held.id, Reason.BY_ADMIN)
    assert (await heir.reservation(waiting.id)).target == "a"
    await heir.close()


async def test_reservation_is_found_at_hand_in_the_archive_or_not_at_all(broker, clock):
    held = await broker.reserve(make.request())
    released = await broker.release(held.id, Reason.BY_REQUESTER)
    assert await broker.reservation(held.id) == released
    clock.pass_time(2 * make.HOUR)
    await broker.expire()
    assert await broker.reservations(lambda _: True, None, service.PageRequest(0, 10)) == []
    assert await broker.reservation(held.id) == released
    with pytest.raises(NotFound):
        await broker.reservation(ReservationId("rsv-unknown"))


async def test_release_is_idempotent_whenever_it_comes(broker, clock):
    held = await broker.reserve(make.request())
    released = await broker.release(held.id, Reason.BY_REQUESTER)
    assert await broker.release(held.id, Reason.BY_ADMIN) == released
    clock.pass_time(2 * make.HOUR)
    await broker.expire()
    assert await broker.release(held.id, Reason.BY_ADMIN) == released
    with pytest.raises(NotFound):
        await broker.release(ReservationId("rsv-unknown"), Reason.BY_ADMIN)


async def test_stream_is_counted_while_it_is_open_and_closed_whatever_happens(broker):
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


async def test_explanation_changes_nothing(broker, store):
    before = store.commits
    explanation = await broker.explain(make.request("cpu=9,memory=1Gi", wait=make.HOUR), 10)
    assert explanation.fitting == 0
    assert store.commits == before
    assert await broker.reservations(lambda _: True, None, service.PageRequest(0, 10)) == []
