"""Root tasks, child processes and the delays between retries."""

import asyncio
import io
import json
import sys
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubelend.core.errors import Unavailable
from kubelend.kits import logs, subprocesses, tasks
from kubelend.kits.backoff import NO_RETRIES, Backoff

TOKEN = "eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl"
PEM = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\n-----END PRIVATE KEY-----"


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


async def gives_up():
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    "ending, level, event",
    [
        (fails, "error", "Root task failed"),
        (ends, "debug", "Root task ended"),
        (gives_up, "debug", "Root task ended"),
    ],
)
async def test_first_end_stops_the_others_and_is_logged_with_its_name(lines, ending, level, event):
    """A failure is raised, also if another task ends just before it."""
    story: list[str] = []
    roots = {"a": Root("a", story).run(), "expiry": ending()}
    if ending is fails:
        with pytest.raises(Boom, match="the reason"):
            await tasks.run_all({"signals": ends(), **roots})
    else:
        assert await tasks.run_all(roots) == "expiry"
    assert story == ["a asked to stop", "a stopped"]
    (line,) = (line for line in lines() if line["task"] == "expiry")
    assert (line["level"], line["event"]) == (level, event)
    assert ("Boom: the reason" in line.get("exception", "")) == (ending is fails)


async def test_tasks_are_stopped_one_by_one_in_reverse_order():
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


async def test_failure_while_stopping_is_logged_and_the_first_one_raised(lines):
    async def fails_when_stopped():
        try:
            await asyncio.Event().wait()
        finally:
            raise Boom("in its cleanup")

    with pytest.raises(Boom, match="the reason"):
        await tasks.run_all({"a": fails_when_stopped(), "b": fails()})
    assert [line["task"] for line in lines()] == ["b", "a"]


async def _settle():
    """Let every task that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


# -- child processes


@pytest.mark.parametrize(
    "output, line",
    [
        (b"", ""),
        (b"word " * 100, ("word " * 100)[: subprocesses.MAX_LINE_LENGTH]),
        (b"\n \n", ""),
        (b"first\nlast\n\n", "last"),
        (b"\x1b[31m ERRO \x1b[0m no route\r\n", "ERRO no route"),
        (b"bell\x07 and\ttab", "bell and tab"),
        (b"not \xff text", "not \ufffd text"),
        (b"x" * 500, "[redacted]"),
        (f"refused: {TOKEN}".encode(), "refused: [redacted]"),
        (b"at https://me:pass@host/", "at https://[redacted]@host/"),
        (b"Authorization: Bearer abc.def", "Authorization: [redacted]"),
        (b'{"token": "hunter2"}', '{"[redacted]'),
        (b"password=hunter2 is wrong", "[redacted] is wrong"),
        (f"key: {PEM}".encode(), "key:"),
        (f"half a key: {PEM[:50]}".encode(), "half a key:"),
        (b"data " + b"QUJD" * 20, "data [redacted]"),
        (b"rsv-a-cluster-with-a-long-name-0123456789abcdef is gone", None),
    ],
)
def test_error_line_is_the_last_one_without_secrets(output, line):
    found = subprocesses.last_error_line(output)
    assert found == (output.decode() if line is None else line)


async def run_python(program, timeout=timedelta(seconds=10)):
    return await subprocesses.run_program(sys.executable, "-c", program, timeout=timeout)


async def test_output_is_returned_and_errors_are_not():
    program = "import sys; print('out'); print('err', file=sys.stderr)"
    assert await run_python(program) == b"out\n"


async def test_end_of_long_output_is_returned():
    found = await run_python("import sys; sys.stdout.write('x' * 3_000_000 + 'end')")
    assert (len(found), found[-4:]) == (subprocesses.MAX_OUTPUT_BYTES, b"xend")


async def test_failure_without_output_has_its_exit_status():
    with pytest.raises(Unavailable, match="failed: exit status 3"):
        await run_python("raise SystemExit(3)")


async def test_timeout_applies_to_descendants_that_hold_the_output_open():
    program = "import subprocess; subprocess.Popen(['sleep', '600'])"
    with pytest.raises(Unavailable, match="timed out after"):
        await run_python(program, timedelta(milliseconds=500))


# -- delays


def test_delays_double_up_to_the_longest_and_jitter_subtracts_up_to_half():
    backoff = Backoff(retries=5, first=timedelta(seconds=1), longest=timedelta(seconds=5))
    assert list(backoff.delays(chance=lambda: 0.0)) == [1, 2, 4, 5, 5]
    assert list(backoff.delays(chance=lambda: 1.0)) == [0.5, 1, 2, 2.5, 2.5]
    assert list(Backoff().delays()) != list(Backoff().delays())
    assert list(NO_RETRIES.delays()) == []


@given(retries=st.integers(0, 200), chance=st.floats(0, 1))
def test_no_delay_is_longer_than_the_longest(retries, chance):
    delays = list(Backoff(retries=retries, longest=timedelta(seconds=3)).delays(lambda: chance))
    assert len(delays) == retries
    assert all(0 < delay <= 3 for delay in delays)
