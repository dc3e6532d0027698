"""Agents behind a network that is cut, slow or repeats messages, and agents with wrong clocks."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from contextlib import aclosing, suppress
from datetime import timedelta

import pytest
from msgspec.structs import replace

import agents
import tcp_cuts
from kubelend.api import reservations
from kubelend.communicators.factory import Middleware
from kubelend.core.errors import KubelendError
from kubelend.wire import bodies
from waiting import FACTOR, until_resolved

pytestmark = pytest.mark.filterwarnings(agents.LEFT_SOCKETS)

CUTS = {
    "both ways": {"up": True, "down": True},
    "upwards": {"up": True, "down": False},
    "downwards": {"up": False, "down": True},
}
IMPATIENT = {
    "broker_timeout": timedelta(seconds=0.5),
    "silence": timedelta(seconds=1),
}
LATE = 1.2
"""Seconds, longer than any timeout."""
CONNECTIONS = 6
"""More than the agent uses at a time."""


@pytest.fixture
async def scene(certificates, tmp_path, monkeypatch):
    # Frequent keep-alives, so that a short silence means that the stream is dead.
    monkeypatch.setattr(reservations, "KEEP_ALIVE_SECONDS", 0.2)
    async with agents.scene(certificates, tmp_path) as scene:
        yield scene


@pytest.fixture
async def behind(scene):
    """Starts agents, each with a line of its own to the broker."""
    async with contextlib.AsyncExitStack() as stack:

        async def behind(name, cluster=agents.NOTHING):
            line = await stack.enter_async_context(tcp_cuts.network(scene.broker.port))
            return line, await scene.start(name, line.port, cluster=cluster, **IMPATIENT)

        yield behind


async def at_once(act, members):
    async with asyncio.TaskGroup() as group:
        acting = [group.create_task(act(*member)) for member in members]
    return [task.result() for task in acting]


def is_unanswered(found):
    return (found.status.phase, found.status.reason) == ("Pending", "BrokerUnreachable")


async def test_cut_off_requester_keeps_its_reservations_and_gets_the_others_afterwards(
    scene, behind
):
    lender = await scene.start("lender", scene.broker.port)
    members = [(way, *await behind(f"r-{number}")) for number, way in enumerate(CUTS)]
    kept = {}

    async def settle(way, line, agent):
        for name in ("kept", "dropped"):
            await agent.create_request(name)
            found = await agent.becomes(name, "Active")
            kept[way, name] = found.status.reservation_name
        line.cut(**CUTS[way])
        await agent.create_request("late")
        await agent.delete_request("dropped")

    async def suffer(way, line, agent):
        late = await agent.shows("late", is_unanswered)
        assert "did not answer within" in late.status.message
        dropped = await agent.shows("dropped", lambda found: found.status.reason != "InUse")
        assert dropped.status.message.startswith(
            "Deletion waits until the reservation is released: "
        )
        # What the broker sends still arrives: the stream is alive.
        parts = {"publisher"} if way == "upwards" else {"publisher", "stream"}
        await until_resolved(lambda: missing(agent, parts))
        assert kept[way, "kept"] in await lender.holds()
        assert kept[way, "kept"] in await agent.uses()

    async def recover(way, line, agent):
        line.mend()
        await agent.becomes("late", "Active")
        await agent.wait_deleted("dropped")
        assert (await agent.request("kept")).status.reservation_name == kept[way, "kept"]

    await at_once(settle, members)
    await at_once(suffer, members)
    await at_once(recover, members)
    borrowers = [agent for _, _, agent in members]
    assert len(await agents.until_agreed(scene.broker, lender, *borrowers)) == 2 * len(CUTS)
    for agent in borrowers:
        await agent.wait_until_ready()
    # However often each was requested, and whichever of those arrived.
    assert await reservation_counts(scene.broker) == {"r-0": 3, "r-1": 3, "r-2": 3}
    await agents.until_over(scene.broker, lender, *borrowers)


async def reservation_counts(broker):
    """How many reservations each requester has, or has had."""
    found = (await broker.viewer().read("reservations"))["reservations"]
    return Counter(one["requesterID"] for one in found)


async def missing(agent, parts):
    return ", ".join(parts - agent.problems.keys())


async def test_cut_off_provider_keeps_its_holds_and_learns_of_the_others_afterwards(scene, behind):
    borrower = await scene.start("borrower", scene.broker.port)
    members = [(way, *await behind(f"p-{number}", agents.SOME)) for number, way in enumerate(CUTS)]

    async def settle(way, line, agent):
        for what in ("kept", "dropped"):
            await borrower.create_request(f"{what}-{agent.name}", target_cluster_id=agent.name)
            await borrower.becomes(f"{what}-{agent.name}", "Active")
        await until_resolved(lambda: held(agent, 2))
        line.cut(**CUTS[way])
        await until_resolved(lambda: missing(agent, {"publisher"}))

    async def suffer(way, line, agent):
        await borrower.create_request(f"late-{agent.name}", target_cluster_id=agent.name)
        found = await borrower.becomes(f"late-{agent.name}", "Reserved")
        name = found.status.reservation_name
        await borrower.delete_request(f"dropped-{agent.name}")
        if way == "upwards":
            await until_resolved(lambda: knows(agent, name))
        else:
            await until_resolved(lambda: missing(agent, {"stream"}))
            assert len(await agent.holds()) == 2
            assert name not in await agent.holds()
        body = (await agents.open_reservations(scene.broker))[name]
        assert "acknowledgedAt" not in body["status"]

    async def recover(way, line, agent):
        line.mend()
        await agent.wait_until_ready()

    await at_once(settle, members)
    await at_once(suffer, members)
    await at_once(recover, members)
    for _, _, agent in members:
        await borrower.wait_deleted(f"dropped-{agent.name}")
    lenders = [agent for _, _, agent in members]

    for agent in lenders:
        # It is used only after its lender has agreed to it.
        await borrower.becomes(f"late-{agent.name}", "Active")
    assert len(await agents.until_agreed(scene.broker, borrower, *lenders)) == 2 * len(CUTS)
    await agents.until_over(scene.broker, borrower, *lenders)


async def held(agent, count):
    holds = await agent.holds()
    return "" if len(holds) == count else f"{agent.name} holds {holds}"


async def knows(agent, reservation):
    holds = await agent.holds()
    return "" if reservation in holds else f"{agent.name} holds {holds}"


async def test_slow_broker_causes_no_errors(scene, behind):
    lender = await scene.start("lender", scene.broker.port)
    line, agent = await behind("r")
    line.slow(up=0.1, down=0.1)
    await agent.create_request("w")
    await agent.becomes("w", "Active")
    await agents.until_agreed(scene.broker, lender, agent)
    assert agent.problems == {}
    await agents.until_over(scene.broker, lender, agent)


async def unreserved(broker, count):
    found = len(await agents.open_reservations(broker))
    return "" if found == count else f"{found} of {count} have arrived all the same"


async def open_connections(agent):
    """Calls at one moment leave as many idle connections. Through a slow line no new one opens in time."""
    names = [f"early-{number}" for number in range(CONNECTIONS)]
    for name in names:
        await agent.create_request(name)
    for name in names:
        await agent.becomes(name, "Active")
    await agent.delete_all_requests()
    for name in names:
        await agent.wait_deleted(name)


@pytest.mark.parametrize("way", ["up", "down"])
async def test_late_requests_and_responses_reserve_nothing_twice(scene, behind, way):
    """They arrive when the caller no longer waits for them."""
    lender = await scene.start("lender", scene.broker.port)
    line, agent = await behind("r")
    await open_connections(agent)
    line.slow(**{way: LATE})
    await agent.create_request("kept")
    await agent.create_request("dropped")
    await agent.shows("kept", is_unanswered)
    await agent.shows("dropped", is_unanswered)
    await until_resolved(lambda: unreserved(scene.broker, 2))
    taken = await agents.open_reservations(scene.broker)
    await agent.delete_request("dropped")
    line.mend()
    found = await agent.becomes("kept", "Active")
    await agent.wait_deleted("dropped")
    assert found.status.reservation_name in taken
    assert len(await agents.until_agreed(scene.broker, lender, agent)) == 1
    await agents.until_over(scene.broker, lender, agent)


# -- repeated and reordered messages

NAMES = ("a", "b", "c")
ROUNDS = 12
MEMORY = 200
"""Number of messages that are repeated."""


class Reordering(Middleware):
    """Repeats and reorders all that the broker sends about reservations."""

    def __init__(self, inner, dice):
        super().__init__(inner)
        self.repeated = 0
        self._dice = dice
        self._sent = []
        self._instructions = []

    async def wrap_call(self, name, call):
        return await call()

    async def publish(self, advertisement):
        answer = await self._inner.publish(advertisement)
        return replace(answer, provider_instructions=self._reordered(answer.provider_instructions))

    async def instructions(self):
        return self._reordered(await self._inner.instructions())

    async def stream(self, on_reset):
        """Yields what has come within a moment, with some of what came before."""
        news: asyncio.Queue[bodies.Instruction | KubelendError] = asyncio.Queue()
        reading = asyncio.create_task(self._read(on_reset, news))
        try:
            while True:
                batch = [await news.get()]
                await asyncio.sleep(self._dice.uniform(0, 0.03))
                while not news.empty():
                    batch.append(news.get_nowait())
                for one in self._mixed(batch, self._instructions):
                    if isinstance(one, KubelendError):
                        raise one
                    yield one
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading

    async def _read(self, on_reset, news):
        try:
            async with aclosing(self._inner.stream(on_reset)) as instructions:
                async for instruction in instructions:
                    self._sent.append(instruction.reservation)
                    news.put_nowait(instruction)
        except KubelendError as error:
            news.put_nowait(error)

    def _reordered(self, listed):
        return self._mixed(listed, self._sent)

    def _mixed(self, news, before):
        old = self._dice.sample(before, min(len(before), 5))
        self.repeated += len(old)
        before += [one for one in news if not isinstance(one, KubelendError)]
        del before[:-MEMORY]
        mixed = [*news, *news, *old]
        self._dice.shuffle(mixed)
        return mixed


@pytest.mark.parametrize("seed", range(2))
async def test_repeated_and_reordered_messages_change_nothing(certificates, tmp_path, seed):
    dice, routes = random.Random(seed), []

    def reordering(inner):
        routes.append(Reordering(inner, dice))
        return routes[-1]

    def disturb(agent):
        agent.wrap = reordering

    async with agents.scene(certificates, tmp_path) as (broker, start, _):
        members = [await start(name, broker.port, prepare=disturb) for name in NAMES]
        for number in range(ROUNDS):
            for agent in members:
                await agent.create_request(f"w{number}", cpu="100m", memory="64Mi")
            for agent in members if number % 3 else ():
                await agent.becomes(f"w{number}", "Active")
            for agent in members if number % 2 else ():
                await agent.delete_request(f"w{number}")
        for agent in members:
            await agent.becomes(f"w{ROUNDS - 2}", "Active")
            await agent.wait_deleted(f"w{ROUNDS - 1}")
        left = await agents.until_agreed(broker, *members)
        assert len(left) == ROUNDS // 2 * len(members)
        await agents.until_over(broker, *members)
        assert all(route.repeated > ROUNDS for route in routes)
        # More repetitions, after everything is released.
        repeated = [route.repeated for route in routes]
        await until_resolved(lambda: all_repeat(routes, repeated))
        assert await agents.until_agreed(broker, *members) == {}


async def all_repeat(routes, before):
    many = [route.repeated - then for route, then in zip(routes, before, strict=True)]
    return "" if min(many) > 5 else f"repeated {many}"


# -- wrong clocks

SKEWS = {"ahead": agents.HOUR, "behind": -agents.HOUR}
SHORT = 2.0 * FACTOR
"""Seconds that a reservation lasts."""


async def skewed(scene, role, way, cluster):
    return await scene.start(
        f"{role}-{way}",
        scene.broker.port,
        cluster=cluster,
        prepare=lambda agent: agent.skew_clock(SKEWS[way]),
    )


async def test_reservations_with_wrong_clocks_last_as_long_as_the_broker_says(scene):
    pairs = [
        (await skewed(scene, "p", way, agents.SOME), await skewed(scene, "r", way, agents.NOTHING))
        for way in SKEWS
    ]
    everyone = [agent for pair in pairs for agent in pair]

    async def live(lender, borrower):
        target, began = {"target_cluster_id": lender.name}, time.monotonic()
        await borrower.create_request("long", duration="4h", **target)
        for name, renew in (("short", False), ("renewed", True)):
            await borrower.create_request(name, duration=f"{SHORT}s", renew=renew, **target)
        for name in ("long", "short", "renewed"):
            await borrower.becomes(name, "Active")
        await until_resolved(lambda: held(lender, 3))
        first = await borrower.request("renewed")
        expired = await borrower.becomes("short", "Expired")
        assert time.monotonic() - began >= SHORT
        assert expired.status.reason == "Expired"
        # Longer than requested: it has been renewed by an agent whose clock is wrong.
        await renewed(borrower, first)
        await borrower.delete_request("renewed")

    async def see(_, borrower):
        assert (await borrower.becomes("long", "Expired")).status.message

    await at_once(live, pairs)
    for hours in (0, 3):
        # By the clocks that are ahead it is later already; they do nothing.
        scene.broker.clock.pass_time(hours * agents.HOUR)
        await scene.broker.expire()
        known = await agents.until_agreed(scene.broker, *everyone)
        assert sorted(found["requesterID"] for found in known.values()) == ["r-ahead", "r-behind"]
    scene.broker.clock.pass_time(agents.HOUR)
    await scene.broker.expire()
    await at_once(see, pairs)
    assert await agents.until_agreed(scene.broker, *everyone) == {}


async def renewed(borrower, first):
    """Wait until a request has been renewed twice."""
    ends = {first.status.expires_at}

    def is_later(found):
        ends.add(found.status.expires_at)
        return len(ends) > 2

    found = await borrower.shows("renewed", is_later)
    assert found.status.reservation_name == first.status.reservation_name
