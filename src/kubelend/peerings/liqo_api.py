"""Access to Liqo's objects in the agent's own cluster: find, apply, wait and delete."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Final, TypeVar

import msgspec

from kubelend.core.errors import (
    AlreadyExists,
    Conflict,
    InvalidSettings,
    LimitExceeded,
    NotFound,
    Unavailable,
)
from kubelend.kube.client import Client
from kubelend.peerings import liqo_objects
from kubelend.peerings.liqo_objects import (
    MANAGED_LABEL,
    PODS,
    LiqoKind,
    LiqoResource,
    Manifest,
)
from kubelend.peerings.liqo_removal import Delete, Evict, Patch, RemovalAction

LIQO_NAMESPACE: Final = "liqo"
CONTROLLER_TIMEOUT: Final = timedelta(seconds=10)
"""How long Liqo's controllers may take to complete an object. Usually it is a fraction of a second."""
_FIRST_POLL_SECONDS: Final = 0.005
_POLL_SHARE: Final = 0.1
"""Time between two polls as a share of the time waited: they add at most this to what Liqo takes."""

Found = TypeVar("Found")


class LiqoApi:
    """Liqo's objects, and the Secrets and namespaces that belong to them."""

    def __init__(self, client: Client, namespace: str = LIQO_NAMESPACE) -> None:
        """`namespace` is the one in which Liqo is installed."""
        self.client = client
        self.namespace = namespace

    async def cluster_id(self) -> str:
        """Liqo's ID of this cluster."""
        listing = await self.client.list(
            _CONFIG_MAPS, self.namespace, labels="app.kubernetes.io/name=clusterid-configmap"
        )
        for found in listing.objects:
            if name := found.data.get("CLUSTER_ID"):
                return name
        raise InvalidSettings(
            f"Liqo's cluster ID not found in namespace {self.namespace}", hint="install Liqo"
        )

    async def find(self, kind: LiqoKind, name: str, namespace: str = "") -> LiqoResource | None:
        return await self.client.find(kind, name, namespace)

    async def list(
        self, kind: LiqoKind, namespace: str = "", labels: str = "", fields: str = ""
    ) -> list[LiqoResource]:
        return (await self.client.list(kind, namespace, labels=labels, fields=fields)).objects

    async def apply(self, kind: LiqoKind, manifest: Manifest) -> LiqoResource:
        """Creates the object, or changes the given fields of an existing one; others stay.

        One that others have created does not become ours by that.
        """
        metadata = manifest["metadata"]
        name, namespace = metadata["name"], metadata.get("namespace", "")
        found = await self.find(kind, name, namespace)
        if found is None:
            return await self.create(kind, manifest)
        if found.is_being_deleted:
            raise Unavailable(f"{kind.kind} {name} is still being deleted")
        if not found.is_managed:
            labels = {key: each for key, each in metadata["labels"].items() if key != MANAGED_LABEL}
            manifest = manifest | {"metadata": metadata | {"labels": labels}}
        if not _differs(found, manifest):
            return found
        return await self.client.patch(kind, name, namespace, manifest)

    async def ensure(self, kind: LiqoKind, manifest: Manifest) -> LiqoResource:
        """As `apply`, with one call for an object that does not exist, as is usual in a handshake."""
        with contextlib.suppress(Conflict):
            return await self.create(kind, manifest)
        return await self.apply(kind, manifest)

    async def create(self, kind: LiqoKind, manifest: Manifest) -> LiqoResource:
        """`Conflict` if it exists."""
        metadata = manifest["metadata"]
        document = {"apiVersion": kind.api_version, "kind": kind.kind, **manifest}
        try:
            path = kind.path(metadata.get("namespace", ""))
            return liqo_objects.decode(await self.client.raw("POST", path, document))
        except AlreadyExists:
            name = metadata["name"]
            raise Conflict(f"{kind.kind} {name} was created by another client") from None

    async def complete(
        self,
        kind: LiqoKind,
        name: str,
        namespace: str,
        read: Callable[[LiqoResource], Found | None],
        timeout: timedelta = CONTROLLER_TIMEOUT,
    ) -> Found | None:
        """Waits until Liqo has completed an object; returns what `read` finds in it, None if nothing."""
        began = asyncio.get_running_loop().time()
        while True:
            found = await self.find(kind, name, namespace)
            value = None if found is None else read(found)
            waited = asyncio.get_running_loop().time() - began
            if value or waited > timeout.total_seconds():
                return value
            await asyncio.sleep(max(_FIRST_POLL_SECONDS, waited * _POLL_SHARE))

    async def delete(self, kind: LiqoKind, found: LiqoResource) -> None:
        metadata = found.metadata
        await self.client.delete(kind, metadata.name, metadata.namespace, uid=metadata.uid)

    async def perform(self, action: RemovalAction) -> None:
        """Carries out a step of a removal. What is gone already is no error."""
        match action:
            case Delete(kind, found, None):
                await self.delete(kind, found)
            case Delete(kind, found, grace_seconds):
                await self._delete_pod(found, "DELETE", {"gracePeriodSeconds": grace_seconds})
            case Patch(kind, found, change):
                metadata = found.metadata
                with contextlib.suppress(NotFound):
                    await self.client.patch(kind, metadata.name, metadata.namespace, change)
            case Evict(pod):
                # A PodDisruptionBudget forbids it now: it is tried again with the next step.
                with contextlib.suppress(LimitExceeded):
                    await self._delete_pod(pod, "POST", {}, subresource="eviction")

    async def _delete_pod(
        self, pod: LiqoResource, method: str, options: Manifest, subresource: str = ""
    ) -> None:
        options = options | {"preconditions": {"uid": pod.metadata.uid}}
        body = options
        if subresource:
            names = {"name": pod.metadata.name, "namespace": pod.metadata.namespace}
            eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": names}
            body = eviction | {"deleteOptions": options}
        path = PODS.path(pod.metadata.namespace, pod.metadata.name, subresource)
        with contextlib.suppress(NotFound, Conflict):
            # A budget that forbids an eviction may do so for minutes.
            await self.client.raw(method, path, body, is_repeated=False)


async def is_installed(client: Client) -> bool:
    """Whether the cluster has Liqo's API. Every account may ask for that."""
    found = msgspec.json.decode(await client.raw("GET", "/apis"))
    return any(group["name"] == liqo_objects.FOREIGN_CLUSTERS.group for group in found["groups"])


_CONFIG_MAPS: Final = liqo_objects.core_resource("ConfigMap", "configmaps")


def _differs(found: LiqoResource, wanted: Manifest) -> bool:
    """Whether a field of the manifest is missing in the object, or has another value."""
    metadata = {"labels": found.metadata.labels, "annotations": found.metadata.annotations}
    known: Manifest = {"metadata": metadata, "spec": found.spec, "data": found.data}
    names = {"name": found.metadata.name, "namespace": found.metadata.namespace}
    return not _contains(known | {"metadata": metadata | names}, wanted)


def _contains(known: object, wanted: object) -> bool:
    if isinstance(known, dict) and isinstance(wanted, dict):
        return all(_contains(known.get(name), value) for name, value in wanted.items())
    return known == wanted
