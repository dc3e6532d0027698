"""Kubernetes client: the verbs of an API server with typed objects.

    async with Client.open(config.load_config()) as kubernetes:
        found = await kubernetes.find(resource_for(Reservation), "r-1", "default")

Errors are those of `core.errors`: `NotFound`, `Forbidden`, `Conflict` (`AlreadyExists`, `Gone`),
`InvalidInput` with the server's message, and the retryable ones, `Unavailable` and `LimitExceeded`.
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
"""Requested duration of a watch. Randomised up to twice as long, so that watches do not end at the same
time.
"""
GRACE: Final = timedelta(seconds=30)
"""How much later than requested the server may end a watch."""

_LISTS: Final = 3
"""Attempts to list, if the continue token expires between pages."""


class Listing(NamedTuple, Generic[Kind]):
    """All objects at one resource version, and those that could not be decoded."""

    objects: list[Kind]
    resource_version: str
    unreadable: list[Unreadable]


class Client:
    """Client for one API server with one identity. Safe for concurrent use."""

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
        """Get an object; None if it does not exist. `NotFound` if its kind is not defined."""
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
        """List the objects of a namespace, or of all namespaces, at one resource version, in pages.

        With `at`, at exactly this resource version, which may come from a list of another kind; `Gone` if
        the server has compacted it.
        """
        selected = _selected(labels, fields)
        if at:
            exactly = {"resourceVersion": at, "resourceVersionMatch": "Exact"}
            return await self._list(resource, namespace, selected, exactly)
        for _ in range(_LISTS):
            with contextlib.suppress(Gone):
                return await self._list(resource, namespace, selected, {})
        raise Unavailable(f"list of {resource} expired repeatedly before its last page")

    async def create(self, resource: Resource[Kind], found: Kind) -> Kind:
        """Create an object. `AlreadyExists` if the name is taken."""
        body = answers.encode(resource, found, is_new=True)
        call = Call("POST", resource.path(found.metadata.namespace), body=body)
        return answers.decoder(resource).one(await self._connections.send(call))

    async def replace(self, resource: Resource[Kind], found: Kind) -> Kind:
        """Replace an object without its status; fields unknown to its type are lost. `Conflict` if it has
        changed.
        """
        return await self._put(resource, found, "")

    async def replace_status(self, resource: Resource[Kind], found: Kind) -> Kind:
        """Replace the status only. `Conflict` if the object has changed."""
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
        """Apply a JSON merge patch: null removes a field, fields that are not named stay.

        With `metadata.resourceVersion` in the patch: `Conflict` if the object has changed.
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
        """Delete an object if it exists. `Conflict` if the existing one has another `uid`."""
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
        """Watch changes after the resource version `since` until the server ends the watch; see
        `kube.informer`.

        The first event is a bookmark with `since`, sent when the server responds. `Gone` if the version is
        compacted.
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
        async with contextlib.aclosing(lines) as opened:
            async for line in opened:
                yield decoder.event(line) if line else Seen("BOOKMARK", None, since)

    async def raw(self, method: str, path: str, body: object = None) -> bytes:
        """Send any other request: `/version`, `/metrics`, evictions, objects without a type."""
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
            query = selected | {"continue": page.next}  # the continue token includes the version

    async def _put(self, resource: Resource[Kind], found: Kind, subresource: str) -> Kind:
        path = resource.path_of(found, subresource)
        call = Call("PUT", path, body=answers.encode(resource, found))
        return answers.decoder(resource).one(await self._connections.send(call))


def _selected(labels: str, fields: str) -> dict[str, str]:
    both = {"labelSelector": labels, "fieldSelector": fields}
    return {name: value for name, value in both.items() if value}
