"""The calls that an API server knows, with typed objects in and out.

    async with Client.open(access.find()) as kubernetes:
        found = await kubernetes.find(resources.of(Reservation), "r-1", "default")

The agent's source, the store, the controllers and the lab call Kubernetes through this. Errors are those of
`core.errors`: `NotFound`, `Forbidden`, `Conflict` (`AlreadyExists`, `Gone`), `InvalidInput` with the server's
words, and what is `retryable`: `Unavailable` and `LimitExceeded`.
"""

from __future__ import annotations

import builtins
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from datetime import timedelta
from typing import Final, Generic, NamedTuple

import msgspec

from kubelend.core.errors import Gone, NotFound, Unavailable
from kubelend.kits.backoff import Backoff
from kubelend.kube import answers, connections
from kubelend.kube.access import Access
from kubelend.kube.answers import Page, Seen, Unreadable
from kubelend.kube.connections import Call, Connections
from kubelend.kube.resources import Kind, Resource

PAGE: Final = 500
WATCH_FOR: Final = timedelta(minutes=5)
"""The server is asked to end a watch after this and up to as much again: not all watches at one moment."""
GRACE: Final = timedelta(seconds=30)
"""By which it may be late with it."""

_LISTS: Final = 3
"""How often a list is begun anew that grew too old between its pages."""


class Listing(NamedTuple, Generic[Kind]):
    """All objects that were there at one version; those `unreadable` do not fit their type."""

    objects: list[Kind]
    resource_version: str
    unreadable: list[Unreadable]


class Client:
    """One API server, called as one identity. May be used by many tasks at once."""

    def __init__(self, made: Connections, access: Access, watch_for: timedelta, grace: timedelta):
        self.access = access
        self._connections = made
        self._watch_for = watch_for
        self._grace = grace

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        access: Access,
        *,
        timeout: timedelta = connections.TIMEOUT,
        backoff: Backoff = connections.BACKOFF,
        watch_for: timedelta = WATCH_FOR,
        grace: timedelta = GRACE,
        at_once: int = connections.MOST_AT_ONCE,
    ) -> AsyncIterator[Client]:
        made = Connections(access, timeout, backoff, at_once)
        try:
            yield cls(made, access, watch_for, grace)
        finally:
            await made.close()

    async def find(self, resource: Resource[Kind], name: str, namespace: str = "") -> Kind | None:
        """None if it is not there. `NotFound` if its kind is not even defined."""
        call = Call("GET", resource.path(namespace, name))
        try:
            return answers.decoder(resource).one(await self._connections.send(call))
        except NotFound as error:
            if answers.is_missing_object(error):
                return None
            raise

    async def list(
        self,
        resource: Resource[Kind],
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
        at: str = "",
    ) -> Listing[Kind]:
        """All of a namespace, or of all namespaces, as of one version, read in pages.

        With `at`: as of this very version, which may be one that a list of another kind gave. `Gone` if the
        server has forgotten it, which it does after some minutes.
        """
        selected = _selected(labels, fields)
        if at:
            exactly = {"resourceVersion": at, "resourceVersionMatch": "Exact"}
            return await self._list(resource, namespace, selected, exactly)
        for _ in range(_LISTS):
            with contextlib.suppress(Gone):
                return await self._list(resource, namespace, selected, {})
        raise Unavailable(f"{resource} change too fast to be listed")

    async def create(self, resource: Resource[Kind], found: Kind) -> Kind:
        """`AlreadyExists` if one of this name does."""
        body = answers.encode(resource, found, is_new=True)
        call = Call("POST", resource.path(found.metadata.namespace), body=body)
        return answers.decoder(resource).one(await self._connections.send(call))

    async def replace(self, resource: Resource[Kind], found: Kind) -> Kind:
        """All but its status: what its type does not know is lost. `Conflict` if it has changed since."""
        return await self._put(resource, found, "")

    async def replace_status(self, resource: Resource[Kind], found: Kind) -> Kind:
        """Its status and nothing else. `Conflict` if it has changed since."""
        return await self._put(resource, found, "status")

    async def patch(
        self,
        resource: Resource[Kind],
        name: str,
        namespace: str,
        change: Mapping[str, object],
        *,
        subresource: str = "",
    ) -> Kind:
        """A JSON merge patch: what it names is set, or removed by a null. Everything else stays.

        With a `metadata.resourceVersion` in it: `Conflict` if it has changed since.
        """
        call = Call(
            "PATCH",
            resource.path(namespace, name, subresource),
            body=msgspec.json.encode(change),
            content_type="application/merge-patch+json",
        )
        return answers.decoder(resource).one(await self._connections.send(call))

    async def delete(
        self, resource: Resource[Kind], name: str, namespace: str = "", *, uid: str = ""
    ) -> None:
        """Nothing happens if it is gone. `Conflict` if one of another `uid` has its name."""
        options: dict[str, object] = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        call = Call("DELETE", resource.path(namespace, name), body=msgspec.json.encode(options))
        try:
            await self._connections.send(call)
        except NotFound as error:
            if not answers.is_missing_object(error):
                raise

    async def watch(
        self,
        resource: Resource[Kind],
        namespace: str = "",
        *,
        since: str,
        labels: str = "",
        fields: str = "",
    ) -> AsyncGenerator[Seen[Kind], None]:
        """What happens after version `since`, until the server ends it; see `kube.watching` for longer.

        First a bookmark of that very version, once the server answers. `Gone` if it keeps nothing so old.
        """
        decoder = answers.decoder(resource)
        seconds = max(1, int(self._watch_for.total_seconds() * (1 + random.random())))  # noqa: S311
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": since,
            "timeoutSeconds": str(seconds),
            **_selected(labels, fields),
        }
        call = Call("GET", resource.path(namespace), query)
        lines = self._connections.lines(call, timedelta(seconds=seconds) + self._grace)
        async with contextlib.aclosing(lines) as said:
            async for line in said:
                yield decoder.event(line) if line else Seen("BOOKMARK", None, since)

    async def raw(self, method: str, path: str, body: object = None) -> bytes:
        """Whatever else there is: `/version`, `/metrics`, evictions, objects without a type."""
        content = None if body is None else msgspec.json.encode(body)
        return await self._connections.send(Call(method, path, body=content))

    async def _list(
        self,
        resource: Resource[Kind],
        namespace: str,
        selected: dict[str, str],
        version: dict[str, str],
    ) -> Listing[Kind]:
        objects: builtins.list[Kind] = []
        unreadable: builtins.list[Unreadable] = []
        selected = {**selected, "limit": str(resource.page or PAGE)}
        query = selected | version
        while True:
            call = Call("GET", resource.path(namespace), query)
            page: Page[Kind] = answers.decoder(resource).page(await self._connections.send(call))
            objects += page.objects
            unreadable += page.unreadable
            if not page.next:
                return Listing(objects, page.resource_version, unreadable)
            query = selected | {"continue": page.next}  # which names the version by itself

    async def _put(self, resource: Resource[Kind], found: Kind, subresource: str) -> Kind:
        path = resource.path_of(found, subresource)
        call = Call("PUT", path, body=answers.encode(resource, found))
        return answers.decoder(resource).one(await self._connections.send(call))


def _selected(labels: str, fields: str) -> dict[str, str]:
    both = {"labelSelector": labels, "fieldSelector": fields}
    return {name: value for name, value in both.items() if value}
