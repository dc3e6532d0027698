"""`kill -9` under load, and a start on what is left: whatever was answered is there, and nothing twice."""

import asyncio
import itertools
import random
import signal

import aiohttp
import pytest

import brokers
from callers import Json, wish

ROUNDS = 4
CLIENTS = 16


class Load:
    """Clients that borrow and give back until the broker dies, and remember what they were told."""

    def __init__(self):
        self.told: dict[str, Json] = {}
        """What was answered, by key: the newest state of each reservation."""
        self.unanswered: dict[str, str] = {}
        """Keys whose last call got no answer, and which call that was."""
        self._numbers = itertools.count()

    async def run(self, broker):
        await asyncio.gather(*(self._client(broker.cluster(f"r{n % 4}")) for n in range(CLIENTS)))

    async def _client(self, caller):
        try:
            while True:
                key = f"{caller.name}/{next(self._numbers)}"
                await self._call(key, "reserve", caller.reserve("1m", "1Mi", key=key))
                if random.random() < 0.3:
                    path = ("reservations", self.told[key]["id"])
                    await self._call(key, "release", release(caller, path))
        except (aiohttp.ClientError, ConnectionError):
            return

    async def _call(self, key, name, call):
        self.unanswered[key] = name
        self.told[key] = await call
        del self.unanswered[key]


async def release(caller, path):
    answer = await caller.delete(*path)
    assert answer.status == 200
    return answer.json


@pytest.mark.timeout(120)
async def test_killed_under_load_it_has_lost_nothing_that_was_answered(certificates, tmp_path):
    dice, load = random.Random(), Load()
    for _ in range(ROUNDS):
        async with brokers.child(certificates, tmp_path) as broker:
            await broker.cluster("lender").advertise("1000", "1000Gi")
            await everything_is_there(broker, load)
            running = asyncio.create_task(load.run(broker))
            await asyncio.sleep(dice.uniform(0.05, 0.5))
            assert await broker.stop(signal.SIGKILL) == -signal.SIGKILL
            await running
        ledger = brokers.audited(tmp_path / "kubelend.db")
        missing = {found["id"] for found in load.told.values()} - set(ledger.reservations)
        assert missing == set()
    assert len(load.told) > ROUNDS * CLIENTS


async def everything_is_there(broker, load):
    """What was told is as it was told, and every key, answered or not, gives one reservation."""
    keys = sorted({*load.told, *load.unanswered})
    for start in range(0, len(keys), CLIENTS):
        batch = keys[start : start + CLIENTS]
        await asyncio.gather(*(is_there(broker, load, key) for key in batch))
    load.unanswered.clear()
    expected = {found["id"] for found in load.told.values()}
    assert {found["id"] for found in await all_reservations(broker)} == expected


async def is_there(broker, load, key):
    caller, told = broker.cluster(key.partition("/")[0]), load.told.get(key)
    again = await caller.reserve("1m", "1Mi", key=key)
    found = await caller.read("reservations", again["id"])
    if told is not None:
        assert again["id"] == told["id"]
        assert key in load.unanswered or found == told
    load.told[key] = found


async def all_reservations(broker):
    found: list[Json] = []
    query = {"limit": "1000"}
    while True:
        page = await broker.viewer().read("reservations", **query)
        found += page["reservations"]
        if "next" not in page:
            return found
        query["continue"] = page["next"]


async def test_waiters_and_cordons_survive_a_kill(certificates, tmp_path):
    async with brokers.child(certificates, tmp_path) as broker:
        a, r = broker.cluster("a"), broker.cluster("r")
        await a.advertise("4", "8Gi")
        waiting = await r.queue("6", wait="1h", priority=3)
        await broker.admin().post("clusters", "a", "cordon", {"reason": "kept"})
        await broker.stop(signal.SIGKILL)
    async with brokers.child(certificates, tmp_path) as broker:
        a, r = broker.cluster("a"), broker.cluster("r")
        assert await r.read("reservations", waiting["id"]) == waiting
        assert (await a.read("clusters", "a"))["status"]["cordonReason"] == "kept"
        await a.advertise("8", "8Gi")
        assert await r.phase_of(waiting["id"]) == "Pending"
        await broker.admin().post("clusters", "a", "uncordon")
        assert await r.phase_of(waiting["id"]) == "Reserved"


async def test_stream_resumed_at_a_new_process_tells_all_that_is_open(certificates, tmp_path):
    async with brokers.child(certificates, tmp_path) as broker:
        a, r = broker.cluster("a"), broker.cluster("r")
        await a.advertise()
        over, kept = await r.reserve(), await r.reserve()
        async with a.stream() as stream:
            _, first, _ = await stream.events(3)
        await r.delete("reservations", over["id"])
        await broker.stop(signal.SIGKILL)
    async with (
        brokers.child(certificates, tmp_path) as broker,
        broker.cluster("a").stream(after=first.id) as stream,
    ):
        reset, hold = await stream.events(2)
        assert reset.name == "reset"
        assert hold.told == ("provider", "Hold", kept["id"])


async def test_kill_during_the_start_leaves_a_store_that_starts(certificates, tmp_path):
    """Again and again, at whatever the start was doing."""
    for delay in (0.0, 0.02, 0.1):
        async with brokers.child(certificates, tmp_path, ready=False) as broker:
            await asyncio.sleep(delay)
            await broker.stop(signal.SIGKILL)
    async with brokers.child(certificates, tmp_path) as broker:
        answer = await broker.cluster("r").post("reservations", wish())
        assert answer.status == 409
