"""Nodes and pods of a real cluster: decoded to projections, cached, and merged into one stream of changes.

tests/contract/test_cluster_sources.py has the promises of every source, on a real API server.
"""

import asyncio
from contextlib import aclosing
from typing import NamedTuple, cast

import msgspec
import pytest
from structlog.testing import capture_logs

from kubelend.agent.ports import PodDeleted, Snapshot
from kubelend.core.errors import Unavailable
from kubelend.core.pod_requests import Node, NodeSpec, NodeStatus, Pod, PodSpec, PodStatus
from kubelend.core.resources import Resources
from kubelend.kube.client import Client
from kubelend.kube.codec import Listing, UndecodableObject
from kubelend.kube.informer import Deleted, Listed
from kubelend.sources.kubernetes import (
    RELISTED,
    KubernetesSource,
    NodeProjection,
    PodProjection,
    ProjectionCache,
    merge_streams,
)

# -- projections


def pod(cpu):
    container = {"name": "main", "resources": {"requests": {"cpu": cpu}}}
    metadata = {"name": "p", "namespace": "team", "uid": "u-1", "labels": {"app": "x"}}
    return {"metadata": metadata, "spec": {"nodeName": "n", "containers": [container]}}


def node(cpu):
    status = {"capacity": {"cpu": cpu}, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": "n", "uid": "u-2", "labels": {"zone": "a"}}, "status": status}


def decoded(found, kind):
    return msgspec.json.decode(msgspec.json.encode(found), type=kind)


@pytest.mark.parametrize(
    "found, kind, key, projected, empty",
    [
        pytest.param(
            *(pod("2"), PodProjection, "u-1", Pod("u-1", "n", Resources(cpu=2000))),
            (PodSpec(), PodStatus()),
            id="pod",
        ),
        pytest.param(
            *(node("4"), NodeProjection, "n", Node("n", capacity=Resources(cpu=4000))),
            (NodeSpec(), NodeStatus()),
            id="node",
        ),
    ],
)
def test_object_is_reduced_to_its_projection(found, kind, key, projected, empty):
    reduced = decoded(found, kind)
    assert (reduced.key, reduced.projected) == (key, projected)
    assert (reduced.spec, reduced.status, reduced.metadata.labels) == (*empty, {})


@pytest.mark.parametrize(
    "found, kind, problem",
    [
        (pod("odd"), PodProjection, "pod team/p: cpu: 'odd' is not a quantity"),
        (node("odd"), NodeProjection, "node n: status.capacity"),
    ],
    ids=["pod", "node"],
)
def test_quantity_that_cannot_be_parsed_is_a_decode_error(found, kind, problem):
    with pytest.raises(msgspec.ValidationError, match=problem):
        decoded(found, kind)


# -- cache


class Projected(NamedTuple):
    projected: Pod

    @property
    def key(self):
        return self.projected.id


def projected(id, node=""):
    return Projected(Pod(id, node))


def undecodable(uid, error="is odd", is_deleted=False):
    return UndecodableObject("default", f"pod-{uid}", uid, error, is_deleted)


@pytest.fixture
def cache():
    return ProjectionCache(PodDeleted, lambda one: one.uid)


def test_list_replaces_the_cache_and_is_counted(cache):
    assert (cache.list_count, cache.all()) == (0, [])
    assert cache.handle_event(Listed([projected("a"), projected("b")], [])) is RELISTED
    assert cache.handle_event(Listed([projected("b", "n"), projected("c")], [])) is RELISTED
    assert (cache.list_count, cache.all()) == (2, [Pod("b", "n"), Pod("c")])


def test_only_changes_of_the_projection_are_reported(cache):
    cache.handle_event(Listed([projected("a")], []))
    assert cache.handle_event(projected("a")) is None
    assert cache.handle_event(projected("a", "n")) == Pod("a", "n")
    assert cache.handle_event(projected("b")) == Pod("b")
    assert cache.handle_event(Deleted(projected("a"))) == PodDeleted("a")
    assert cache.handle_event(Deleted(projected("a"))) is None
    assert cache.all() == [Pod("b")]


def test_object_that_becomes_undecodable_counts_as_deleted(cache):
    cache.handle_event(Listed([projected("a")], []))
    assert cache.handle_event(undecodable("a")) == PodDeleted("a")
    assert cache.handle_event(projected("a")) == Pod("a")


def test_undecodable_object_is_logged_once_per_error(cache):
    with capture_logs() as logs:
        cache.handle_event(Listed([], [undecodable("a")]))
        cache.handle_event(undecodable("a"))
        cache.handle_event(Listed([], [undecodable("a")]))
        cache.handle_event(undecodable("a", "is odder"))
        cache.handle_event(undecodable("a", is_deleted=True))
        cache.handle_event(undecodable("b"))
    assert [(line["name"], line["error"]) for line in logs] == [
        ("default/pod-a", "is odd"),
        ("default/pod-a", "is odder"),
        ("default/pod-b", "is odd"),
    ]
    cache.handle_event(Listed([], []))
    with capture_logs() as logs:
        cache.handle_event(Listed([], [undecodable("a")]))
    assert len(logs) == 1


# -- merged streams


class Stream:
    """Yields what is put, until that is an error or the end."""

    END = object()

    def __init__(self):
        self.events: asyncio.Queue[object] = asyncio.Queue()
        self.is_closed = False

    async def __call__(self):
        try:
            while (event := await self.events.get()) is not self.END:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.is_closed = True


@pytest.fixture
def streams():
    return Stream(), Stream()


async def test_no_event_is_lost_when_all_come_at_once(streams):
    one, two = streams
    for number in range(10):
        one.events.put_nowait(("one", number))
        two.events.put_nowait(("two", number))
    async with aclosing(merge_streams(one(), two())) as events:
        merged = [await anext(events) for _ in range(20)]
    for name in ("one", "two"):
        assert [event for event in merged if event[0] == name] == [(name, n) for n in range(10)]
    assert one.is_closed
    assert two.is_closed


async def test_slow_consumer_slows_the_streams_down(streams):
    one, two = streams
    for number in range(10):
        one.events.put_nowait(number)
    async with aclosing(merge_streams(one(), two())) as events:
        assert await anext(events) == 0
        await asyncio.sleep(0)
        assert one.events.qsize() >= 8


async def test_first_stream_that_fails_or_ends_closes_all(streams):
    one, two = streams
    one.events.put_nowait(Unavailable("away"))
    with pytest.raises(Unavailable):
        async with aclosing(merge_streams(one(), two())) as events:
            await anext(events)
    assert two.is_closed
    three, four = Stream(), Stream()
    three.events.put_nowait(Stream.END)
    assert [event async for event in merge_streams(three(), four())] == []
    assert four.is_closed


async def test_cancelled_consumer_leaves_no_stream_open(streams):
    one, two = streams

    async def consume():
        async with aclosing(merge_streams(one(), two())) as events:
            await anext(events)

    task = asyncio.create_task(consume())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not one.events.qsize()


# -- source


class IdleClient:
    """Of an empty cluster without changes; both lists come at once."""

    async def list(self, *_, **__):
        return Listing([], [], "1")

    async def watch(self, *_, **__):
        await asyncio.Event().wait()
        yield


async def test_two_lists_at_the_start_are_one_snapshot():
    changes = KubernetesSource(cast("Client", IdleClient())).changes()
    assert await anext(changes) == Snapshot([], [])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await anext(changes)
