"""`kubelend bench agents`: what a thousand agents cost their broker, and whether each hears what it should.

Every agent has a certificate of its own, a stream, and all of its parts (see `crowds`); the broker is a
process. While all of them advertise, a requester borrows from each in turn, and gives back a little later. In
the end every promise must have become an object in the right cluster, and every release have reached it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kubelend.apps import trials
from kubelend.apps.trials import Trial
from kubelend.bench import crowds, fleets, processes, progress, running, timings, windows
from kubelend.bench.crowds import Member
from kubelend.bench.deliveries import Deliveries
from kubelend.bench.identities import Identities
from kubelend.bench.windows import Window
from kubelend.core.errors import InvalidInput, UnexpectedAnswer
from kubelend.core.lifecycle import Phase
from kubelend.kits import logs
from kubelend.transports.http_client import BrokerClient
from kubelend.wire import bodies

LEAST_RATE = 20.0
"""Reservations per second; more if the window were too short to reach everybody."""

_HELD_FOR = 3.0
_PATIENCE = 10.0
"""Seconds after the last release for all that is still on its way."""
_FILES_EACH = 4
_SPARE_FILES = 100
_AMOUNTS = bodies.Quantities("100m", "64Mi")


class Result(msgspec.Struct, frozen=True):
    """The keys are API."""

    count: int
    reservations: int
    missed: int
    """Instructions, to hold or to let go, that did not reach their cluster."""
    cpu_percent: float
    """Of one core, by the broker."""
    rss_mb: float
    """The most that was seen of the broker, in millions of bytes."""
    p50_ms: float
    p99_ms: float
    """From the requester's answer to the provider's object. All agents share one process, and its time."""


class Load(NamedTuple):
    """What happened, and what it cost the broker."""

    deliveries: Deliveries
    window: Window


def measure(count: int, seconds: float) -> Result:
    """So many agents, watched for so long once all are ready."""
    if processes.allow_many_files() < _FILES_EACH * count + _SPARE_FILES:
        raise InvalidInput(f"the connections of {count} agents are more than `ulimit -Hn` allows")
    # Of what the agents say, only what is wrong with them matters here.
    logs.setup("error", "console")
    with trials.trial() as trial:
        members = _members(trial, count)
        with trial.broker("--rate-limit=0") as broker:
            broker.wait_until_ready()
            client = BrokerClient(broker.url, trial.certificate(fleets.REQUESTER))
            load = running.run(_load(broker.url, members, client, broker.pid, seconds))
    progress.done()
    return _result(count, load)


def _members(trial: Trial, count: int) -> list[Member]:
    names = [fleets.name(number) for number in range(count)]
    identities = Identities(trial, names)
    for number in identities.issue():
        if number % 100 == 0:
            progress.say(f"agents: {number:,} of {count:,} certificates")
    return [Member(name, identities.directory(number)) for number, name in enumerate(names)]


async def _load(
    url: str, members: Sequence[Member], client: BrokerClient, broker: int, seconds: float
) -> Load:
    deliveries = Deliveries()
    async with crowds.joined(url, members, deliveries), client:
        names = [member.name for member in members]
        window = await _borrow(client, names, deliveries, Window(broker), seconds)
        await _settled(deliveries)
    return Load(deliveries, window)


async def _borrow(
    client: BrokerClient,
    names: Sequence[str],
    deliveries: Deliveries,
    window: Window,
    seconds: float,
) -> Window:
    """From one after the other, at even distances, whether or not the one before has been answered."""
    rate = max(LEAST_RATE, len(names) / seconds)
    begin = sampled = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(round(rate * seconds)):
            due = begin + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(_loan(client, names[number % len(names)], deliveries))
            if due - sampled >= windows.SAMPLE_SECONDS:
                sampled = due
                window.sample()
                progress.say(f"agents: {due - begin:.0f} of {seconds:.0f} s measured")
        window.sample()
    return window


async def _loan(client: BrokerClient, provider: str, deliveries: Deliveries) -> None:
    wish = bodies.ReservationRequest(_AMOUNTS, target_cluster_id=provider)
    answer = await client.reserve(wish)
    if answer.status.phase != Phase.RESERVED:
        raise UnexpectedAnswer(f"{provider} does not lend: {answer.status.message}")
    deliveries.promised(answer)
    await asyncio.sleep(_HELD_FOR)
    await client.release(answer.id)
    deliveries.released(answer.id)


async def _settled(deliveries: Deliveries) -> None:
    """Until nothing is on its way any more, or too long has been waited for it."""
    deadline = time.perf_counter() + _PATIENCE
    while deliveries.missed and time.perf_counter() < deadline:
        progress.say("agents: waiting for the last instructions")
        await asyncio.sleep(0.05)


def _result(count: int, load: Load) -> Result:
    seconds = load.deliveries.seconds
    return Result(
        count=count,
        reservations=load.deliveries.count,
        missed=load.deliveries.missed,
        cpu_percent=load.window.cpu_percent,
        rss_mb=load.window.rss_mb,
        p50_ms=round(timings.percentile(seconds, 50) * 1000, 2),
        p99_ms=round(timings.percentile(seconds, 99) * 1000, 2),
    )
