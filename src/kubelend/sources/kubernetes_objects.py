"""Local objects as custom resources of the agent's own cluster.

Each call reads from the API server, and each write names the version that it is based on, so that no
concurrent change is lost. A write that is based on the version that was seen last does not read it again.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing, suppress
from typing import Final

import msgspec

from kubelend.agent import health
from kubelend.agent.ports import Deleted, Listed
from kubelend.core.errors import Conflict, NotFound
from kubelend.kube import informer, resources
from kubelend.kube.client import Client
from kubelend.kube.codec import UndecodableObject
from kubelend.kube.informer import WatchHealth
from kubelend.sources import object_semantics
from kubelend.wire.objects import Kind, Object

CONFLICT_ATTEMPTS: Final = 5
"""For writes without a `resource_version`, which are repeated after a conflict."""
MAX_REMEMBERED: Final = 64
"""Objects of which the last version is remembered; the oldest is dropped."""


class KubernetesObjects:
    """`agent.ports.LocalObjects` of the cluster that a client is connected to."""

    def __init__(self, client: Client, namespaces: Mapping[type[Object], str]) -> None:
        """`namespaces`: where a kind is listed and watched; all namespaces if it is missing or
        empty.
        """
        self._client = client
        self._namespaces = namespaces
        self._watch_health = WatchHealth(())
        self._undecodable: dict[tuple[str, str], str] = {}
        """By kind and `uid`."""
        self._remembered: dict[tuple[type[Object], str], Object | None] = {}
        """The last version that was read, watched or written, by kind and key; None if there is none."""

    @property
    def problem(self) -> str:
        """The objects that cannot be decoded, each with its error; empty if there are none."""
        return health.join_errors(sorted(self._undecodable.values()))

    @property
    def watch_problem(self) -> str:
        """Why some kinds cannot be watched now; empty if all can."""
        return self._watch_health.unready or ""

    async def list(self, kind: type[Kind]) -> list[Kind]:
        found = await self._client.list(resources.resource_for(kind), self._namespace(kind))
        return _sorted(found.objects)

    async def find(self, kind: type[Kind], key: str) -> Kind | None:
        namespace, name = object_semantics.parse_object_key(key)
        found = await self._client.find(resources.resource_for(kind), name, namespace)
        self._remember(kind, key, found)
        return found

    async def apply(self, wanted: Kind) -> Kind:
        for _ in range(CONFLICT_ATTEMPTS):
            stored = await self._find_base(wanted)
            object_semantics.check_precondition(stored, wanted)
            with suppress(Conflict):
                return await (
                    self._create(wanted) if stored is None else self._patch_object(stored, wanted)
                )
        raise object_semantics.conflict_error(wanted)

    async def set_status(self, wanted: Kind) -> Kind | None:
        for _ in range(CONFLICT_ATTEMPTS):
            stored = await self._find_base(wanted)
            if stored is None or wanted.metadata.uid not in ("", stored.metadata.uid):
                return None
            object_semantics.check_precondition(stored, wanted)
            with suppress(Conflict):
                return await self._patch_status(stored, wanted)
        raise object_semantics.conflict_error(wanted)

    async def delete(self, kind: type[Kind], key: str) -> None:
        namespace, name = object_semantics.parse_object_key(key)
        await self._client.delete(resources.resource_for(kind), name, namespace)

    async def watch(self, kind: type[Kind]) -> AsyncGenerator[Kind | Deleted | Listed, None]:
        report = functools.partial(self._watch_health.report, kind.plural)
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

    def _remember(self, kind: type[Kind], key: str, found: Kind | None) -> None:
        self._remembered.pop((kind, key), None)
        self._remembered[kind, key] = found
        if len(self._remembered) > MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]

    async def _find_base(self, wanted: Kind) -> Kind | None:
        """The remembered version that `wanted` changes, else the current one.

        It is remembered for one write: after a conflict the current one is read.
        """
        known = self._remembered.pop((type(wanted), wanted.key), wanted)
        if known is None and not wanted.metadata.uid:
            return None
        version = wanted.metadata.resource_version
        is_base = known is not None and known.metadata.resource_version == version
        if is_base and isinstance(known, type(wanted)) and known != wanted:
            return known
        return await self.find(type(wanted), wanted.key)

    async def _create(self, wanted: Kind) -> Kind:
        """A new object: server-set metadata and status of `wanted` do not apply to it."""
        created = await self._client.create(
            resources.resource_for(type(wanted)), object_semantics.without_server_fields(wanted)
        )
        self._remember(type(created), created.key, created)
        return created

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
            written = await self._client.patch(
                resources.resource_for(type(stored)),
                stored.metadata.name,
                stored.metadata.namespace,
                change | {"metadata": metadata},
                subresource=subresource,
            )
        except NotFound as error:  # deleted since it was read
            raise object_semantics.conflict_error(stored, "was deleted") from error
        self._remember(type(written), written.key, written)
        return written

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
                self._remember(type(found), found.key, found)
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
