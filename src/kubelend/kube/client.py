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
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from datetime import timedelta
from typing import Final

import msgspec

from kubelend.core.errors import Gone, NotFound, Unavailable
from kubelend.kits.backoff import Backoff
from kubelend.kube import codec
from kubelend.kube import transport as kube_transport
from kubelend.kube.codec import Listing, UndecodableObject, WatchEvent
from kubelend.kube.config import KubeConfig
from kubelend.kube.resources import Kind, Resource
from kubelend.kube.transport import ApiRequest, Transport

MERGE_PATCH: Final = "application/merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
STRATEGIC_MERGE_PATCH: Final = "application/strategic-merge-patch+json"
"""Merges the elements of lists by their key; only for built-in kinds."""

PAGE_SIZE: Final = 500
WATCH_DURATION: Final = timedelta(minutes=5)
"""Requested duration of a watch. Randomised up to twice as long, so that not all end at the same time."""
WATCH_GRACE: Final = timedelta(seconds=30)
"""How much later than requested the server may end a watch."""

_LIST_ATTEMPTS: Final = 3
"""Attempts to list, if the continue token expires between pages."""


class Client:
    """Client for one API server with one identity. Safe for concurrent use."""

    def __init__(
        self, transport: Transport, config: KubeConfig, watch_duration: timedelta, grace: timedelta
    ):
        self.config = config
        self._transport = transport
        self._watch_duration = watch_duration
        self._grace = grace

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        config: KubeConfig,
        *,
        timeout: timedelta = kube_transport.REQUEST_TIMEOUT,
        backoff: Backoff = kube_transport.REQUEST_BACKOFF,
        watch_duration: timedelta = WATCH_DURATION,
        grace: timedelta = WATCH_GRACE,
        max_concurrent: int = kube_transport.MAX_CONCURRENT_REQUESTS,
    ) -> AsyncIterator[Client]:
        made = Transport(config, timeout, backoff, max_concurrent)
        try:
            yield cls(made, config, watch_duration, grace)
        finally:
            await made.close()

    async def find(self, resource: Resource[Kind], name: str, namespace: str = "") -> Kind | None:
        """Get an object; None if it does not exist. `NotFound` if its kind is not defined."""
        call = ApiRequest("GET", resource.path(namespace, name))
        try:
            return codec.decoder_for(resource).decode_object(await self._transport.send(call))
        except NotFound as error:
            if codec.is_object_not_found(error):
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
        selected = _selectors(labels, fields)
        if at:
            exactly = {"resourceVersion": at, "resourceVersionMatch": "Exact"}
            return await self._list(resource, namespace, selected, exactly)
        for _ in range(_LIST_ATTEMPTS):
            with contextlib.suppress(Gone):
                return await self._list(resource, namespace, selected, {})
        raise Unavailable(f"list of {resource} expired repeatedly before its last page")

    async def create(self, resource: Resource[Kind], found: Kind) -> Kind:
        """Create an object. `AlreadyExists` if the name is taken."""
        body = codec.encode_object(resource, found, is_new=True)
        call = ApiRequest("POST", resource.path(found.metadata.namespace), body=body)
        return codec.decoder_for(resource).decode_object(await self._transport.send(call))

    async def update(self, resource: Resource[Kind], found: Kind) -> Kind:
        """Replace all but the status; fields unknown to the type are lost. `Conflict` if it has changed."""
        path = resource.path(found.metadata.namespace, found.metadata.name)
        call = ApiRequest("PUT", path, body=codec.encode_object(resource, found))
        return codec.decoder_for(resource).decode_object(await self._transport.send(call))

    async def patch(
        self,
        resource: Resource[Kind],
        name: str,
        namespace: str,
        change: Mapping[str, object] | Sequence[Mapping[str, object]],
        *,
        subresource: str = "",
        content_type: str = MERGE_PATCH,
        dry_run: bool = False,
    ) -> Kind:
        """Apply a JSON merge patch: null removes a field, fields that are not named stay.

        With `metadata.resourceVersion` in the patch: `Conflict` if the object has changed. Other kinds of
        patches have another `content_type`.
        """
        call = ApiRequest(
            "PATCH",
            resource.path(namespace, name, subresource),
            {"dryRun": "All"} if dry_run else {},
            body=msgspec.json.encode(change),
            content_type=content_type,
        )
        return codec.decoder_for(resource).decode_object(await self._transport.send(call))

    async def delete(
        self, resource: Resource[Kind], name: str, namespace: str = "", *, uid: str = ""
    ) -> None:
        """Delete an object if it exists. `Conflict` if the existing one has another `uid`."""
        options: dict[str, object] = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        call = ApiRequest(
            "DELETE", resource.path(namespace, name), body=msgspec.json.encode(options)
        )
        try:
            await self._transport.send(call)
        except NotFound as error:
            if not codec.is_object_not_found(error):
                raise

    async def watch(
        self,
        resource: Resource[Kind],
        namespace: str = "",
        *,
        since: str,
        labels: str = "",
        fields: str = "",
    ) -> AsyncGenerator[WatchEvent[Kind], None]:
        """Watch changes after the version `since` until the server ends the watch; see `kube.informer`.

        The first event is a bookmark with `since`, sent when the server responds. `Gone` if the version is
        compacted.
        """
        decoder = codec.decoder_for(resource)
        seconds = max(1, int(self._watch_duration.total_seconds() * (1 + random.random())))  # noqa: S311
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": since,
            "timeoutSeconds": str(seconds),
            **_selectors(labels, fields),
        }
        call = ApiRequest("GET", resource.path(namespace), query)
        lines = self._transport.lines(call, timedelta(seconds=seconds) + self._grace)
        async with contextlib.aclosing(lines) as opened:
            async for line in opened:
                yield decoder.decode_event(line) if line else WatchEvent("BOOKMARK", None, since)

    async def raw(
        self, method: str, path: str, body: object = None, *, is_repeated: bool = True
    ) -> bytes:
        """Send any other request: `/version`, `/metrics`, evictions, objects without a type.

        `is_repeated` is for what the caller repeats itself, if the server asks for that.
        """
        content = None if body is None else msgspec.json.encode(body)
        call = ApiRequest(method, path, body=content, is_repeated=is_repeated)
        return await self._transport.send(call)

    async def _list(
        self,
        resource: Resource[Kind],
        namespace: str,
        selected: dict[str, str],
        version: dict[str, str],
    ) -> Listing[Kind]:
        objects: builtins.list[Kind] = []
        undecodable: builtins.list[UndecodableObject] = []
        selected = {**selected, "limit": str(resource.page_size or PAGE_SIZE)}
        query = selected | version
        while True:
            call = ApiRequest("GET", resource.path(namespace), query)
            page = codec.decoder_for(resource).decode_page(await self._transport.send(call))
            objects += page.objects
            undecodable += page.undecodable
            if not page.continue_token:
                return Listing(objects, undecodable, page.resource_version)
            # The continue token includes the version.
            query = selected | {"continue": page.continue_token}


def _selectors(labels: str, fields: str) -> dict[str, str]:
    both = {"labelSelector": labels, "fieldSelector": fields}
    return {name: value for name, value in both.items() if value}
