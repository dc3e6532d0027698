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

from kubelend.agent import health
from kubelend.agent.ports import Deleted, Listed
from kubelend.core.errors import Conflict, NotFound
from kubelend.kube import informer, resources
from kubelend.kube.client import Client
from kubelend.kube.codec import UndecodableObject
from kubelend.sources import object_semantics
from kubelend.sources.kubernetes import WatchErrors
from kubelend.wire.objects import Kind, Object

CONFLICT_ATTEMPTS: Final = 5
"""For writes without a `resource_version`, which are repeated after a conflict."""


class KubernetesObjects:
    """`agent.ports.LocalObjects` of the cluster that a client is connected to."""

    def __init__(self, client: Client, namespaces: Mapping[type[Object], str]) -> None:
        """`namespaces`: where a kind is listed and watched; all namespaces if it is missing or
        empty.
        """
        self._client = client
        self._namespaces = namespaces
        self._watch_errors = WatchErrors()
        self._undecodable: dict[tuple[str, str], str] = {}
        """By kind and `uid`."""

    @property
    def problem(self) -> str:
        """The objects that cannot be decoded, each with its error; empty if there are none."""
        return health.join_errors(sorted(self._undecodable.values()))

    @property
    def watch_problem(self) -> str:
        """Why some kinds cannot be watched now; empty if all can."""
        return self._watch_errors.text

    async def list(self, kind: type[Kind]) -> list[Kind]:
        found = await self._client.list(resources.resource_for(kind), self._namespace(kind))
        return _sorted(found.objects)

    async def find(self, kind: type[Kind], key: str) -> Kind | None:
        namespace, name = object_semantics.parse_object_key(key)
        return await self._client.find(resources.resource_for(kind), name, namespace)

    async def apply(self, wanted: Kind) -> Kind:
        for _ in range(CONFLICT_ATTEMPTS):
            stored = await self.find(type(wanted), wanted.key)
            object_semantics.check_precondition(stored, wanted)
            try:
                return await (
                    self._create(wanted) if stored is None else self._patch_object(stored, wanted)
                )
            except Conflict as error:
                if wanted.metadata.resource_version:
                    raise object_semantics.conflict_error(wanted) from error
        raise object_semantics.conflict_error(wanted)

    async def set_status(self, wanted: Kind) -> Kind | None:
        for _ in range(CONFLICT_ATTEMPTS):
            stored = await self.find(type(wanted), wanted.key)
            if stored is None or wanted.metadata.uid not in ("", stored.metadata.uid):
                return None
            object_semantics.check_precondition(stored, wanted)
            try:
                return await self._patch_status(stored, wanted)
            except Conflict as error:
                if wanted.metadata.resource_version:
                    raise object_semantics.conflict_error(wanted) from error
        raise object_semantics.conflict_error(wanted)

    async def delete(self, kind: type[Kind], key: str) -> None:
        namespace, name = object_semantics.parse_object_key(key)
        await self._client.delete(resources.resource_for(kind), name, namespace)

    async def watch(self, kind: type[Kind]) -> AsyncGenerator[Kind | Deleted | Listed, None]:
        report = functools.partial(self._watch_errors.set, kind.plural)
        events = informer.list_and_watch(
            self._client, resources.resource_for(kind), self._namespace(kind), report=report
        )
        try:
            async with aclosing(events):
                async for event in events:
                    if (change := self._handle_event(kind.plural, event)) is not None:
                        yield change
        finally:
            report("")

    async def _create(self, wanted: Kind) -> Kind:
        """A new object: server-set metadata and status of `wanted` do not apply to it."""
        return await self._client.create(
            resources.resource_for(type(wanted)), object_semantics.without_server_fields(wanted)
        )

    async def _patch_object(self, stored: Kind, wanted: Kind) -> Kind:
        before, after = _to_json(stored), _to_json(object_semantics.with_changes(stored, wanted))
        return await self._patch(stored, resources.merge_patch(before, after))

    async def _patch_status(self, stored: Kind, wanted: Kind) -> Kind:
        before, after = (
            _to_json(object_semantics.status_of(stored)),
            _to_json(object_semantics.status_of(wanted)),
        )
        change = resources.merge_patch(before, after)
        return await self._patch(stored, {"status": change} if change else {}, "status")

    async def _patch(self, stored: Kind, change: resources.Json, subresource: str = "") -> Kind:
        if not change:
            return stored
        metadata = {
            **change.get("metadata", {}),
            "resourceVersion": stored.metadata.resource_version,
        }
        try:
            return await self._client.patch(
                resources.resource_for(type(stored)),
                stored.metadata.name,
                stored.metadata.namespace,
                change | {"metadata": metadata},
                subresource=subresource,
            )
        except NotFound as error:  # deleted since it was read
            raise object_semantics.conflict_error(stored, "was deleted") from error

    def _namespace(self, kind: type[Object]) -> str:
        return self._namespaces.get(kind, "")

    def _handle_event(
        self, plural: str, event: informer.Change[Kind]
    ) -> Kind | Deleted | Listed | None:
        """The event for the watcher. None for an object that cannot be decoded: that is a `problem`."""
        match event:
            case informer.Listed(objects, unreadable):
                others = {at: error for at, error in self._undecodable.items() if at[0] != plural}
                self._undecodable = others
                for one in unreadable:
                    self._record_undecodable(plural, one)
                return Listed(_sorted(objects))
            case UndecodableObject():
                self._record_undecodable(plural, event)
                return None
            case informer.Deleted(found):
                return Deleted(found)
            case found:
                self._undecodable.pop((plural, found.metadata.uid), None)
                return found

    def _record_undecodable(self, plural: str, one: UndecodableObject) -> None:
        self._undecodable.pop((plural, one.uid), None)
        if not one.is_deleted:
            where = f"{plural} {one.namespace}/{one.name}"
            self._undecodable[plural, one.uid] = f"{where}: {one.error}"


def _sorted(objects: Iterable[Kind]) -> list[Kind]:
    return sorted(objects, key=lambda one: one.key)


def _to_json(part: msgspec.Struct) -> resources.Json:
    found: resources.Json = msgspec.to_builtins(part)
    return found
