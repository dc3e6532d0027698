"""Keys are reconciled once for all their events, one worker per key; failures are retried, logged once."""

import asyncio
from contextlib import asynccontextmanager
from datetime import timedelta

import msgspec
import pytest
import structlog
from structlog.testing import capture_logs

from kubelend.core.errors import Conflict, LimitExceeded, Unavailable
from kubelend.kits.workqueue import MAX_DELAY, ReconcileQueue
from virtual_time import in_virtual_time, rig_decorator, settled, stopped

SECOND = timedelta(seconds=1)


class Rig:
    """Records reconciles and when they ended."""

    def __init__(self, takes=0.0, chance=0.0, reports_failures=False):
        self.queue: ReconcileQueue[str] = ReconcileQueue(
            "things",
            self.reconcile,
            structlog.get_logger("test"),
            on_failure=self.on_failure if reports_failures else None,
            chance=lambda: chance,
        )
        self.done: list[tuple[float, str]] = []
        self.busy: list[str] = []
        self.most_busy = 0
        self.takes = takes
        self.errors: dict[str, Exception] = {}
        self.asks_for_retry = False
        self.failures: list[tuple[str, str]] = []
        self.task = asyncio.create_task(self.queue.run())

    async def reconcile(self, key):
        assert key not in self.busy, "two workers on one key"
        self.busy.append(key)
        self.most_busy = max(self.most_busy, len(self.busy))
        await asyncio.sleep(self.takes)
        self.busy.remove(key)
        self.done.append((round(asyncio.get_running_loop().time(), 3), key))
        if key in self.errors:
            raise self.errors[key]
        if self.asks_for_retry:
            self.queue.retry(key)

    async def on_failure(self, key, error):
        self.failures.append((key, str(error)))

    @asynccontextmanager
    async def running(self):
        yield
        await stopped(self.task)


queue = rig_decorator(Rig)


@queue()
async def test_keys_are_reconciled_in_their_order_and_each_once(rig):
    for key in "abcab":
        rig.queue.add(key)
    assert len(rig.queue) == 3
    await settled()
    assert rig.done == [(0, "a"), (0, "b"), (0, "c")]
    assert len(rig.queue) == 0


@queue(takes=10)
async def test_keys_are_reconciled_concurrently_but_no_key_twice_at_a_time(rig):
    for key in "abc":
        rig.queue.add(key)
    await asyncio.sleep(1)
    for _ in range(3):
        rig.queue.add("a")
    assert len(rig.queue) == 0
    await asyncio.sleep(100)
    assert rig.most_busy == 3
    assert sorted(rig.done) == [(10, "a"), (10, "b"), (10, "c"), (20, "a")]


@queue()
async def test_delayed_key_is_reconciled_when_it_is_due(rig):
    rig.queue.add_after("a", 5 * SECOND)
    rig.queue.add_after("b", -SECOND)
    assert len(rig.queue) == 0
    await asyncio.sleep(10)
    assert rig.done == [(0, "b"), (5, "a")]


@pytest.mark.parametrize("delays, due", [((5, 3), 3), ((3, 5), 3), ((3, 3), 3), ((3, None, 2), 0)])
@queue()
async def test_earliest_of_several_delays_counts_and_only_that(rig, delays, due):
    for delay in delays:
        rig.queue.add("a") if delay is None else rig.queue.add_after("a", delay * SECOND)
    await asyncio.sleep(10)
    assert rig.done == [(due, "a")]


@queue(takes=10)
async def test_delay_that_ends_while_the_key_is_reconciled_is_not_missed(rig):
    rig.queue.add("a")
    await asyncio.sleep(1)
    rig.queue.add_after("a", 3 * SECOND)
    await asyncio.sleep(100)
    assert rig.done == [(10, "a"), (20, "a")]


def pauses(rig, key, count):
    return [rig.queue.retry(key).total_seconds() for _ in range(count)]


@pytest.mark.parametrize("chance, share", [(0.0, 1.0), (1.0, 0.5)])
async def test_backoff_doubles_up_to_a_maximum_and_jitter_subtracts_up_to_half(chance, share):
    rig = Rig(chance=chance)
    assert pauses(rig, "a", 9) == [share * n for n in (0.5, 1, 2, 4, 8, 16, 32, 60, 60)]
    assert set(pauses(rig, "a", 2000)) == {share * MAX_DELAY.total_seconds()}
    assert rig.queue.retry("b", 100 * SECOND) == 100 * SECOND
    assert rig.queue.retry("b", SECOND / 10) == share * SECOND
    await stopped(rig.task)


@queue(takes=1000)
async def test_hundred_hanging_reconciles_block_no_other_and_leave_nothing_behind(rig):
    for number in range(100):
        rig.queue.add(f"slow {number}")
    await settled()
    rig.takes = 0
    rig.queue.add("quick")
    await settled()
    assert rig.done == [(0, "quick")]
    await asyncio.sleep(1001)
    assert len(rig.done) == 101
    assert len(asyncio.all_tasks()) == 2, "this one, and the one that hands out keys"


@queue()
async def test_retry_now_enqueues_keys_in_backoff_and_keeps_their_failure_count(rig):
    rig.errors["failed"] = Conflict("not yet")
    rig.queue.add("failed")
    await asyncio.sleep(600)
    rig.done.clear()
    rig.queue.add_after("delayed", 5 * SECOND)
    rig.queue.retry("limited", 100 * SECOND)
    rig.queue.retry_now()
    await asyncio.sleep(1)
    rig.errors.clear()
    rig.queue.retry("reconciled since")
    await asyncio.sleep(102)
    rig.queue.retry_now()
    await settled()
    assert rig.done == [
        *((600, "failed"), (601.5, "reconciled since")),
        *((605, "delayed"), (660, "failed"), (700, "limited")),
    ]


@queue()
async def test_failure_is_retried_with_growing_delays_until_it_succeeds(rig):
    rig.errors = {"a": Conflict("not yet"), "b": Conflict("not yet")}
    rig.queue.add("a")
    await asyncio.sleep(4)
    rig.queue.add("b")
    await asyncio.sleep(0.9)
    assert rig.done == [(0, "a"), (0.5, "a"), (1.5, "a"), (3.5, "a"), (4, "b"), (4.5, "b")]
    del rig.errors["a"]
    await asyncio.sleep(10)
    rig.errors["a"] = Conflict("again")
    rig.queue.add("a")
    await asyncio.sleep(1)
    assert [at for at, key in rig.done if key == "a"][4:] == [7.5, 14.9, 15.4], "counted from 0"


@queue()
async def test_reconcile_that_asks_for_a_retry_itself_keeps_its_backoff(rig):
    rig.asks_for_retry = True
    rig.queue.add("a")
    await asyncio.sleep(4)
    assert rig.done == [(0, "a"), (0.5, "a"), (1.5, "a"), (3.5, "a")]


@pytest.mark.parametrize("error", [LimitExceeded, Unavailable])
@queue()
async def test_failure_is_retried_no_earlier_than_its_retry_after(rig, error):
    rig.errors["a"] = error("later", retry_after=30)
    rig.queue.add("a")
    await asyncio.sleep(10)
    rig.queue.retry_now()
    await asyncio.sleep(30)
    assert rig.done == [(0, "a"), (30, "a")]


@queue()
async def test_failure_is_logged_once_until_its_kind_changes_and_so_is_the_recovery(rig):
    with capture_logs() as logs:
        rig.errors["a"] = Conflict("first wording")
        rig.queue.add("a")
        await asyncio.sleep(1)
        rig.errors["a"] = Conflict("other wording")
        await asyncio.sleep(10)
        rig.errors["a"] = LimitExceeded("slow down", retry_after=20)
        await asyncio.sleep(100)
        rig.errors.clear()
        await asyncio.sleep(100)
        rig.queue.add("a")
        rig.queue.add("never failed")
        await settled()
    warning = {"log_level": "warning", "event": "Reconcile failed, will retry"}
    thing = {"kind": "things", "name": "a"}
    assert logs == [
        {**warning, **thing, "error": "first wording", "retry_after": 0.0},
        {**warning, **thing, "error": "slow down", "retry_after": 20},
        {"log_level": "info", "event": "Reconcile recovered", **thing},
    ]


@queue(reports_failures=True)
async def test_each_failure_is_handed_on_instead_of_logged_if_somebody_wants_it(rig):
    rig.errors["a"] = Conflict("not yet")
    with capture_logs() as logs:
        rig.queue.add("a")
        await asyncio.sleep(2)
    assert rig.failures == [("a", "not yet")] * 3
    assert logs == []


@queue()
async def test_object_that_cannot_be_decoded_is_skipped_until_it_changes_and_logged_once(rig):
    rig.errors["odd"] = msgspec.ValidationError("not an int")
    with capture_logs() as logs:
        for key in ("odd", "odd", "good"):
            rig.queue.add(key)
            await asyncio.sleep(100)
    assert [key for _, key in rig.done] == ["odd", "odd", "good"]
    warning = {"log_level": "warning", "event": "Skipping invalid object"}
    assert logs == [{**warning, "kind": "things", "name": "odd", "error": "not an int"}]


@in_virtual_time
async def test_any_other_exception_ends_all_with_its_own_reason():
    rig = Rig(takes=3600)
    rig.queue.add("slow")
    await settled()
    rig.takes, rig.errors["a"] = 0, ZeroDivisionError("a")
    rig.queue.add("a")
    with pytest.raises(ZeroDivisionError, match="a"):
        await rig.task
