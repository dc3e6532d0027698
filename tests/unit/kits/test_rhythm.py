"""Calls that come often are taken together; one that comes alone is not kept waiting."""

import asyncio

from kubelend.kits.rhythm import Rhythm

HOUR = 3600.0


async def arrive(rhythm, name, gone_on):
    await rhythm.join()
    gone_on.append(name)


async def test_who_comes_alone_goes_on_at_once():
    gone_on: list[str] = []
    await asyncio.wait_for(arrive(Rhythm(HOUR), "a", gone_on), 1)
    assert gone_on == ["a"]


async def test_who_comes_soon_after_waits_for_the_beat_with_the_others():
    gone_on: list[str] = []
    rhythm = Rhythm(0.05)
    await arrive(rhythm, "a", gone_on)
    others = [asyncio.create_task(arrive(rhythm, name, gone_on)) for name in "bcd"]
    await asyncio.sleep(0)
    assert gone_on == ["a"]
    await asyncio.wait_for(asyncio.gather(*others), 5)
    assert gone_on == ["a", "b", "c", "d"]


async def test_who_gives_up_takes_nobody_along():
    gone_on: list[str] = []
    rhythm = Rhythm(0.05)
    await arrive(rhythm, "a", gone_on)
    gone, other = (asyncio.create_task(arrive(rhythm, name, gone_on)) for name in "bc")
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait_for(other, 5)
    assert gone_on == ["a", "c"]


async def test_without_seconds_nobody_waits():
    gone_on: list[str] = []
    rhythm = Rhythm(0.0)
    for name in "abc":
        await asyncio.wait_for(arrive(rhythm, name, gone_on), 1)
    assert gone_on == ["a", "b", "c"]
