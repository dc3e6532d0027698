"""Local objects as custom resources of the agent's own cluster.

Stateless: each call reads from the API server, and each write names the version that it is based on, so
that no concurrent change is lost.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Final

import msgspec

from kubelend.agent.ports import Deleted, Listed
from kubelend.core.errors import Conflict, NotFound
from kubelend.kube import patches, resources, watching
from kubelend.kube.answers import Unreadable
from kubelend.kube.client import Client
from kubelend.sources import names, revisions
from kubelend.wire.objects import Kind, Object

TRIES: Final = 5
"""For writes without a `resource_version`, which are repeated after a conflict."""

MOST_TOLD: Final = 3
"""How many undecodable objects are listed; the others are counted."""


class KubernetesObjects:
    """`agent.ports.LocalObjects` of the cluster that a client is connected to."""

    def __init__(self, client: Client, namespaces: Mapping[type[Object], str]) -> None:
        """`namespaces`: where a kind is listed and watched; all namespaces if it is missing or
        empty.
        """
        self._client = client
        self._namespaces = namespaces
        self._unseen: dict[str, str] = {}
        self._unreadable: dict[tuple[str, str], str] = {}
        """By kind and `uid`."""

    @property
    def problem(self) -> str:
        """The objects that cannot be decoded, each with its error; empty if there are none."""
        errors = sorted(self._unreadable.values())
        more = [f"and {len(errors) - MOST_TOLD} more"] if len(errors) > MOST_TOLD else []
        return "; ".join([*errors[:MOST_TOLD], *more])

    @property
    def unseen(self) -> str:
        """Why some kinds cannot be watched now; empty if all can."""
        return "; ".join(
            f"cannot watch {kind}: {why}" for kind, why in sorted(self._unseen.items())
        )

    async def list(self, kind: type[Kind]) -> list[Kind]:
        found = await self._client.list(resources.of(kind), self._namespace(kind))
        return _sorted(found.objects)

    async def find(self, kind: type[Kind], key: str) -> Kind | None:
        namespace, name = names.parse(key)
        return await self._client.find(resources.of(kind), name, namespace)

    async def apply(self, wanted: Kind) -> Kind:
        for _ in range(TRIES):
            kept = await self.find(type(wanted), wanted.key)
            revisions.check(kept, wanted)
            try:
                return await (self._create(wanted) if kept is None else self._edit(kept, wanted))
            except Conflict as problem:
                if wanted.metadata.resource_version:
                    raise revisions.conflict(wanted) from problem
        raise revisions.conflict(wanted)

    async def set_status(self, wanted: Kind) -> Kind | None:
        for _ in range(TRIES):
            kept = await self.find(type(wanted), wanted.key)
            if kept is None or wanted.metadata.uid not in ("", kept.metadata.uid):
                return None
            revisions.check(kept, wanted)
            try:
                return await self._state(kept, wanted)
            except Conflict as problem:
                if wanted.metadata.resource_version:
                    raise revisions.conflict(wanted) from problem
        raise revisions.conflict(wanted)

    async def delete(self, kind: type[Kind], key: str) -> None:
        namespace, name = names.parse(key)
        await self._client.delete(resources.of(kind), name, namespace)

    async def watch(self, kind: type[Kind]) -> AsyncGenerator[Kind | Deleted | Listed, None]:
        report = functools.partial(self._report, kind.plural)
        events = watching.follow(
            self._client, resources.of(kind), self._namespace(kind), report=report
        )
        try:
            async with aclosing(events):
                async for event in events:
                    if (change := self._taken(kind.plural, event)) is not None:
                        yield change
        finally:
            self._report(kind.plural, "")

    async def _create(self, wanted: Kind) -> Kind:
        """A new object: server-set metadata and status of `wanted` do not apply to it."""
        return await self._client.create(resources.of(type(wanted)), revisions.blank(wanted))

    async def _edit(self, kept: Kind, wanted: Kind) -> Kind:
        before, after = _plain(kept), _plain(revisions.edited(kept, wanted))
        return await self._patch(kept, patches.difference(before, after))

    async def _state(self, kept: Kind, wanted: Kind) -> Kind:
        before, after = _plain(revisions.status_of(kept)), _plain(revisions.status_of(wanted))
        change = patches.difference(before, after)
        return await self._patch(kept, {"status": change} if change else {}, "status")

    async def _patch(self, kept: Kind, change: patches.Json, subresource: str = "") -> Kind:
        if not change:
            return kept
        metadata = {**change.get("metadata", {}), "resourceVersion": kept.metadata.resource_version}
        try:
            return await self._client.patch(
                resources.of(type(kept)),
                kept.metadata.name,
                kept.metadata.namespace,
                change | {"metadata": metadata},
                subresource=subresource,
            )
        except NotFound as problem:  # deleted since it was read
            raise revisions.conflict(kept, "was deleted") from problem

    def _namespace(self, kind: type[Object]) -> str:
        return self._namespaces.get(kind, "")

    def _taken(self, plural: str, event: watching.Change[Kind]) -> Kind | Deleted | Listed | None:
        """The event for the watcher. None for an object that cannot be decoded: that is a `problem`."""
        match event:
            case watching.Listed(objects, unreadable):
                others = {at: why for at, why in self._unreadable.items() if at[0] != plural}
                self._unreadable = others
                for one in unreadable:
                    self._leave_out(plural, one)
                return Listed(_sorted(objects))
            case Unreadable():
                self._leave_out(plural, event)
                return None
            case watching.Deleted(found):
                return Deleted(found)
            case found:
                self._unreadable.pop((plural, found.metadata.uid), None)
                return found

    def _leave_out(self, plural: str, one: Unreadable) -> None:
        self._unreadable.pop((plural, one.uid), None)
        if not one.is_deleted:
            where = f"{plural} {one.namespace}/{one.name}"
            self._unreadable[plural, one.uid] = f"{where}: {one.problem}"

    def _report(self, plural: str, problem: str) -> None:
        if problem:
            self._unseen[plural] = problem
        else:
            self._unseen.pop(plural, None)


def _sorted(objects: Iterable[Kind]) -> list[Kind]:
    return sorted(objects, key=lambda one: one.key)


def _plain(part: msgspec.Struct) -> patches.Json:
    found: patches.Json = msgspec.to_builtins(part)
    return found
