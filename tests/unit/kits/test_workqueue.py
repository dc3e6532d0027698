"""Keys are looked at once for all that happened, one at a time each, and again when somebody says so."""

import asyncio
from datetime import timedelta

import pytest

from kubelend.kits.workqueue import MAX_DELAY, Workqueue
from virtual_time import in_virtual_time, settled, stopped

SECOND = timedelta(seconds=1)


class Bench:
    """Looks, and when they were over."""

    def __init__(self, takes=0.0, chance=0.0):
        self.queue: Workqueue[str] = Workqueue(lambda: chance)
        self.done: list[tuple[float, str]] = []
        self.busy: list[str] = []
        self.most_busy = 0
        self.takes = takes
        self._task = asyncio.create_task(self.queue.run(self.handle))

    async def handle(self, key):
        assert key not in self.busy, "two workers on one key"
        self.busy.append(key)
        self.most_busy = max(self.most_busy, len(self.busy))
        await asyncio.sleep(self.takes)
        self.busy.remove(key)
        self.done.append((round(asyncio.get_running_loop().time(), 3), key))

    async def stop(self):
        await stopped(self._task)


@in_virtual_time
async def test_what_is_added_is_looked_at_in_its_order_and_each_key_once():
    bench = Bench()
    for key in "abcab":
        bench.queue.add(key)
    assert len(bench.queue) == 3
    await settled()
    assert bench.done == [(0, "a"), (0, "b"), (0, "c")]
    assert len(bench.queue) == 0
    await bench.stop()


@in_virtual_time
async def test_what_comes_after_a_while_is_looked_at_too():
    bench = Bench()
    await asyncio.sleep(5)
    bench.queue.add("a")
    await settled()
    bench.queue.add("b")
    await settled()
    assert bench.done == [(5, "a"), (5, "b")]
    await bench.stop()


@in_virtual_time
async def test_keys_are_worked_on_at_the_same_time_but_one_key_never_is():
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
async def test_what_is_added_while_it_is_worked_on_is_looked_at_once_more():
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
async def test_what_is_added_for_later_comes_then():
    bench = Bench()
    bench.queue.add_after("a", 5 * SECOND)
    bench.queue.add_after("b", -SECOND)
    assert len(bench.queue) == 0
    await asyncio.sleep(10)
    assert bench.done == [(0, "b"), (5, "a")]
    await bench.stop()


@pytest.mark.parametrize("delays", [(5, 3), (3, 5), (3, 3)])
@in_virtual_time
async def test_of_several_times_the_earliest_counts_and_only_that(delays):
    bench = Bench()
    for delay in delays:
        bench.queue.add_after("a", delay * SECOND)
    await asyncio.sleep(10)
    assert bench.done == [(3, "a")]
    await bench.stop()


@in_virtual_time
async def test_what_is_looked_at_now_is_not_looked_at_for_the_same_reason_later():
    bench = Bench()
    bench.queue.add_after("a", 3 * SECOND)
    bench.queue.add("a")
    bench.queue.add_after("a", 2 * SECOND)
    await asyncio.sleep(10)
    assert bench.done == [(0, "a")]
    await bench.stop()


@in_virtual_time
async def test_a_time_that_comes_while_it_is_worked_on_is_not_missed():
    bench = Bench(takes=10)
    bench.queue.add("a")
    await asyncio.sleep(1)
    bench.queue.add_after("a", 3 * SECOND)
    await asyncio.sleep(100)
    assert bench.done == [(10, "a"), (20, "a")]
    await bench.stop()


@in_virtual_time
async def test_pauses_double_up_to_a_longest():
    bench = Bench()
    pauses = [bench.queue.retry("a").total_seconds() for _ in range(9)]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    for _ in range(2000):
        assert bench.queue.retry("a") == MAX_DELAY
    await bench.stop()


@in_virtual_time
async def test_chance_takes_up_to_half_of_a_pause_away():
    bench = Bench(chance=1.0)
    assert [bench.queue.retry("a").total_seconds() for _ in range(3)] == [0.25, 0.5, 1]
    await bench.stop()


@in_virtual_time
async def test_a_retry_comes_after_its_pause():
    bench = Bench()
    bench.queue.retry("a")
    await asyncio.sleep(10)
    bench.queue.retry("a")
    await asyncio.sleep(10)
    assert bench.done == [(0.5, "a"), (11, "a")]
    await bench.stop()


@in_virtual_time
async def test_failures_are_counted_by_key_and_until_they_are_forgotten():
    bench = Bench()
    for _ in range(3):
        bench.queue.retry("a")
    assert bench.queue.retry("b").total_seconds() == 0.5
    bench.queue.forget("a")
    bench.queue.forget("never failed")
    assert bench.queue.retry("a").total_seconds() == 0.5
    await bench.stop()


@in_virtual_time
async def test_who_wants_to_be_left_in_peace_is_longer_than_any_pause():
    bench = Bench()
    assert bench.queue.retry("a", 100 * SECOND) == 100 * SECOND
    await asyncio.sleep(101)
    assert bench.done == [(100, "a")]
    assert bench.queue.retry("a", SECOND / 10) == SECOND
    await bench.stop()


@in_virtual_time
async def test_a_hundred_that_hang_keep_no_other_waiting_and_leave_nothing_behind():
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
async def test_a_hurry_looks_at_what_failed_and_counts_its_failures_on():
    bench = Bench()
    for _ in range(8):
        bench.queue.retry("failed")
    bench.queue.add_after("has its time", 5 * SECOND)
    bench.queue.retry("wants peace", 100 * SECOND)
    bench.queue.retry_now()
    await settled()
    assert bench.done == [(0, "failed")]
    assert bench.queue.retry("failed") == MAX_DELAY
    await asyncio.sleep(200)
    assert [key for _, key in bench.done[1:]] == ["has its time", "failed", "wants peace"]
    await bench.stop()


@in_virtual_time
async def test_a_hurry_finds_nothing_of_what_was_looked_at_since():
    bench = Bench()
    bench.queue.retry("a")
    await asyncio.sleep(10)
    bench.queue.retry_now()
    await settled()
    assert bench.done == [(0.5, "a")]
    await bench.stop()


@in_virtual_time
async def test_what_a_look_raises_ends_the_work():
    queue: Workqueue[str] = Workqueue()

    async def handle(key):
        raise ZeroDivisionError(key)

    queue.add("a")
    with pytest.raises(ZeroDivisionError, match="a"):
        await queue.run(handle)
