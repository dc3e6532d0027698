"""Wrappers: each call waits, or is reported, and otherwise nothing changes."""

import asyncio
import inspect
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kubelend.agent.ports import BrokerCommunicator
from kubelend.communicators.middleware import DelayMiddleware, MetricsMiddleware
from kubelend.core.errors import BrokerUnreachable, NoCapacity
from kubelend.wire import bodies
from virtual_time import in_virtual_time

REQUEST = bodies.ReservationRequest(bodies.Quantities("1", "1Gi"))
OFFER = bodies.Advertisement("a", bodies.Metrics(REQUEST.requested_resources))
FOUND = bodies.Reservation(
    "rsv-1",
    "a",
    "b",
    REQUEST.requested_resources,
    bodies.ReservationStatus("Reserved", ""),
    datetime(2026, 1, 1, tzinfo=UTC),
)
TOLD = bodies.Instruction(1, "provider", "Hold", "Hold it", FOUND)
CALLS = {
    "publish": (OFFER,),
    "request": (REQUEST, "k"),
    "activate": ("rsv-1",),
    "renew": ("rsv-1", "2h"),
    "release": ("rsv-1",),
    "find": ("rsv-1",),
    "instructions": (),
    "acknowledge": ("rsv-1",),
    "refuse": ("rsv-1", "busy"),
    "ping": (),
}


class Echo:
    """Answers each call with its own name and arguments; its stream says two things and breaks."""

    def __init__(self, log):
        self.log = log
        self.error = None

    def __getattr__(self, name):
        if name not in {*CALLS, "close"}:
            raise AttributeError(name)

        async def call(*arguments):
            self.log.append(name)
            if self.error is not None:
                raise self.error
            return (name, *arguments)

        return call

    async def stream(self, on_reset):
        on_reset()
        yield TOLD
        yield TOLD
        raise BrokerUnreachable("cut")


class Timer:
    """Moves on by a second whenever it is looked at."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1
        return self.now


async def read(stream, told):
    while True:
        told.append(await anext(stream))


def test_all_calls_of_the_port_are_tried_here():
    names = {name for name, _ in inspect.getmembers(BrokerCommunicator, inspect.isfunction)}
    assert {name for name in names if name[0] != "_"} == {*CALLS, "stream", "close"}


def delayed(log):
    inner = Echo(log)
    return DelayMiddleware(inner, timedelta(milliseconds=250)), inner


def measured(log):
    inner = Echo([])
    return MetricsMiddleware(inner, lambda *report: log.append(report), timer=Timer()), inner


@pytest.mark.parametrize("wrap", [delayed, measured])
@pytest.mark.parametrize("name", CALLS)
@in_virtual_time
async def test_arguments_and_answers_go_through(wrap, name):
    wrapped, _ = wrap([])
    answer = await getattr(wrapped, name)(*CALLS[name])
    assert answer == (None if name == "ping" else (name, *CALLS[name]))


@pytest.mark.parametrize("wrap", [delayed, measured])
@in_virtual_time
async def test_errors_resets_and_the_end_go_through(wrap):
    wrapped, inner = wrap([])
    inner.error = NoCapacity("none")
    with pytest.raises(NoCapacity):
        await wrapped.request(REQUEST, "k")
    resets: list[str] = []
    told: list[Any] = []
    with pytest.raises(BrokerUnreachable, match="cut"):
        await read(wrapped.stream(lambda: resets.append("reset")), told)
    assert (resets, told) == (["reset"], [TOLD, TOLD])
    inner.error = None
    await wrapped.close()
    assert inner.log[-1] == "close"


@pytest.mark.parametrize("name", CALLS)
@in_virtual_time
async def test_a_delayed_call_waits_before_it_is_made(name):
    log: list[Any] = []
    wrapped, _ = delayed(log)
    call = asyncio.create_task(getattr(wrapped, name)(*CALLS[name]))
    await asyncio.sleep(0.24)
    assert log == []
    await call
    assert log == [name]
    assert asyncio.get_running_loop().time() == pytest.approx(0.25)


@in_virtual_time
async def test_each_instruction_is_delayed_by_itself_and_not_by_those_before_it():
    clock = asyncio.get_running_loop().time
    wrapped, _ = delayed([])
    resets: list[float] = []
    async with aclosing(wrapped.stream(lambda: resets.append(clock()))) as stream:
        arrived = [clock() for _ in range(2) if await anext(stream) == TOLD]
    assert arrived == pytest.approx([0.25, 0.25])
    assert resets == pytest.approx([0.25])


@in_virtual_time
async def test_a_delayed_stream_that_is_left_leaves_nothing_behind():
    wrapped, inner = delayed([])
    ended = []

    async def endless(on_reset):
        try:
            while True:
                yield TOLD
                await asyncio.sleep(10)
        finally:
            ended.append("closed")

    inner.stream = endless
    async with aclosing(wrapped.stream(lambda: None)) as stream:
        assert await anext(stream) == TOLD
    assert ended == ["closed"]


@pytest.mark.parametrize("name", CALLS)
async def test_each_call_is_reported_with_outcome_and_seconds(name):
    log: list[Any] = []
    wrapped, inner = measured(log)
    await getattr(wrapped, name)(*CALLS[name])
    inner.error = NoCapacity("none")
    with pytest.raises(NoCapacity):
        await getattr(wrapped, name)(*CALLS[name])
    assert log == [(name, "OK", 1.0), (name, "NoCapacity", 1.0)]


async def test_a_stream_is_reported_when_it_breaks():
    log: list[Any] = []
    wrapped, _ = measured(log)
    stream = wrapped.stream(lambda: None)
    await anext(stream)
    assert log == []
    with pytest.raises(BrokerUnreachable):
        await read(stream, [])
    assert log == [("stream", "BrokerUnreachable", 1.0)]


async def test_what_its_caller_gave_up_is_not_reported():
    log: list[Any] = []
    wrapped, inner = measured(log)
    inner.error = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await wrapped.ping()
    async with aclosing(wrapped.stream(lambda: None)) as stream:
        await anext(stream)
    assert log == []
