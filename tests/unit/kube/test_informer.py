"""List and watch with a server that ends, breaks and rejects watches; informer caches; health of watches."""

import asyncio
import contextlib
from datetime import timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

import broker_samples as samples
import make
import scripted_api
from certificates import Certificates
from clocks import Seconds
from config_maps import CONFIG_MAPS
from kubelend.kits.backoff import Backoff
from kubelend.kube import informer
from kubelend.kube.client import Client
from kubelend.kube.codec import UndecodableObject
from kubelend.kube.informer import Deleted, InformerCache, Listed, WatchHealth
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
    """The first changes of a watch of this script, and the reported errors."""
    server.answers += script
    changes: list[object] = []
    errors: list[str] = []
    async with (
        Client.open(server.access()) as client,
        contextlib.aclosing(
            informer.list_and_watch(client, CONFIG_MAPS, report=errors.append, backoff=backoff)
        ) as following,
    ):
        async for change in following:
            changes.append(plain(change))
            if len(changes) == count:
                break
    return changes, errors


def added(name, version):
    return event("ADDED", one(name, version))


def versions(server):
    return [each.query.get("resourceVersion") for each in server.asked]


async def test_watch_resumes_at_the_last_version(server):
    script = [page(one("a"), version="10"), watch(added("b", "11")), watch(added("c", "12"))]
    changes, errors = await watched(server, *script, count=3)
    assert changes == [["a"], "+b", "+c"]
    assert versions(server) == [None, "10", "11"]
    assert errors == []


async def test_bookmark_advances_the_version(server):
    mark = event("BOOKMARK", {"metadata": {"resourceVersion": "50"}})
    changes, _ = await watched(server, page(), watch(mark), watch(added("a", "51")), count=2)
    assert changes == [[], "+a"]
    assert versions(server) == [None, "10", "50"]


async def test_broken_connection_is_reported_and_retried(server):
    script = [page(), watch(added("a", "11"), cut=True), watch(added("b", "12"))]
    changes, errors = await watched(server, *script, count=3)
    assert changes == [[], "+a", "+b"]
    assert versions(server) == [None, "10", "11"]
    assert len(errors) == 2
    assert "closed the connection" in errors[0] or "invalid response" in errors[0]
    assert errors[1] == ""


@pytest.mark.parametrize(
    "gone",
    [status(410, "too old"), watch(event("ERROR", {"code": 410, "message": "too old"}))],
    ids=["as answer", "as event"],
)
async def test_expired_version_causes_a_relist(server, gone):
    script = [
        page(one("a")),
        watch(added("b", "11")),
        gone,
        page(one("c")),
        watch(added("d", "22")),
    ]
    changes, _ = await watched(server, *script, count=4)
    assert changes == [["a"], "+b", ["c"], "+d"]


async def test_every_error_is_retried(server):
    script = [
        status(403, "not yet"),
        status(404, "no kind"),
        status(401, "who?"),
        status(503, "starting"),
        page(one("a")),
        status(403, "no watching"),
        watch(event("DELETED", one("a", "11"))),
    ]
    changes, errors = await watched(server, *script, count=2)
    assert changes == [["a"], "-a"]
    assert [error.split(";")[0].split(": ")[-1] for error in errors] == [
        "not yet",
        "no kind",
        "who?",
        "starting",
        "no watching",
        "",
    ]


async def test_same_error_is_reported_once(server):
    script = [*(status(503) for _ in range(5)), page(), watch(added("a", "11"))]
    _, errors = await watched(server, *script, count=2)
    assert len(errors) == 2


async def test_watch_that_ends_immediately_is_an_error(server):
    script = [page(), *(watch() for _ in range(3)), watch(added("a", "11"))]
    _, errors = await watched(server, *script, count=2)
    assert errors == ["watches of configmaps end immediately", "", *errors[:2] * 2]


async def test_backoff_is_reset_by_an_event(server):
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


async def test_retry_after_of_the_server_is_respected(server):
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


# -- cache

A, B = samples.request_object("a"), samples.request_object("b")
B = samples.with_metadata(B, uid="u-b")
UPDATED = samples.with_status(A, phase="Failed")
RECREATED = samples.with_metadata(A, uid="u-2")
ODD = UndecodableObject("hub", "a", A.metadata.uid, "nonsense")


@pytest.fixture
def enqueued():
    return []


@pytest.fixture
def updates():
    return []


@pytest.fixture
def cache(enqueued, updates):
    cache: InformerCache[Any] = InformerCache(enqueued.append, lambda *both: updates.append(both))
    cache.handle(Listed([A], []))
    enqueued.clear()
    return cache


def test_listed_objects_are_enqueued(enqueued):
    cache: InformerCache[Any] = InformerCache(enqueued.append)
    assert not cache.has_synced
    cache.handle(Listed([A, B], []))
    assert (enqueued, cache.has_synced, cache.find("a")) == (["a", "b"], True, A)


def test_update_is_reported_with_the_state_before(cache, enqueued, updates):
    cache.handle(UPDATED)
    assert (enqueued, updates) == (["a"], [(A, UPDATED)])
    cache.handle(UPDATED)
    assert len(updates) == 1


def test_deleted_object_has_a_tombstone_until_it_is_forgotten(cache, enqueued):
    cache.handle(Deleted(UPDATED))
    assert (cache.find("a"), cache.tombstones("a"), enqueued) == (None, [UPDATED], ["a"])
    cache.enqueue_all()
    assert enqueued == ["a", "a"]
    cache.forget(UPDATED)
    assert cache.tombstones("a") == []


@pytest.mark.parametrize(
    "changes, found, tombstones",
    [
        ([Listed([B], [])], None, [A]),
        ([RECREATED], RECREATED, [A]),
        ([RECREATED, Deleted(A)], RECREATED, [A]),
        ([ODD, Listed([], [ODD])], A, []),
        ([ODD._replace(is_deleted=True)], None, [A]),
    ],
    ids=["not listed", "recreated", "late deletion", "undecodable", "undecodable deletion"],
)
def test_object_is_deleted_when_it_is_gone_or_another_has_its_name(
    cache, updates, changes, found, tombstones
):
    for change in changes:
        cache.handle(change)
    assert (cache.find("a"), cache.tombstones("a")[:1], updates) == (found, tombstones, [])


def test_undecodable_object_is_logged_once_and_enqueued(cache, enqueued):
    with capture_logs() as logs:
        cache.handle(ODD)
        cache.handle(Listed([], [ODD]))
    assert (len(logs), enqueued, cache.undecodable("a")) == (1, ["a"], ODD)
    cache.enqueue_all()
    assert enqueued == ["a", "a"]


@pytest.mark.parametrize("change", [A, Listed([], []), ODD._replace(is_deleted=True)])
def test_fixed_or_deleted_object_is_not_undecodable(cache, change):
    cache.handle(ODD)
    cache.handle(change)
    assert cache.undecodable("a") is None


# -- health


@pytest.fixture
def clock():
    return Seconds(100.0)


@pytest.fixture
def health(clock):
    return WatchHealth(("pods", "nodes"), " in hub", 15 * make.SECOND, clock)


def listed(health):
    health.listed("pods")
    health.listed("nodes")


def test_kind_without_a_list_is_unready_immediately(health):
    health.report("pods", "forbidden")
    assert health.unready == "cannot watch pods in hub: forbidden", "not what that prevents"
    health.listed("pods")
    health.report("pods", "")
    assert health.unready == "cannot watch nodes in hub: waiting for the initial list"
    health.report("nodes", "forbidden")
    health.listed("nodes")  # but whether it is watched is not known yet
    assert health.unready == "cannot watch nodes in hub: forbidden"
    health.report("nodes", "")
    assert health.unready is None


def test_watch_error_makes_unready_after_the_grace_period(health, clock):
    listed(health)
    health.report("pods", "cut off")
    clock.now += 14
    for kind in ("pods", "nodes"):
        health.report(kind, "refused")
    seen = []
    for seconds in (0, 1, 14):
        clock.now += seconds
        seen.append(health.unready)
    pods, nodes = (f"cannot watch {kind} in hub: refused" for kind in ("pods", "nodes"))
    assert seen == [None, pods, f"{pods}; {nodes}"]


def test_recovered_watch_starts_a_new_grace_period(health, clock):
    listed(health)
    for error in ("cut off", "", "cut off"):
        health.report("pods", error)
        clock.now += 10
    assert health.unready is None
