"""Root tasks live and end together: in order, with names, and with no failure lost."""

import asyncio
import io
import json

import pytest

from kubelend.kits import logs, tasks


@pytest.fixture
def lines(own_logging):
    """What has been logged so far."""
    stream = io.StringIO()
    logs.setup("debug", "json", stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


class Root:
    """A root task that records when it starts and when it has stopped."""

    def __init__(self, name, story):
        self.name = name
        self.story = story
        self.started = asyncio.Event()
        self.may_stop = asyncio.Event()
        self.may_stop.set()

    async def run(self):
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.story.append(f"{self.name} asked to stop")
            await self.may_stop.wait()
            self.story.append(f"{self.name} stopped")


class Boom(Exception):
    pass


async def ends():
    return "whatever"


async def fails(message="the reason"):
    raise Boom(message)


async def test_a_failure_stops_the_others_and_is_raised():
    story: list[str] = []
    with pytest.raises(Boom, match="the reason"):
        await tasks.run_all({"a": Root("a", story).run(), "b": fails()})
    assert story == ["a asked to stop", "a stopped"]


async def test_an_end_stops_the_others_and_says_who_it_was():
    story: list[str] = []
    ended = await tasks.run_all({"a": Root("a", story).run(), "signals": ends()})
    assert ended == "signals"
    assert story == ["a asked to stop", "a stopped"]


async def test_a_failure_is_logged_with_the_name_of_its_task(lines):
    with pytest.raises(Boom):
        await tasks.run_all({"a": Root("a", []).run(), "expiry": fails()})
    (line,) = lines()
    assert (line["level"], line["event"], line["task"]) == ("error", "Root task failed", "expiry")
    assert "Boom: the reason" in line["exception"]


async def test_an_end_is_logged_with_the_name_of_its_task(lines):
    await tasks.run_all({"a": Root("a", []).run(), "expiry": ends()})
    (line,) = lines()
    assert (line["level"], line["event"], line["task"]) == ("debug", "Root task ended", "expiry")


async def test_tasks_have_their_names():
    seen: list[str] = []

    async def run_once():
        seen.extend(task.get_name() for task in asyncio.all_tasks())

    await tasks.run_all({"expiry": run_once()})
    assert "expiry" in seen


async def test_the_last_is_stopped_first_and_each_waits_for_those_after_it():
    story: list[str] = []
    store, server = Root("store", story), Root("server", story)
    server.may_stop.clear()
    running = asyncio.create_task(
        tasks.run_all({"store": store.run(), "server": server.run(), "signals": ends()})
    )
    await server.started.wait()
    await _settle()
    assert story == ["server asked to stop"]
    server.may_stop.set()
    await running
    assert story[1:] == ["server stopped", "store asked to stop", "store stopped"]


async def test_cancelling_stops_all_in_the_same_order(lines):
    story: list[str] = []
    a, b = Root("a", story), Root("b", story)
    running = asyncio.create_task(tasks.run_all({"a": a.run(), "b": b.run()}))
    await b.started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert story == ["b asked to stop", "b stopped", "a asked to stop", "a stopped"]
    assert lines() == []


async def test_cancelling_before_anything_has_started_leaves_nothing_behind():
    running = asyncio.create_task(tasks.run_all({"a": Root("a", []).run(), "b": fails()}))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises((asyncio.CancelledError, Boom)):
        await running


async def test_cancelling_again_stops_all_at_once():
    story: list[str] = []
    a, b = Root("a", story), Root("b", story)
    b.may_stop.clear()
    running = asyncio.create_task(tasks.run_all({"a": a.run(), "b": b.run()}))
    await b.started.wait()
    running.cancel()
    await _settle()
    assert story == ["b asked to stop"]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(story[1:]) == ["a asked to stop", "a stopped"]


async def test_a_failure_while_stopping_is_logged_and_the_first_one_raised(lines):
    async def fails_when_stopped():
        try:
            await asyncio.Event().wait()
        finally:
            raise Boom("in its cleanup")

    with pytest.raises(Boom, match="the reason"):
        await tasks.run_all({"a": fails_when_stopped(), "b": fails()})
    assert [line["task"] for line in lines()] == ["b", "a"]


async def test_a_task_that_takes_its_cancellation_for_an_end_is_no_news(lines):
    async def returns_when_stopped():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    await tasks.run_all({"a": returns_when_stopped(), "b": ends()})
    assert [line["task"] for line in lines()] == ["b"]


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")], ids=["end first", "failure first"])
async def test_a_failure_counts_more_than_an_end_at_the_same_moment(order):
    both = {"a": ends(), "b": fails()}
    with pytest.raises(Boom):
        await tasks.run_all({name: both[name] for name in order})


async def test_a_task_that_was_cancelled_from_outside_stops_the_others():
    async def gives_up():
        raise asyncio.CancelledError

    story: list[str] = []
    assert await tasks.run_all({"a": Root("a", story).run(), "b": gives_up()}) == "b"
    assert story == ["a asked to stop", "a stopped"]


async def _settle():
    """Let every task that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)
