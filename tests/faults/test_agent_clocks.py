"""Agents whose clocks are an hour off: nothing ends early, and every end is seen at once."""

import asyncio
import time

import pytest

import agents
from waiting import until_resolved

SKEWS = {"ahead": "1h", "behind": "-1h"}
SHORT = 2.0
"""Seconds that a reservation lasts."""


def clocked(skew, cluster):
    return f"{cluster}agent: {{clockSkew: {skew}}}\n"


@pytest.fixture
async def scene(certificates, tmp_path):
    async with agents.scene(certificates, tmp_path) as scene:
        yield scene


@pytest.fixture
async def members(scene):
    """A lender and a borrower for each skew: all four of them wrong."""
    return [
        (
            await scene.start(
                f"lender-{way}", scene.broker.port, cluster=clocked(skew, agents.SOME)
            ),
            await scene.start(
                f"borrower-{way}", scene.broker.port, cluster=clocked(skew, agents.NOTHING)
            ),
        )
        for way, skew in SKEWS.items()
    ]


async def at_once(act, members):
    async with asyncio.TaskGroup() as group:
        acting = [group.create_task(act(*member)) for member in members]
    return [task.result() for task in acting]


async def test_reservations_last_exactly_as_long_as_the_broker_says(scene, members):
    async def live(lender, borrower):
        for name, renew in (("short", False), ("renewed", True)):
            await borrower.create_request(
                name, duration=f"{SHORT}s", renew=renew, target_cluster_id=lender.name
            )
        for name in ("short", "renewed"):
            await borrower.becomes(name, "Active")
        began = time.monotonic()
        await until_resolved(lambda: holding(lender, 2))
        first = await borrower.request("renewed")
        expired = await borrower.becomes("short", "Expired")
        lasted = time.monotonic() - began
        return first, expired, lasted

    lived = await at_once(live, members)
    everybody = [agent for member in members for agent in member]
    # Longer than it was asked for: it has been renewed, by who thinks that it is another hour.
    await at_once(
        renewed, [(one[1], first) for one, (first, *_) in zip(members, lived, strict=True)]
    )
    for _, expired, lasted in lived:
        assert lasted > SHORT - 1
        assert expired.status.reason == "Expired"
    known = await agents.until_agreed(scene.broker, *everybody)
    assert sorted(found["requesterID"] for found in known.values()) == sorted(
        borrower.name for _, borrower in members
    )
    await agents.until_over(scene.broker, *everybody)


async def holding(lender, count):
    holds = await lender.holds()
    return "" if len(holds) == count else f"{lender.name} holds {holds}"


async def renewed(borrower, first):
    """Wait until a request has been renewed twice."""
    ends = {first.status.expires_at}

    def is_later(found):
        ends.add(found.status.expires_at)
        return len(ends) > 2

    found = await borrower.shows("renewed", is_later)
    assert found.status.reservation_name == first.status.reservation_name


async def test_end_is_seen_at_once_when_the_broker_says_so(scene, members):
    async def begin(lender, borrower):
        await borrower.create_request("w", duration="4h", target_cluster_id=lender.name)
        await borrower.becomes("w", "Active")

    async def see(lender, borrower):
        found = await borrower.becomes("w", "Expired")
        assert found.status.message

    await at_once(begin, members)
    everybody = [agent for member in members for agent in member]
    assert len(await agents.until_agreed(scene.broker, *everybody)) == len(members)
    # Those who are ahead think that it is so late already, and so do nothing.
    scene.broker.clock.pass_time(3 * agents.HOUR)
    await scene.broker.expire()
    assert len(await agents.until_agreed(scene.broker, *everybody)) == len(members)
    scene.broker.clock.pass_time(agents.HOUR)
    await scene.broker.expire()
    await at_once(see, members)
    assert await agents.until_agreed(scene.broker, *everybody) == {}
