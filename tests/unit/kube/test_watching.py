"""What a follower hears of a server that ends, breaks, forgets and refuses."""

import asyncio
import contextlib
from datetime import timedelta

import pytest

import scripted_api
from certificates import Certificates
from config_maps import CONFIG_MAPS
from kubelend.kits.backoff import Backoff
from kubelend.kube import informer
from kubelend.kube.client import Client
from kubelend.kube.codec import UndecodableObject
from kubelend.kube.informer import Deleted, Listed
from scripted_api import event, one, page, status, watch

AT_ONCE = Backoff(retries=informer.UNLIMITED_RETRIES, first=timedelta(0), longest=timedelta(0))


@pytest.fixture
async def server(tmp_path):
    async with scripted_api.running(Certificates(tmp_path).server()) as running:
        yield running


def plain(change):
    if isinstance(change, Listed):
        return [each.metadata.name for each in change.objects]
    if isinstance(change, Deleted):
        return f"-{change.found.metadata.name}"
    return change if isinstance(change, UndecodableObject) else f"+{change.metadata.name}"


async def watched(server, *script, count, backoff=AT_ONCE):
    """The first changes that a follower hears while the server goes through this, and what it reports."""
    server.answers += script
    changes: list[object] = []
    problems: list[str] = []
    async with (
        Client.open(server.access()) as client,
        contextlib.aclosing(
            informer.list_and_watch(client, CONFIG_MAPS, report=problems.append, backoff=backoff)
        ) as following,
    ):
        async for change in following:
            changes.append(plain(change))
            if len(changes) == count:
                break
    return changes, problems


def added(name, version):
    return event("ADDED", one(name, version))


def versions(server):
    return [each.query.get("resourceVersion") for each in server.asked]


async def test_watch_goes_on_where_the_last_one_ended(server):
    script = [page(one("a"), version="10"), watch(added("b", "11")), watch(added("c", "12"))]
    changes, problems = await watched(server, *script, count=3)
    assert changes == [["a"], "+b", "+c"]
    assert versions(server) == [None, "10", "11"]
    assert problems == []


async def test_bookmark_moves_the_version_on(server):
    mark = event("BOOKMARK", {"metadata": {"resourceVersion": "50"}})
    changes, _ = await watched(server, page(), watch(mark), watch(added("a", "51")), count=2)
    assert changes == [[], "+a"]
    assert versions(server) == [None, "10", "50"]


async def test_broken_connection_is_reported_and_retried(server):
    script = [page(), watch(added("a", "11"), cut=True), watch(added("b", "12"))]
    changes, problems = await watched(server, *script, count=3)
    assert changes == [[], "+a", "+b"]
    assert versions(server) == [None, "10", "11"]
    assert len(problems) == 2
    assert "closed the connection" in problems[0] or "invalid response" in problems[0]
    assert problems[1] == ""


@pytest.mark.parametrize(
    "gone",
    [status(410, "too old"), watch(event("ERROR", {"code": 410, "message": "too old"}))],
    ids=["as answer", "as event"],
)
async def test_forgotten_version_makes_it_list_again(server, gone):
    script = [
        page(one("a")),
        watch(added("b", "11")),
        gone,
        page(one("c")),
        watch(added("d", "22")),
    ]
    changes, _ = await watched(server, *script, count=4)
    assert changes == [["a"], "+b", ["c"], "+d"]


async def test_every_error_is_waited_out(server):
    script = [
        status(403, "not yet"),
        status(404, "no kind"),
        status(401, "who?"),
        status(503, "starting"),
        page(one("a")),
        status(403, "no watching"),
        watch(event("DELETED", one("a", "11"))),
    ]
    changes, problems = await watched(server, *script, count=2)
    assert changes == [["a"], "-a"]
    assert [problem.split(";")[0].split(": ")[-1] for problem in problems] == [
        "not yet",
        "no kind",
        "who?",
        "starting",
        "no watching",
        "",
    ]


async def test_same_problem_is_reported_once(server):
    script = [*(status(503) for _ in range(5)), page(), watch(added("a", "11"))]
    _, problems = await watched(server, *script, count=2)
    assert len(problems) == 2


async def test_watch_that_never_lasts_is_backed_off_from(server):
    script = [page(), *(watch() for _ in range(3)), watch(added("a", "11"))]
    _, problems = await watched(server, *script, count=2)
    assert problems == ["watches of configmaps end immediately", "", *problems[:2] * 2]


async def test_pauses_grow_until_something_is_seen(server):
    pauses = []

    class Counted(Backoff, frozen=True):
        def delays(self, chance=None):
            for length in range(10):
                pauses.append(length)
                yield 0.0

    script = [status(503), status(503), page(), watch(added("a", "11"), cut=True)]
    script += [status(503), watch(added("b", "12"))]
    await watched(server, *script, count=3, backoff=Counted())
    assert pauses == [0, 1, 0, 1]


async def test_server_is_left_alone_for_as_long_as_it_says(server):
    script = [status(503, retry_after=1), page()]
    async with Client.open(server.access(), backoff=Backoff(retries=0)) as client:
        server.answers += script
        clock = asyncio.get_running_loop().time
        began = clock()
        async with contextlib.aclosing(
            informer.list_and_watch(client, CONFIG_MAPS, backoff=AT_ONCE)
        ) as following:
            await anext(following)
        assert clock() - began >= 1.0


async def test_object_that_cannot_be_read_is_handed_on_and_the_next_one_too(server):
    broken = {"metadata": {"name": "x", "namespace": "n", "resourceVersion": "11"}, "data": 1}
    script = [page(), watch(event("ADDED", broken), added("a", "12"))]
    changes, _ = await watched(server, *script, count=3)
    assert isinstance(changes[1], UndecodableObject)
    assert changes[2] == "+a"
