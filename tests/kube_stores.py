"""Stores in Kubernetes for tests: in namespaces of their own, over clients that fail or wait on demand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import closing
from typing import Any, TypeVar

from kubelend.broker.ports import Store
from kubelend.core.errors import Unavailable
from kubelend.core.events import Change
from kubelend.core.models import ReservationId
from kubelend.envtest.servers import LocalCluster
from kubelend.kube import config
from kubelend.kube.client import Client
from kubelend.kube.config import KubeConfig
from kubelend.kube.resources import Resource
from kubelend.stores.kubernetes.store import ClientFactory, KubernetesStore
from store_kinds import ARCHIVE_FOR, new_namespace

Result = TypeVar("Result")
Around = Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]
"""Stands around each write to the API server."""


class WrittenStore(KubernetesStore):
    """Waits after each commit until the objects show it."""

    def commit(self, changes: Sequence[Change], revision: int) -> None:
        super().commit(changes, revision)
        self.flush()


class Place:
    """A namespace of its own."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.namespace = new_namespace(cluster)
        self.access: KubeConfig = config.config_from_kubeconfig(cluster.admin_kubeconfig)
        self.url = f"kubernetes://{cluster.admin_kubeconfig}?namespace={self.namespace}"

    def open(
        self, connect: ClientFactory = Client.open, kind: type[KubernetesStore] = WrittenStore
    ) -> KubernetesStore:
        return kind.open(self.access, self.namespace, archive_for=ARCHIVE_FOR, connect=connect)

    def open_readonly(self) -> KubernetesStore:
        return KubernetesStore.open_readonly(self.access, self.namespace)

    def run(self, work: Callable[[Client], Coroutine[Any, Any, Result]]) -> Result:
        """Do something to the objects, as an administrator."""

        async def with_client() -> Result:
            async with Client.open(self.access) as client:
                return await work(client)

        return asyncio.run(with_client())

    def find(self, resource: Resource[Any], name: str) -> Any:
        return self.run(lambda client: client.find(resource, name, self.namespace))

    def edit(self, resource: Resource[Any], name: str, change: Any, subresource: str = "") -> None:
        self.run(
            lambda client: client.patch(
                resource, name, self.namespace, change, subresource=subresource
            )
        )

    def delete(self, resource: Resource[Any], name: str, *, force: bool = False) -> None:
        """As with `kubectl delete`; with `force` without the finalizers."""
        if force:
            self.edit(resource, name, {"metadata": {"finalizers": None}})
        self.run(lambda client: client.delete(resource, name, self.namespace))


class Interruption:
    """Cuts a client off at one of its writes: before it is sent, or when it was done."""

    def __init__(self, *, is_sent: bool) -> None:
        self.left = -1
        """Writes until then; below zero it does not happen."""
        self.has_happened = False
        self._is_sent = is_sent

    async def around(self, write: Coroutine[Any, Any, Result]) -> Result:
        self.left -= 1
        is_now = self.left == 0
        if self.has_happened or (is_now and not self._is_sent):
            self.has_happened = True
            write.close()
            raise Unavailable("cut off")
        self.has_happened = is_now
        done = await write
        if is_now:
            raise Unavailable("cut off")
        return done


class Gate:
    """Puts a client to sleep before one of its writes, and all that follow, until somebody opens."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.reached = threading.Event()
        self.opened = threading.Event()

    async def around(self, write: Coroutine[Any, Any, Result]) -> Result:
        if self.left is not None:
            self.left -= 1
            if self.left <= 0:
                self.reached.set()
                await asyncio.to_thread(self.opened.wait, 30)
        return await write


def connecting(around: Around) -> ClientFactory:
    """Connect with a client whose writes go through this."""

    class Wrapped(Client):
        async def create(self, *arguments: Any) -> Any:
            return await around(super().create(*arguments))

        async def update(self, *arguments: Any) -> Any:
            return await around(super().update(*arguments))

        async def patch(self, *arguments: Any, **named: Any) -> Any:
            return await around(super().patch(*arguments, **named))

        async def delete(self, *arguments: Any, **named: Any) -> Any:
            return await around(super().delete(*arguments, **named))

        async def raw(self, *arguments: Any, **named: Any) -> Any:
            return await around(super().raw(*arguments, **named))

    return Wrapped.open


def stored_state(store: Store, reservations: list[str]) -> tuple[Any, ...]:
    """All that a store has, of those reservations also from the archive."""
    with closing(store):
        loaded = store.load()
        first, limits = (loaded.clusters, loaded.reservations), loaded.limits
        records = [
            {record.id: record for record in found}
            for found in (*first, loaded.members, loaded.tokens, limits)
        ]
        archived = {name: store.archived(ReservationId(name)) for name in reservations}
        return (
            records,
            loaded.revision,
            archived,
            store.audit_lines(0, 5000),
            store.audit_log_bounds(),
        )
