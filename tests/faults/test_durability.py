"""Nothing is answered or visible before it is durable: not to its caller, nor to anybody else."""

import asyncio
import contextlib
from typing import Any

import pytest

import waiting
from callers import wish
from kubelend.core.errors import StoreFailed

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
    await held.begin(r.post("reservations", wish()))
    await held.none_is_answered()
    assert store.kept.load().reservations == []
    store.let_go()
    (answer,) = await held.answers()
    assert answer.status == 201
    assert [found.id for found in store.kept.load().reservations] == [answer.json["id"]]


async def test_nobody_sees_a_reservation_before_it_is_durable(broker, store, held, a, r):
    store.hold()
    await held.begin(r.post("reservations", wish("4")))
    held.ask(r.get("reservations"))
    held.ask(a.get("instructions"))
    held.ask(a.get("advertisements", "a"))
    held.ask(broker.admin().get("clusters"))
    held.ask(broker.viewer().get("reservations"))
    held.ask(r.post("explain", wish()))
    held.ask(r.post("reservations", wish(), dryRun="true"))
    held.ask(a.get("reservations", "rsv-r-unknown"))
    await held.none_is_answered()
    store.let_go()
    made, mine, holds, offer, *_, explained, dry, unknown = await held.answers()
    assert made.status == 201
    assert mine.json["reservations"] == holds.json == [made.json]
    assert offer.json["resources"]["available"]["cpu"] == "0"
    assert (explained.json["fitting"], dry.status, unknown.status) == (0, 409, 404)


async def test_open_stream_hears_of_it_only_when_it_is_durable(store, held, a, r):
    async with a.stream() as stream:
        await stream.event()
        assert (await stream.next()).comment == "open"
        store.hold()
        await held.begin(r.post("reservations", wish()))
        held.ask(stream.event())
        await held.none_is_answered()
        store.let_go()
        made, event = await held.answers()
        assert event.told == ("provider", "Hold", made.json["id"])


async def test_stream_that_opens_meanwhile_tells_all_once_it_is_durable(store, held, a, r):
    """Also of what was there before and is changing: a reset without it would mean that it is over."""
    first = await r.reserve("1")
    store.hold()
    await held.begin(r.post("reservations", first["id"], "renew", {"duration": "9h"}))
    async with contextlib.AsyncExitStack() as stack:
        held.ask(stack.enter_async_context(a.stream()))
        held.ask(r.post("reservations", wish("2")))
        await held.none_is_answered()
        store.let_go()
        renewed, stream, second = await held.answers()
        reset, *holds = await stream.events(3)
        assert reset.name == "reset"
        assert [hold.data["reservation"] for hold in holds] == [renewed.json, second.json]
        third = await r.reserve("1")
        assert (await stream.event()).told == ("provider", "Hold", third["id"])


@pytest.mark.parametrize("how", ["key reused", "full", "given back", "in use", "removed"])
async def test_refusal_because_of_what_is_not_durable_waits_too(broker, store, held, a, r, how):
    """Had the store failed, the refusal would have been wrong."""
    admin, made = broker.admin(), await r.reserve()
    await broker.cluster("b").advertise("1", "1Gi")
    change, ask, expected = {
        "key reused": (
            lambda: r.post("reservations", wish("1"), key="k"),
            lambda: r.post("reservations", wish("2"), key="k"),
            (422, "KeyReused"),
        ),
        "full": (
            lambda: r.post("reservations", wish("3")),
            lambda: r.post("reservations", wish("2")),
            (409, "NoCapacity"),
        ),
        "given back": (
            lambda: r.delete("reservations", made["id"]),
            lambda: r.post("reservations", made["id"], "activate"),
            (409, "WrongPhase"),
        ),
        "in use": (
            lambda: r.post("reservations", wish("1", targetClusterID="b")),
            lambda: admin.delete("clusters", "b"),
            (409, "Conflict"),
        ),
        "removed": (
            lambda: admin.delete("clusters", "b"),
            lambda: admin.get("clusters", "b"),
            (404, "NotFound"),
        ),
    }[how]
    store.hold()
    await held.begin(change())
    held.ask(ask())
    await held.none_is_answered()
    store.let_go()
    _, refused = await held.answers()
    assert refused.refusal == expected


async def test_what_was_only_assumed_is_never_seen_when_the_store_fails(broker, store, held, a, r):
    """Whoever read it gets an error, also those who would have been refused because of it."""
    made = await r.reserve("1")
    store.hold()
    await held.begin(r.delete("reservations", made["id"]))
    held.ask(r.post("reservations", wish("4")))
    held.ask(r.get("reservations", made["id"]))
    held.ask(r.post("reservations", made["id"], "activate"))
    held.ask(a.get("instructions"))
    await held.none_is_answered()
    store.broken = StoreFailed("the disk is gone")
    store.let_go()
    answers = await held.answers()
    assert {answer.refusal for answer in answers} == {(503, "StoreFailed")}
    store.broken = None
    await waiting.until(lambda: broker.service.unready is None)
    assert await r.phase_of(made["id"]) == "Reserved"
    assert (await a.read("advertisements", "a"))["resources"]["reserved"]["cpu"] == "1"


async def test_calls_of_one_moment_share_a_commit(broker, store, r):
    """While one group is written the next gathers: a slow disk makes groups larger, not the queue longer."""
    store.hold()
    before = store.commits
    calls = [asyncio.create_task(r.post("reservations", wish("10m", "1Mi"))) for _ in range(50)]
    await waiting.until(lambda: store.commits > before)
    await asyncio.wait(calls, timeout=0.3)
    store.let_go()
    assert {answer.status for answer in await asyncio.gather(*calls)} == {201}
    assert store.commits - before <= 5
