import asyncio
import itertools
from contextlib import aclosing
from datetime import timedelta

import make
from described_worlds import events, world
from kubelend.agent.ports import Snapshot
from kubelend.core.pod_requests import Node, Pod
from kubelend.sources import simulation, simulation_spec
from kubelend.sources.simulation import SimulatedSource
from virtual_time import in_virtual_time, now

FAILING = """
nodes: [{capacity: {cpu: 4}}]
failures: [{node: node-1, at: 5s, repair: 10m}]
"""
BUSY = """
nodes: [{count: 2, capacity: {cpu: 4}}]
work: [{rate: 50/s, requests: {cpu: 1m..9m}, lifetime: 1s..5s}]
"""


def source(text, clock=now):
    return SimulatedSource(simulation_spec.parse_simulation_spec(text, "x.yaml"), clock)


@in_virtual_time
async def test_each_change_comes_at_its_time():
    async with aclosing(source(FAILING).changes()) as changes:
        assert await anext(changes) == world(FAILING).snapshot()
        assert now() == make.T0
        failed = await anext(changes)
        assert isinstance(failed, Node)
        assert not failed.is_ready
        assert now() - make.T0 == timedelta(seconds=5)
        repaired = await anext(changes)
        assert isinstance(repaired, Node)
        assert repaired.is_ready
        assert now() - make.T0 == timedelta(seconds=605)


@in_virtual_time
async def test_late_listener_gets_all_in_order():
    async with aclosing(source(BUSY).changes()) as changes:
        await anext(changes)
        await asyncio.sleep(60)
        seen = [await anext(changes) for _ in range(3000)]
    assert seen == [change for _, change in itertools.islice(events(world(BUSY)), 3000)]


@in_virtual_time
async def test_catching_up_gives_others_a_turn():
    found = source(BUSY)
    await asyncio.sleep(600)
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count())
    async with aclosing(found.changes()) as changes:
        assert isinstance(await anext(changes), Snapshot)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    assert turns > 50


@in_virtual_time
async def test_called_anew_it_gives_the_present_and_goes_on():
    found, reference = source(BUSY), world(BUSY)
    async with aclosing(found.changes()) as changes:
        await anext(changes)
    await asyncio.sleep(30)
    while (reference.next_at or 0) <= 30_000_000:
        reference.step()
    async with aclosing(found.changes()) as changes:
        assert await anext(changes) == reference.snapshot()
        assert await anext(changes) == reference.step().changes[0]


@in_virtual_time
async def test_listener_far_behind_gets_a_snapshot_instead():
    found = source(BUSY)
    async with aclosing(found.changes()) as slow, aclosing(found.changes()) as quick:
        await anext(slow)
        await anext(quick)
        for _ in range(2 * simulation.MAX_BACKLOG):
            await anext(quick)
        seen = await anext(slow)
        assert isinstance(seen, Snapshot)
        assert isinstance(await anext(slow), Pod | tuple)
    assert len(seen.pods) < 400


@in_virtual_time
async def test_quiet_cluster_stays_silent_without_being_busy():
    wakes = 0

    def clock():
        nonlocal wakes
        wakes += 1
        return now()

    found = source("nodes: [{capacity: {cpu: 4}}]", clock)
    async with aclosing(found.changes()) as changes:
        await anext(changes)
        silent = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(600)
        assert not silent.done()
        silent.cancel()
        await asyncio.gather(silent, return_exceptions=True)
    assert wakes < 300


@in_virtual_time
async def test_identity_is_the_id_or_made_from_the_description():
    assert await source("clusterID: x\n" + FAILING).identity() == "x"
    nameless = await source(FAILING).identity()
    assert nameless
    assert await source(FAILING).identity() == nameless
    assert await source("seed: 1\n" + FAILING).identity() != nameless
