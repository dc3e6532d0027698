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

from kubelend.agent.ports import Change, NodeGone, PodGone, Snapshot
from kubelend.core.errors import UnexpectedAnswer
from kubelend.core.nodes import Node
from kubelend.core.pods import Pod
from kubelend.kube import watching
from kubelend.kube.client import Client
from kubelend.kube.resources import Object, Resource
from kubelend.sources import sights
from kubelend.sources.merging import merged
from kubelend.sources.mirrors import Gone, Kept, Mirror, Relisted

UNFINISHED: Final = "status.phase!=Succeeded,status.phase!=Failed"
"""A pod that finishes leaves this selection, and the watch reports it as deleted."""

Kind = TypeVar("Kind", bound=Object)


class KubernetesSource:
    """`agent.ports.ClusterSource` of the cluster that a client is connected to."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._problems: dict[str, str] = {}

    @property
    def problem(self) -> str:
        return "; ".join(f"cannot watch {kind}: {why}" for kind, why in self._problems.items())

    async def identity(self) -> str:
        found = await self._client.find(sights.NAMESPACES, "kube-system")
        if found is None:
            raise UnexpectedAnswer("namespace kube-system not found", hint="set --cluster-id")
        return found.metadata.uid

    async def changes(self) -> AsyncGenerator[Change, None]:
        nodes: Mirror[Node, NodeGone] = Mirror(NodeGone, lambda one: one.name)
        pods: Mirror[Pod, PodGone] = Mirror(PodGone, lambda one: one.uid)
        of_nodes = self._mirrored(nodes, sights.NODES)
        of_pods = self._mirrored(pods, sights.PODS, UNFINISHED)
        events: AsyncGenerator[Change | Relisted, None] = merged(of_nodes, of_pods)
        delivered = 0, 0
        async with aclosing(events):
            async for event in events:
                listed = nodes.listings, pods.listings
                if not all(listed):
                    continue
                if not isinstance(event, Relisted):
                    yield event
                elif delivered != listed:  # else the snapshot for the other kind's list covers it
                    delivered = listed
                    yield Snapshot(nodes.all(), pods.all())

    async def _mirrored(
        self, mirror: Mirror[Kept, Gone], resource: Resource[Kind], fields: str = ""
    ) -> AsyncGenerator[Kept | Gone | Relisted, None]:
        """The changes of a kind that change its projection."""
        report = functools.partial(self._report, resource.plural)
        events = watching.follow(self._client, resource, fields=fields, report=report)
        try:
            async with aclosing(events):
                async for event in events:
                    change = mirror.take(event)
                    if change is not None:
                        yield change
        finally:
            self._report(resource.plural, "")

    def _report(self, plural: str, problem: str) -> None:
        if problem:
            self._problems[plural] = problem
        else:
            self._problems.pop(plural, None)
