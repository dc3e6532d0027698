"""Answers wait for durability; store failures and kills lose no acknowledged change."""

import asyncio
import contextlib
import itertools
import random
import signal
from functools import partial
from typing import Any

import aiohttp
import pytest

import brokers
import waiting
from callers import Json, request_body
from disks import mounted
from kubelend.core.errors import StoreFailed
from kubelend.stores import factory

pytestmark = pytest.mark.broker(fails=True, offers={"a": ("4", "8Gi")})


@pytest.fixture
def a(broker):
    return broker.cluster("a")


@pytest.fixture
def r(broker):
    return broker.cluster("r")


class Held:
    """Calls that were begun while commits are held."""

    def __init__(self, store):
        self._store = store
        self._calls: list[asyncio.Task[Any]] = []

    async def begin(self, call):
        """Begin a change, and wait until it is on its way to the store or behind one that is."""
        before = self._store.commits
        self._calls.append(asyncio.create_task(call))
        if not before or len(self._calls) == 1:
            await waiting.until(lambda: self._store.commits > before)

    def ask(self, call):
        self._calls.append(asyncio.create_task(call))

    async def none_is_answered(self):
        done, _ = await asyncio.wait(self._calls, timeout=0.1)
        assert not done, [call.result() for call in done]

    async def answers(self):
        return await asyncio.gather(*self._calls)


@pytest.fixture
async def held(store):
    calls = Held(store)
    yield calls
    store.let_go()


async def test_change_is_answered_only_when_it_is_durable(store, held, r):
    store.hold()
    await held.begin(r.post("reservations", request_body()))
    await held.none_is_answered()
    assert store.kept.load().reservations == []
    store.let_go()
    (answer,) = await held.answers()
    assert answer.status == 201
    assert [found.id for found in store.kept.load().reservations] == [answer.json["id"]]


async def test_reservation_is_not_visible_before_it_is_durable(broker, store, held, a, r):
    store.hold()
    await held.begin(r.post("reservations", request_body("4")))
    held.ask(r.get("reservations"))
    held.ask(a.get("instructions"))
    held.ask(a.get("advertisements", "a"))
    held.ask(broker.admin().get("clusters"))
    held.ask(broker.viewer().get("reservations"))
    held.ask(r.post("explain", request_body()))
    held.ask(r.post("reservations", request_body(), dryRun="true"))
    held.ask(a.get("reservations", "rsv-r-unknown"))
    await held.none_is_answered()
    store.let_go()
    made, mine, holds, offer, *_, explained, dry, unknown = await held.answers()
    assert made.status == 201
    assert mine.json["reservations"] == holds.json == [made.json]
    assert offer.json["resources"]["available"]["cpu"] == "0"
    assert (explained.json["fitting"], dry.status, unknown.status) == (0, 409, 404)


async def test_open_stream_gets_a_change_when_it_is_durable(store, held, a, r):
    async with a.stream() as stream:
        await stream.event()
        assert (await stream.next()).comment == "open"
        store.hold()
        await held.begin(r.post("reservations", request_body()))
        held.ask(stream.event())
        await held.none_is_answered()
        store.let_go()
        made, event = await held.answers()
        assert event.instruction == ("provider", "Hold", made.json["id"])


async def test_stream_that_opens_during_a_commit_starts_when_it_is_durable(store, held, a, r):
    """Also of what was there before and is changing: a reset without it would mean that it is over."""
    first = await r.reserve("1")
    store.hold()
    await held.begin(r.post("reservations", first["id"], "renew", {"duration": "9h"}))
    async with contextlib.AsyncExitStack() as stack:
        held.ask(stack.enter_async_context(a.stream()))
        held.ask(r.post("reservations", request_body("2")))
        await held.none_is_answered()
        store.let_go()
        renewed, stream, second = await held.answers()
        reset, *holds = await stream.events(3)
        assert reset.name == "reset"
        assert [hold.data["reservation"] for hold in holds] == [renewed.json, second.json]
        third = await r.reserve("1")
        assert (await stream.event()).instruction == ("provider", "Hold", third["id"])


async def test_rejection_that_depends_on_a_pending_change_waits_too(store, held, r):
    """Had the store failed, the rejection would have been wrong."""
    store.hold()
    await held.begin(r.post("reservations", request_body("3"), key="k"))
    held.ask(r.post("reservations", request_body("2")))
    held.ask(r.post("reservations", request_body("2"), key="k"))
    await held.none_is_answered()
    store.let_go()
    _, full, reused = await held.answers()
    assert (full.refusal, reused.refusal) == ((409, "NoCapacity"), (422, "KeyReused"))


async def test_pending_change_is_never_visible_when_the_store_fails(broker, store, held, a, r):
    """Whoever read it gets an error, also those who would have been refused because of it."""
    made = await r.reserve("1")
    store.hold()
    await held.begin(r.delete("reservations", made["id"]))
    held.ask(r.post("reservations", request_body("4")))
    held.ask(r.get("reservations", made["id"]))
    held.ask(r.post("reservations", made["id"], "activate"))
    held.ask(a.get("instructions"))
    await held.none_is_answered()
    store.broken = StoreFailed("the disk is gone")
    store.let_go()
    codes = {answer.refusal for answer in await held.answers()}
    assert (503, "StoreFailed") in codes
    assert codes <= {(503, "StoreFailed"), (503, "NotReady")}  # one that comes late finds no state
    store.broken = None
    await waiting.until(lambda: broker.service.unready is None)
    assert await r.phase_of(made["id"]) == "Reserved"
    assert (await a.read("advertisements", "a"))["resources"]["reserved"]["cpu"] == "1"


# -- store failures

with_capacity = pytest.mark.broker(fails=True, offers={"a": ("40", "80Gi")})


async def is_ready_again(broker):
    await waiting.until(lambda: broker.service.unready is None)


async def readiness(broker):
    url = f"http://127.0.0.1:{broker.process.ports['probes']}/readyz"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


@with_capacity
async def test_failed_commit_fails_all_calls_and_leaves_nothing(broker, store):
    r = broker.cluster("r")
    kept = await r.reserve("1", key="kept")
    store.broken = StoreFailed("the disk is gone")
    answers = await asyncio.gather(
        *(r.post("reservations", request_body("1"), key=f"key-{n}") for n in range(20))
    )
    codes = {answer.refusal for answer in answers}
    assert (503, "StoreFailed") in codes
    assert codes <= {(503, "StoreFailed"), (503, "NotReady")}
    assert all("the disk is gone" in answer.problem.error for answer in answers)
    assert all(answer.problem.retryable for answer in answers)
    status, why = await readiness(broker)
    assert status == 503
    assert "without its store: the disk is gone" in why
    assert broker.metric("kubelend_store_up") == 0
    assert (await r.get("reservations")).refusal == (503, "NotReady")

    store.broken = None
    await is_ready_again(broker)
    assert await readiness(broker) == (200, "ok")
    assert broker.metric("kubelend_store_up") == 1
    assert (await r.read("reservations"))["reservations"] == [kept]
    assert (await r.reserve("1", key="kept")) == kept
    assert (await r.reserve("1", key="key-0"))["id"] != kept["id"]


@with_capacity
async def test_commit_with_a_lost_response_is_found_by_its_key(broker, store):
    """It was kept, and nobody knew: asking again with the key gives it, and reserves nothing more."""
    r = broker.cluster("r")
    store.broken, store.loses_answers = StoreFailed("cut off"), True
    assert (await r.post("reservations", request_body("3"), key="k")).refusal == (
        503,
        "StoreFailed",
    )
    store.broken = None
    await is_ready_again(broker)
    (found,) = (await r.read("reservations"))["reservations"]
    assert await r.reserve("3", key="k") == found
    offer = await broker.cluster("a").read("advertisements", "a")
    assert offer["resources"]["reserved"]["cpu"] == "3"


@with_capacity
async def test_streams_end_and_can_be_resumed_after_the_failure(broker, store):
    a, r = broker.cluster("a"), broker.cluster("r")
    kept = await r.reserve()
    async with a.stream() as stream:
        _, seen = await stream.events(2)
        store.broken = StoreFailed("the disk is gone")
        assert (await r.post("reservations", request_body())).status == 503
        assert [event for event in await stream.rest() if not event.comment] == []
    assert (await a.get("instructions", "stream")).refusal == (503, "NotReady")
    store.broken = None
    await is_ready_again(broker)
    async with a.stream(after=seen.id) as stream:
        made = await r.reserve()
        assert (await stream.event()).instruction == ("provider", "Hold", made["id"])
    assert {found["id"] for found in await a.read("instructions")} == {kept["id"], made["id"]}


@with_capacity
async def test_failed_read_of_the_archive_is_reported(broker, store):
    """A look into the archive fails alone: what is at hand goes on."""
    r = broker.cluster("r")
    made = await r.reserve()
    store.broken = StoreFailed("the archive is unreadable")
    answer = await r.get("reservations", "rsv-r-long-ago")
    assert answer.refusal == (503, "StoreFailed")
    store.broken = None
    assert await r.read("reservations", made["id"]) == made


@with_capacity
async def test_short_failure_loses_no_acknowledged_reservation(broker, store):
    """Off and on again under load, with clients that try again with their keys."""
    r = broker.cluster("r")
    answered: dict[str, str] = {}

    async def borrow(key):
        while (
            answer := await r.post("reservations", request_body("100m", "1Mi"), key=key)
        ).status != 201:
            assert answer.status == 503
            await asyncio.sleep(0.01)
        assert answered.setdefault(key, answer.json["id"]) == answer.json["id"]

    async def borrow_often(name):
        for number in range(20):
            await borrow(f"{name}-{number}")

    async def disturb():
        for number in range(3):
            store.broken = StoreFailed("for a moment")
            answer = await r.post("reservations", request_body("1m", "1Mi"), key=f"lost-{number}")
            assert answer.status == 503
            store.broken = None
            await is_ready_again(broker)

    await asyncio.gather(disturb(), *(borrow_often(name) for name in range(10)))
    assert len(set(answered.values())) == 200
    for key in answered:
        await borrow(key)
    listed = (await r.read("reservations", limit="1000"))["reservations"]
    assert {found["id"] for found in listed} == set(answered.values())


# -- real files


@pytest.fixture
def disk(tmp_path):
    with mounted(tmp_path / "disk", size="4m") as disk:
        yield disk


async def test_broker_is_unready_while_the_disk_is_full(start, disk):
    path = disk / "kubelend.db"
    broker = await start(open_store=partial(factory.open_store, str(path)))
    r = broker.cluster("r")
    await broker.cluster("a").advertise("1000", "1000Gi")
    answered = []
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(2**20 + 2**19))
    while (answer := await r.post("reservations", request_body("1m", "1Mi"))).status == 201:
        answered.append(answer.json)
        with ballast.open("ab") as file:
            fill(file)
    assert answer.refusal == (503, "StoreFailed")
    assert f"the store {path} cannot be used: the disk is full" in answer.problem.error
    status, why = await readiness(broker)
    assert (status, "the disk is full" in why) == (503, True)
    assert answered
    ballast.unlink()
    await is_ready_again(broker)
    assert (await r.read("reservations", limit="1000"))["reservations"] == answered
    assert (await r.post("reservations", request_body("1m", "1Mi"))).status == 201


def fill(file):
    """Leave less space than the next commits need."""
    try:
        while file.write(bytes(65536)):
            file.flush()
    except OSError:
        return


async def test_damaged_file_at_the_start_is_reported_and_not_served(certificates, tmp_path):
    path, content = tmp_path / "kubelend.db", b"this is no database" * 100
    path.write_bytes(content)
    async with brokers.child(certificates, tmp_path, ready=False) as broker:
        await waiting.until(lambda: bool(broker.logged("Loading the store failed, will retry")))
        status, text = await broker.probe("/readyz")
        assert status == 503
        assert str(path) in text
        assert "it is not a database, or damaged" in text
        assert await broker.probe("/healthz") == (200, "ok")
        a = broker.cluster("a")
        for answer in (
            await a.post("reservations", request_body()),
            await a.get("reservations"),
            await a.get("instructions"),
            await a.get("instructions", "stream"),
        ):
            assert answer.refusal == (503, "NotReady")
            assert str(path) in answer.problem.error
        assert path.read_bytes() == content
        assert len(broker.logged("Loading the store failed, will retry")) == 1
        path.unlink()
        await broker.wait_until_ready()
        await a.advertise()
        assert await broker.stop() == 0
    assert list(brokers.audited(path).clusters) == ["a"]


async def test_deleted_store_is_not_replaced_by_an_empty_one(certificates, tmp_path):
    """A volume that is unmounted, or a file that is moved: what was promised is not forgotten."""
    directory, elsewhere = tmp_path / "mounted", tmp_path / "elsewhere"
    directory.mkdir()
    async with brokers.child(certificates, tmp_path, store=str(directory / "store.db")) as broker:
        a, r = broker.cluster("a"), broker.cluster("r")
        await a.advertise()
        made = await r.reserve()
        directory.rename(elsewhere)
        assert (await r.post("reservations", request_body())).refusal == (503, "StoreFailed")
        await waiting.until(lambda: cannot(broker))
        for _ in range(3):
            status, why = await broker.probe("/readyz")
            assert status == 503
            assert "store.db was in use, and is missing" in why
            assert (await r.get("reservations")).refusal == (503, "NotReady")
        assert not directory.exists()
        elsewhere.rename(directory)
        await broker.wait_until_ready()
        assert (await r.read("reservations"))["reservations"] == [made]


def cannot(broker):
    return broker.logged("Loading the store failed, will retry")


# -- kills of the process

ROUNDS = 4

CLIENTS = 16


class Load:
    """Clients that reserve and release until the broker dies, and record the responses."""

    def __init__(self):
        self.answered: dict[str, Json] = {}
        """The latest response for each key."""
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
                    path = ("reservations", self.answered[key]["id"])
                    await self._call(key, "release", release(caller, path))
        except (aiohttp.ClientError, ConnectionError):
            return

    async def _call(self, key, name, call):
        self.unanswered[key] = name
        self.answered[key] = await call
        del self.unanswered[key]


async def release(caller, path):
    answer = await caller.delete(*path)
    assert answer.status == 200
    return answer.json


@pytest.mark.timeout(120)
async def test_kill_under_load_loses_no_acknowledged_change(certificates, tmp_path):
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
        missing = {found["id"] for found in load.answered.values()} - set(ledger.reservations)
        assert missing == set()
    assert len(load.answered) > ROUNDS * CLIENTS


async def everything_is_there(broker, load):
    """Each response still holds, and every key, answered or not, gives one reservation."""
    keys = sorted({*load.answered, *load.unanswered})
    for start in range(0, len(keys), CLIENTS):
        batch = keys[start : start + CLIENTS]
        await asyncio.gather(*(is_there(broker, load, key) for key in batch))
    load.unanswered.clear()
    expected = {found["id"] for found in load.answered.values()}
    assert {found["id"] for found in await all_reservations(broker)} == expected


async def is_there(broker, load, key):
    caller, known = broker.cluster(key.partition("/")[0]), load.answered.get(key)
    again = await caller.reserve("1m", "1Mi", key=key)
    found = await caller.read("reservations", again["id"])
    if known is not None:
        assert again["id"] == known["id"]
        assert key in load.unanswered or found == known
    load.answered[key] = found


async def all_reservations(broker):
    found: list[Json] = []
    query = {"limit": "1000"}
    while True:
        page = await broker.viewer().read("reservations", **query)
        found += page["reservations"]
        if "next" not in page:
            return found
        query["continue"] = page["next"]


async def test_kill_during_the_start_leaves_a_store_that_starts(certificates, tmp_path):
    """Again and again, at whatever the start was doing."""
    for delay in (0.0, 0.02, 0.1):
        async with brokers.child(certificates, tmp_path, ready=False) as broker:
            await asyncio.sleep(delay)
            await broker.stop(signal.SIGKILL)
    async with brokers.child(certificates, tmp_path) as broker:
        answer = await broker.cluster("r").post("reservations", request_body())
        assert answer.status == 409
