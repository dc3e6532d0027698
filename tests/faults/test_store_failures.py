"""A store that fails: nobody gets a wrong answer, all learn why, and the broker comes back by itself."""

import asyncio
import shutil
from functools import partial

import aiohttp
import pytest

import brokers
import waiting
from callers import wish
from disks import mounted
from kubelend.core.errors import StoreFailed
from kubelend.stores import factory

pytestmark = pytest.mark.broker(fails=True, offers={"a": ("40", "80Gi")})


async def is_ready_again(broker):
    await waiting.until(lambda: broker.service.unready is None)


async def readiness(broker):
    url = f"http://127.0.0.1:{broker.process.ports['probes']}/readyz"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


async def test_failed_commit_is_told_to_all_and_nothing_of_it_remains(broker, store):
    r = broker.cluster("r")
    kept = await r.reserve("1", key="kept")
    store.broken = StoreFailed("the disk is gone")
    answers = await asyncio.gather(
        *(r.post("reservations", wish("1"), key=f"key-{n}") for n in range(20))
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


async def test_commit_whose_answer_was_lost_is_found_by_its_key(broker, store):
    """It was kept, and nobody knew: asking again with the key gives it, and reserves nothing more."""
    r = broker.cluster("r")
    store.broken, store.loses_answers = StoreFailed("cut off"), True
    assert (await r.post("reservations", wish("3"), key="k")).refusal == (503, "StoreFailed")
    store.broken = None
    await is_ready_again(broker)
    (found,) = (await r.read("reservations"))["reservations"]
    assert await r.reserve("3", key="k") == found
    offer = await broker.cluster("a").read("advertisements", "a")
    assert offer["resources"]["reserved"]["cpu"] == "3"


async def test_streams_end_and_can_be_resumed_when_it_is_over(broker, store):
    a, r = broker.cluster("a"), broker.cluster("r")
    kept = await r.reserve()
    async with a.stream() as stream:
        _, seen = await stream.events(2)
        store.broken = StoreFailed("the disk is gone")
        assert (await r.post("reservations", wish())).status == 503
        assert [event for event in await stream.rest() if not event.comment] == []
    assert (await a.get("instructions", "stream")).refusal == (503, "NotReady")
    store.broken = None
    await is_ready_again(broker)
    async with a.stream(after=seen.id) as stream:
        made = await r.reserve()
        assert (await stream.event()).told == ("provider", "Hold", made["id"])
    assert {found["id"] for found in await a.read("instructions")} == {kept["id"], made["id"]}


async def test_archive_that_cannot_be_read_is_told_and_nothing_more(broker, store):
    """A look into the archive fails alone: what is at hand goes on."""
    r = broker.cluster("r")
    made = await r.reserve()
    store.broken = StoreFailed("the archive is unreadable")
    answer = await r.get("reservations", "rsv-r-long-ago")
    assert answer.refusal == (503, "StoreFailed")
    store.broken = None
    assert await r.read("reservations", made["id"]) == made


async def test_failure_of_a_moment_loses_no_reservation_that_was_answered(broker, store):
    """Off and on again under load, with clients that try again with their keys."""
    r = broker.cluster("r")
    answered: dict[str, str] = {}

    async def borrow(key):
        while (answer := await r.post("reservations", wish("100m", "1Mi"), key=key)).status != 201:
            assert answer.status == 503
            await asyncio.sleep(0.01)
        assert answered.setdefault(key, answer.json["id"]) == answer.json["id"]

    async def borrow_often(name):
        for number in range(20):
            await borrow(f"{name}-{number}")

    async def disturb():
        for number in range(3):
            store.broken = StoreFailed("for a moment")
            answer = await r.post("reservations", wish("1m", "1Mi"), key=f"lost-{number}")
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


async def test_full_disk_stops_the_broker_and_space_starts_it_again(start, disk):
    path = disk / "kubelend.db"
    broker = await start(open_store=partial(factory.open_store, str(path)))
    r = broker.cluster("r")
    await broker.cluster("a").advertise("1000", "1000Gi")
    answered = []
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(2**20 + 2**19))
    while (answer := await r.post("reservations", wish("1m", "1Mi"))).status == 201:
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
    assert (await r.post("reservations", wish("1m", "1Mi"))).status == 201


def fill(file):
    """Leave less space than the next commits need."""
    try:
        while file.write(bytes(65536)):
            file.flush()
    except OSError:
        return


@pytest.mark.parametrize(
    "content, why",
    [
        pytest.param(
            b"this is no database" * 100, "it is not a database, or damaged", id="garbage"
        ),
        pytest.param(b"", "is empty, and not a Kubelend store", id="empty"),
    ],
)
async def test_broken_file_at_the_start_is_named_and_never_answered_from(
    certificates, tmp_path, content, why
):
    path = tmp_path / "kubelend.db"
    path.write_bytes(content)
    async with brokers.child(certificates, tmp_path, ready=False) as broker:
        await waiting.until(lambda: bool(broker.logged("Loading the store failed, will retry")))
        status, text = await broker.probe("/readyz")
        assert status == 503
        assert str(path) in text
        assert why in text
        assert await broker.probe("/healthz") == (200, "ok")
        a = broker.cluster("a")
        for answer in (
            await a.post("reservations", wish()),
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


async def test_store_that_is_taken_away_is_not_replaced_by_an_empty_one(certificates, tmp_path):
    """A volume that is unmounted, or a file that is moved: what was promised is not forgotten."""
    directory, elsewhere = tmp_path / "mounted", tmp_path / "elsewhere"
    directory.mkdir()
    async with brokers.child(certificates, tmp_path, store=str(directory / "store.db")) as broker:
        a, r = broker.cluster("a"), broker.cluster("r")
        await a.advertise()
        made = await r.reserve()
        directory.rename(elsewhere)
        assert (await r.post("reservations", wish())).refusal == (503, "StoreFailed")
        await waiting.until(lambda: any("has lost" in line["error"] for line in cannot(broker)))
        for _ in range(3):
            status, why = await broker.probe("/readyz")
            assert status == 503
            assert "the store has lost committed data" in why
            assert (await r.get("reservations")).refusal == (503, "NotReady")
        shutil.rmtree(directory)
        elsewhere.rename(directory)
        await broker.wait_until_ready()
        assert (await r.read("reservations"))["reservations"] == [made]


def cannot(broker):
    return broker.logged("Loading the store failed, will retry")
