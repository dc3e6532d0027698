"""Keys are reconciled once for all their events, one worker per key; failures are retried, logged once."""

import asyncio
from datetime import timedelta

import msgspec
import pytest
import structlog
from structlog.testing import capture_logs

from kubelend.core.errors import Conflict, LimitExceeded, Unavailable
from kubelend.kits.workqueue import MAX_DELAY, ReconcileQueue
from virtual_time import in_virtual_time, settled, stopped

SECOND = timedelta(seconds=1)


class Bench:
    """Records reconciles and when they ended."""

    def __init__(self, takes=0.0, chance=0.0, on_failure=None):
        self.queue: ReconcileQueue[str] = ReconcileQueue(
            "things",
            self.reconcile,
            structlog.get_logger("test"),
            on_failure=on_failure,
            chance=lambda: chance,
        )
        self.done: list[tuple[float, str]] = []
        self.busy: list[str] = []
        self.most_busy = 0
        self.takes = takes
        self.errors: dict[str, Exception] = {}
        self.asks_for_retry = False
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

    async def stop(self):
        await stopped(self.task)


@in_virtual_time
async def test_keys_are_reconciled_in_their_order_and_each_once():
    bench = Bench()
    for key in "abcab":
        bench.queue.add(key)
    assert len(bench.queue) == 3
    await settled()
    assert bench.done == [(0, "a"), (0, "b"), (0, "c")]
    assert len(bench.queue) == 0
    await bench.stop()


@in_virtual_time
async def test_key_that_is_added_to_an_idle_queue_is_reconciled_too():
    bench = Bench()
    await asyncio.sleep(5)
    bench.queue.add("a")
    await settled()
    bench.queue.add("b")
    await settled()
    assert bench.done == [(5, "a"), (5, "b")]
    await bench.stop()


@in_virtual_time
async def test_keys_are_reconciled_concurrently_but_no_key_twice_at_a_time():
    bench = Bench(takes=10)
    for key in "abc":
        bench.queue.add(key)
    await asyncio.sleep(1)
    bench.queue.add("a")
    await asyncio.sleep(100)
    assert bench.most_busy == 3
    assert sorted(bench.done) == [(10, "a"), (10, "b"), (10, "c"), (20, "a")]
    await bench.stop()


@in_virtual_time
async def test_key_that_is_added_while_it_is_reconciled_is_reconciled_once_more():
    bench = Bench(takes=10)
    bench.queue.add("a")
    await asyncio.sleep(1)
    for _ in range(3):
        bench.queue.add("a")
    assert len(bench.queue) == 0
    await asyncio.sleep(100)
    assert bench.done == [(10, "a"), (20, "a")]
    await bench.stop()


@in_virtual_time
async def test_delayed_key_is_reconciled_when_it_is_due():
    bench = Bench()
    bench.queue.add_after("a", 5 * SECOND)
    bench.queue.add_after("b", -SECOND)
    assert len(bench.queue) == 0
    await asyncio.sleep(10)
    assert bench.done == [(0, "b"), (5, "a")]
    await bench.stop()


@pytest.mark.parametrize("delays", [(5, 3), (3, 5), (3, 3)])
@in_virtual_time
async def test_earliest_of_several_delays_counts_and_only_that(delays):
    bench = Bench()
    for delay in delays:
        bench.queue.add_after("a", delay * SECOND)
    await asyncio.sleep(10)
    assert bench.done == [(3, "a")]
    await bench.stop()


@in_virtual_time
async def test_reconcile_now_cancels_the_delayed_one():
    bench = Bench()
    bench.queue.add_after("a", 3 * SECOND)
    bench.queue.add("a")
    bench.queue.add_after("a", 2 * SECOND)
    await asyncio.sleep(10)
    assert bench.done == [(0, "a")]
    await bench.stop()


@in_virtual_time
async def test_delay_that_ends_while_the_key_is_reconciled_is_not_missed():
    bench = Bench(takes=10)
    bench.queue.add("a")
    await asyncio.sleep(1)
    bench.queue.add_after("a", 3 * SECOND)
    await asyncio.sleep(100)
    assert bench.done == [(10, "a"), (20, "a")]
    await bench.stop()


@in_virtual_time
async def test_backoff_doubles_up_to_a_maximum():
    bench = Bench()
    pauses = [bench.queue.retry("a").total_seconds() for _ in range(9)]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    for _ in range(2000):
        assert bench.queue.retry("a") == MAX_DELAY
    await bench.stop()


@in_virtual_time
async def test_jitter_subtracts_up_to_half_of_a_delay():
    bench = Bench(chance=1.0)
    assert [bench.queue.retry("a").total_seconds() for _ in range(3)] == [0.25, 0.5, 1]
    await bench.stop()


@in_virtual_time
async def test_minimum_delay_of_a_retry_is_kept():
    bench = Bench()
    assert bench.queue.retry("a", 100 * SECOND) == 100 * SECOND
    assert bench.queue.retry("a", SECOND / 10) == SECOND
    await bench.stop()


@in_virtual_time
async def test_hundred_hanging_reconciles_block_no_other_and_leave_nothing_behind():
    bench = Bench(takes=1000)
    for number in range(100):
        bench.queue.add(f"slow {number}")
    await settled()
    bench.takes = 0
    bench.queue.add("quick")
    await settled()
    assert bench.done == [(0, "quick")]
    await asyncio.sleep(1001)
    assert len(bench.done) == 101
    assert len(asyncio.all_tasks()) == 2, "this one, and the one that hands out keys"
    await bench.stop()


@in_virtual_time
async def test_retry_now_enqueues_keys_in_backoff_and_keeps_their_failure_count():
    bench = Bench()
    bench.errors["failed"] = Conflict("not yet")
    bench.queue.add("failed")
    await asyncio.sleep(600)
    bench.done.clear()
    bench.queue.add_after("delayed", 5 * SECOND)
    bench.queue.retry("limited", 100 * SECOND)
    bench.queue.retry_now()
    await asyncio.sleep(103)
    assert bench.done == [(600, "failed"), (605, "delayed"), (660, "failed"), (700, "limited")]
    await bench.stop()


@in_virtual_time
async def test_retry_now_ignores_what_was_reconciled_since():
    bench = Bench()
    bench.queue.retry("a")
    await asyncio.sleep(10)
    bench.queue.retry_now()
    await settled()
    assert bench.done == [(0.5, "a")]
    await bench.stop()


@in_virtual_time
async def test_failure_is_retried_with_growing_delays_until_it_succeeds():
    bench = Bench()
    bench.errors = {"a": Conflict("not yet"), "b": Conflict("not yet")}
    bench.queue.add("a")
    await asyncio.sleep(4)
    bench.queue.add("b")
    await asyncio.sleep(0.9)
    assert bench.done == [(0, "a"), (0.5, "a"), (1.5, "a"), (3.5, "a"), (4, "b"), (4.5, "b")]
    del bench.errors["a"]
    await asyncio.sleep(10)
    bench.errors["a"] = Conflict("again")
    bench.queue.add("a")
    await asyncio.sleep(1)
    assert [at for at, key in bench.done if key == "a"][4:] == [7.5, 14.9, 15.4], "counted from 0"
    await bench.stop()


@in_virtual_time
async def test_reconcile_that_asks_for_a_retry_itself_keeps_its_backoff():
    bench = Bench()
    bench.asks_for_retry = True
    bench.queue.add("a")
    await asyncio.sleep(4)
    assert bench.done == [(0, "a"), (0.5, "a"), (1.5, "a"), (3.5, "a")]
    await bench.stop()


@pytest.mark.parametrize("error", [LimitExceeded, Unavailable])
@in_virtual_time
async def test_failure_is_retried_no_earlier_than_its_retry_after(error):
    bench = Bench()
    bench.errors["a"] = error("later", retry_after=30)
    bench.queue.add("a")
    await asyncio.sleep(10)
    bench.queue.retry_now()
    await asyncio.sleep(30)
    assert bench.done == [(0, "a"), (30, "a")]
    await bench.stop()


@in_virtual_time
async def test_failure_is_logged_once_until_its_kind_changes_and_so_is_the_recovery():
    bench = Bench()
    with capture_logs() as logs:
        bench.errors["a"] = Conflict("first wording")
        bench.queue.add("a")
        await asyncio.sleep(1)
        bench.errors["a"] = Conflict("other wording")
        await asyncio.sleep(10)
        bench.errors["a"] = LimitExceeded("slow down", retry_after=20)
        await asyncio.sleep(100)
        bench.errors.clear()
        await asyncio.sleep(100)
        bench.queue.add("a")
        bench.queue.add("never failed")
        await settled()
    warning = {"log_level": "warning", "event": "Reconcile failed, will retry"}
    thing = {"kind": "things", "name": "a"}
    assert logs == [
        {**warning, **thing, "error": "first wording", "retry_after": 0.0},
        {**warning, **thing, "error": "slow down", "retry_after": 20},
        {"log_level": "info", "event": "Reconcile recovered", **thing},
    ]
    await bench.stop()


@in_virtual_time
async def test_each_failure_is_handed_on_instead_of_logged_if_somebody_wants_it():
    failures = []

    async def on_failure(key, error):
        failures.append((key, str(error)))

    bench = Bench(on_failure=on_failure)
    bench.errors["a"] = Conflict("not yet")
    with capture_logs() as logs:
        bench.queue.add("a")
        await asyncio.sleep(2)
    assert failures == [("a", "not yet")] * 3
    assert logs == []
    await bench.stop()


@in_virtual_time
async def test_object_that_cannot_be_decoded_is_skipped_until_it_changes_and_logged_once():
    bench = Bench()
    bench.errors["odd"] = msgspec.ValidationError("not an int")
    with capture_logs() as logs:
        for key in ("odd", "odd", "good"):
            bench.queue.add(key)
            await asyncio.sleep(100)
    assert [key for _, key in bench.done] == ["odd", "odd", "good"]
    assert logs == [
        {
            "log_level": "warning",
            "event": "Skipping invalid object",
            "kind": "things",
            "name": "odd",
            "error": "not an int",
        }
    ]
    await bench.stop()


@in_virtual_time
async def test_any_other_exception_ends_all_with_its_own_reason():
    bench = Bench(takes=3600)
    bench.queue.add("slow")
    await settled()
    bench.takes, bench.errors["a"] = 0, ZeroDivisionError("a")
    bench.queue.add("a")
    with pytest.raises(ZeroDivisionError, match="a"):
        await bench.task
