"""The agent's cluster as its API server reports it: nodes and pods, by list and watch.

Both kinds are watched at once and reduced on decoding to the few fields that count, so a list of
thousands of pods is never in memory with their whole specs. A gap in one watch is answered by a
snapshot of both. Most changes of a real cluster change none of these fields, and are dropped.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final, TypeVar

from kubelend.agent.ports import Change, NodeDeleted, PodDeleted, Snapshot
from kubelend.core.errors import UnexpectedAnswer
from kubelend.core.nodes import Node
from kubelend.core.pods import Pod
from kubelend.kube import watching
from kubelend.kube.client import Client
from kubelend.kube.resources import Object, Resource
from kubelend.sources import sights
from kubelend.sources.merging import merge_streams
from kubelend.sources.mirrors import Deletion, Projected, ProjectionCache, Relisted

UNFINISHED_PODS_SELECTOR: Final = "status.phase!=Succeeded,status.phase!=Failed"
"""A pod that finishes leaves this selection, and the watch reports it as deleted."""

Kind = TypeVar("Kind", bound=Object)


class KubernetesSource:
    """`agent.ports.ClusterSource` of the cluster that a client is connected to."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._watch_errors: dict[str, str] = {}

    @property
    def problem(self) -> str:
        return "; ".join(f"cannot watch {kind}: {why}" for kind, why in self._watch_errors.items())

    async def identity(self) -> str:
        found = await self._client.find(sights.NAMESPACES, "kube-system")
        if found is None:
            raise UnexpectedAnswer("namespace kube-system not found", hint="set --cluster-id")
        return found.metadata.uid

    async def changes(self) -> AsyncGenerator[Change, None]:
        nodes: ProjectionCache[Node, NodeDeleted] = ProjectionCache(
            NodeDeleted, lambda one: one.name
        )
        pods: ProjectionCache[Pod, PodDeleted] = ProjectionCache(PodDeleted, lambda one: one.uid)
        of_nodes = self._watch_cached(nodes, sights.NODES)
        of_pods = self._watch_cached(pods, sights.PODS, UNFINISHED_PODS_SELECTOR)
        events: AsyncGenerator[Change | Relisted, None] = merge_streams(of_nodes, of_pods)
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
        report = functools.partial(self._set_watch_error, resource.plural)
        events = watching.list_and_watch(self._client, resource, fields=fields, report=report)
        try:
            async with aclosing(events):
                async for event in events:
                    change = cache.handle_event(event)
                    if change is not None:
                        yield change
        finally:
            self._set_watch_error(resource.plural, "")

    def _set_watch_error(self, plural: str, problem: str) -> None:
        if problem:
            self._watch_errors[plural] = problem
        else:
            self._watch_errors.pop(plural, None)
