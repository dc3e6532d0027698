"""Middleware: each call is observed, and otherwise nothing changes."""

import asyncio
import inspect
from contextlib import aclosing
from typing import Any

import pytest

import make
from kubelend.agent.ports import BrokerCommunicator
from kubelend.communicators.factory import MetricsMiddleware
from kubelend.core.errors import BrokerUnreachable, NoCapacity
from kubelend.wire import bodies

REQUEST = bodies.ReservationRequest(bodies.Quantities("1", "1Gi"))
OFFER = bodies.Advertisement("a", bodies.Metrics(REQUEST.requested_resources))
STATUS = bodies.ReservationStatus("Reserved", "")
FOUND = bodies.Reservation("rsv-1", "a", "b", REQUEST.requested_resources, STATUS, make.T0)
INSTRUCTION = bodies.Instruction(1, "provider", "Hold", "Hold it", FOUND)
CALLS = {
    "publish": (OFFER,),
    "request": (REQUEST, "k"),
    "activate": ("rsv-1",),
    "renew": ("rsv-1", "2h"),
    "release": ("rsv-1",),
    "find": ("rsv-1",),
    "instructions": (),
    "acknowledge": ("rsv-1", bodies.HoldReport(True, "Held")),
    "refuse": ("rsv-1", "busy"),
    "ping": (),
}


class Echo:
    """Returns the name and arguments of each call; its stream delivers twice and fails."""

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
        yield INSTRUCTION
        yield INSTRUCTION
        raise BrokerUnreachable("cut")


class Timer:
    """A second later at each call."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1
        return self.now


def test_all_calls_of_the_port_are_tested_here():
    names = {name for name, _ in inspect.getmembers(BrokerCommunicator, inspect.isfunction)}
    assert {name for name in names if name[0] != "_"} == {*CALLS, "stream", "close"}


def measured(log):
    inner = Echo([])
    return MetricsMiddleware(inner, lambda *report: log.append(report), timer=Timer()), inner


async def test_stream_and_close_pass_unchanged_and_the_stream_is_observed_when_it_ends():
    log: list[Any] = []
    wrapped, inner = measured(log)
    resets: list[str] = []
    stream = wrapped.stream(lambda: resets.append("reset"))
    assert [await anext(stream), await anext(stream)] == [INSTRUCTION] * 2
    assert (resets, log) == (["reset"], [])
    with pytest.raises(BrokerUnreachable, match="cut"):
        await anext(stream)
    assert log == [("stream", "BrokerUnreachable", 1.0)]
    await wrapped.close()
    assert inner.log[-1] == "close"


@pytest.mark.parametrize("name", CALLS)
async def test_each_call_passes_unchanged_and_is_observed_with_result_and_seconds(name):
    log: list[Any] = []
    wrapped, inner = measured(log)
    answer = await getattr(wrapped, name)(*CALLS[name])
    assert answer == (None if name == "ping" else (name, *CALLS[name]))
    inner.error = NoCapacity("none")
    with pytest.raises(NoCapacity):
        await getattr(wrapped, name)(*CALLS[name])
    assert log == [(name, "OK", 1.0), (name, "NoCapacity", 1.0)]


async def test_cancelled_call_is_not_observed():
    log: list[Any] = []
    wrapped, inner = measured(log)
    inner.error = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await wrapped.ping()
    async with aclosing(wrapped.stream(lambda: None)) as stream:
        await anext(stream)
    assert log == []
