"""The agent's cluster as its API server reports it: nodes and pods, by list and watch.

Both kinds are watched at once and reduced on decoding to the few fields that count, so a list of
thousands of pods is never in memory with their whole specs. A gap in one watch is answered by a
snapshot of both. Most changes of a real cluster change none of these fields, and are dropped.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Final, Generic, NamedTuple, Protocol, TypeVar, cast

import msgspec
import structlog
from msgspec.structs import force_setattr

from kubelend.agent.ports import ClusterChange, NodeDeleted, PodDeleted, Snapshot
from kubelend.core import pod_requests
from kubelend.core.errors import InvalidInput, UnexpectedResponse
from kubelend.core.pod_requests import (
    KubernetesNode,
    KubernetesPod,
    Node,
    NodeMetadata,
    NodeSpec,
    NodeStatus,
    Pod,
    PodMetadata,
    PodSpec,
    PodStatus,
)
from kubelend.kube import informer
from kubelend.kube.client import Client
from kubelend.kube.codec import UndecodableObject
from kubelend.kube.informer import Deleted, Listed, WatchHealth
from kubelend.kube.resources import Object, Resource

UNFINISHED_PODS_SELECTOR: Final = "status.phase!=Succeeded,status.phase!=Failed"
"""A pod that finishes leaves this selection, and the watch reports it as deleted."""

Kind = TypeVar("Kind", bound=Object)


class KubernetesSource:
    """`agent.ports.ClusterSource` of the cluster that a client is connected to."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._watch_health = WatchHealth(())

    @property
    def problem(self) -> str:
        return self._watch_health.unready or ""

    async def identity(self) -> str:
        found = await self._client.find(NAMESPACES, "kube-system")
        if found is None:
            raise UnexpectedResponse("namespace kube-system not found", hint="set --cluster-id")
        return found.metadata.uid

    async def changes(self) -> AsyncGenerator[ClusterChange, None]:
        nodes: ProjectionCache[Node, NodeDeleted] = ProjectionCache(
            NodeDeleted, lambda one: one.name
        )
        pods: ProjectionCache[Pod, PodDeleted] = ProjectionCache(PodDeleted, lambda one: one.uid)
        of_nodes = self._watch_cached(nodes, NODES)
        of_pods = self._watch_cached(pods, PODS, UNFINISHED_PODS_SELECTOR)
        events: AsyncGenerator[ClusterChange | Relisted, None] = merge_streams(of_nodes, of_pods)
        delivered = 0, 0
        async with aclosing(events):
            async for event in events:
                listed = nodes.list_count, pods.list_count
                if not all(listed):
                    continue
                if not isinstance(event, Relisted):
                    yield event
                elif delivered != listed:  # else the snapshot for the other kind's list covers it
                    delivered = listed
                    yield Snapshot(nodes.all(), pods.all())

    async def _watch_cached(
        self,
        cache: ProjectionCache[Projected, Deletion],
        resource: Resource[Kind],
        fields: str = "",
    ) -> AsyncGenerator[Projected | Deletion | Relisted, None]:
        """The changes of a kind that change its projection."""
        report = functools.partial(self._watch_health.report, resource.plural)
        events = informer.list_and_watch(self._client, resource, fields=fields, report=report)
        try:
            async with aclosing(events):
                async for event in events:
                    change = cache.handle_event(event)
                    if change is not None:
                        yield change
        finally:
            report("")


Event = TypeVar("Event")


async def merge_streams(*streams: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """Buffers at most one event per stream: a slow consumer slows the streams down.

    Ends with the first stream that ends or fails. All are closed with this one.
    """
    waiting = {_next_event(stream): stream for stream in streams}
    try:
        while True:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                for event in task.result():
                    waiting[_next_event(stream)] = stream
                    yield event
            if len(waiting) < len(streams):
                return
    finally:
        await _close_streams(waiting, streams)


def _next_event(stream: AsyncGenerator[Event, None]) -> asyncio.Task[list[Event]]:
    async def take() -> list[Event]:
        """Empty at the end of the stream: a task cannot raise StopAsyncIteration."""
        async for event in stream:
            return [event]
        return []

    return asyncio.create_task(take(), name="next event")


async def _close_streams(
    waiting: dict[asyncio.Task[list[Event]], AsyncGenerator[Event, None]],
    streams: tuple[AsyncGenerator[Event, None], ...],
) -> None:
    for task in waiting:
        task.cancel()
    if waiting:
        await asyncio.wait(waiting)
    for task in waiting:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
    for stream in streams:
        await stream.aclose()


Projected = TypeVar("Projected")
Deletion = TypeVar("Deletion")
Projected_co = TypeVar("Projected_co", covariant=True)

log = structlog.get_logger("kubelend.source")


class ProjectedObject(Protocol[Projected_co]):
    """A decoded object and its projection."""

    @property
    def key(self) -> str: ...

    @property
    def projected(self) -> Projected_co: ...


class Relisted(NamedTuple):
    """Everything may have changed."""


RELISTED: Final = Relisted()


class ProjectionCache(Generic[Projected, Deletion]):
    """`handle_event` returns what an event changes in the cache: often nothing."""

    def __init__(
        self, deletion: Callable[[str], Deletion], key_of: Callable[[UndecodableObject], str]
    ) -> None:
        self.list_count = 0
        """How many lists were received."""
        self._deletion = deletion
        self._key_of = key_of
        self._projected: dict[str, Projected] = {}
        self._undecodable: dict[str, str] = {}
        """The decode error of each undecodable object, to log it once."""

    def all(self) -> list[Projected]:
        return list(self._projected.values())

    def handle_event(self, event: object) -> Projected | Deletion | Relisted | None:
        match event:
            case Listed(objects, unreadable):
                return self._reset(cast(list[ProjectedObject[Projected]], objects), unreadable)
            case Deleted(found):
                return self._drop(cast(ProjectedObject[Projected], found).key)
            case UndecodableObject():
                return self._skip_undecodable(event)
            case _:
                return self._put(cast(ProjectedObject[Projected], event))

    def _reset(
        self, objects: list[ProjectedObject[Projected]], unreadable: list[UndecodableObject]
    ) -> Relisted:
        self.list_count += 1
        self._projected = {found.key: found.projected for found in objects}
        known = self._undecodable
        self._undecodable = {}
        for one in unreadable:
            key = self._key_of(one)
            if key in known:
                self._undecodable[key] = known[key]
            self._skip_undecodable(one)
        return RELISTED

    def _put(self, found: ProjectedObject[Projected]) -> Projected | None:
        self._undecodable.pop(found.key, None)
        if self._projected.get(found.key) == found.projected:
            return None
        self._projected[found.key] = found.projected
        return found.projected

    def _drop(self, key: str) -> Deletion | None:
        self._undecodable.pop(key, None)
        return None if self._projected.pop(key, None) is None else self._deletion(key)

    def _skip_undecodable(self, one: UndecodableObject) -> Deletion | None:
        key = self._key_of(one)
        known = self._undecodable.get(key)
        gone = self._drop(key)
        if not one.is_deleted:
            self._undecodable[key] = one.error
            if known != one.error:
                name = f"{one.namespace}/{one.name}" if one.namespace else one.name
                log.warning("Skipping object that cannot be decoded", name=name, error=one.error)
        return gone


class ObjectMetadata(NodeMetadata, frozen=True, gc=False):
    """Nodes have no namespace, but the client reads it of every kind."""

    uid: str = ""
    namespace: str = ""


class NodeProjection(msgspec.Struct, frozen=True, gc=False):
    """A node, of which only `projected` is left after decoding."""

    metadata: ObjectMetadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()
    projected: Node = Node("")

    def __post_init__(self) -> None:
        with _as_decode_error():
            projected = pod_requests.project_node(
                KubernetesNode(self.metadata, self.spec, self.status)
            )
        _replace_fields(self, *_EMPTY_NODE, projected)

    @property
    def key(self) -> str:
        return self.projected.name


class PodProjection(msgspec.Struct, frozen=True, gc=False):
    """A pod, of which only `projected` is left after decoding."""

    metadata: PodMetadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()
    projected: Pod = Pod("")

    def __post_init__(self) -> None:
        with _as_decode_error():
            projected = pod_requests.project_pod(
                KubernetesPod(self.metadata, self.spec, self.status)
            )
        _replace_fields(self, *_EMPTY_POD, projected)

    @property
    def key(self) -> str:
        return self.projected.id


class Namespace(msgspec.Struct, frozen=True, gc=False):
    """The fields that identify a cluster."""

    metadata: ObjectMetadata


NODES: Final = Resource("", "v1", "nodes", "Node", NodeProjection, namespaced=False, page_size=50)
PODS: Final = Resource("", "v1", "pods", "Pod", PodProjection, page_size=50)
"""Pods have ten kilobytes each, of which a hundred bytes are cached: the page size bounds the agent's
memory."""
NAMESPACES: Final = Resource("", "v1", "namespaces", "Namespace", Namespace, namespaced=False)

_EMPTY_NODE = (ObjectMetadata(""), NodeSpec(), NodeStatus())
_EMPTY_POD = (PodMetadata("", ""), PodSpec(), PodStatus())


@contextmanager
def _as_decode_error() -> Iterator[None]:
    """msgspec reports this class as a decode error of the object."""
    try:
        yield
    except InvalidInput as error:
        raise ValueError(str(error)) from error


def _replace_fields(decoded: msgspec.Struct, *values: object) -> None:
    for name, value in zip(decoded.__struct_fields__, values, strict=True):
        force_setattr(decoded, name, value)
