"""Removes leftover finalizers from Reservations in namespaces that are no cluster namespaces any more.

`ClusterNamespaces` passes objects outside of cluster namespaces. Only the position of the finalizer is
kept: nobody answers requests there, and the deletion of the namespace must not wait for it. The reservations
themselves stay in the ledger (docs/adr/0020-cluster-namespaces.md).
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from kubelend.controllers import marks
from kubelend.core.errors import Conflict, NotFound
from kubelend.kube.client import Client
from kubelend.wire import mailboxes
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, Reservation
from kubelend.wire.objects import Object


class LeftoverFinalizer(NamedTuple):
    """What is needed of an object to remove its finalizer."""

    uid: str
    version: str
    finalizers: tuple[str, ...]


class FinalizerCleanup:
    """Leftover finalizers, by namespace and name."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._leftovers: dict[str, dict[str, LeftoverFinalizer]] = {}

    @property
    def namespaces(self) -> list[str]:
        """Namespaces with leftover finalizers."""
        return list(self._leftovers)

    def on_update(self, found: Object) -> bool:
        """Whether the object has a leftover finalizer."""
        if not has_leftover_finalizer(found):
            self.on_delete(found)
            return False
        known = found.metadata
        leftover = LeftoverFinalizer(known.uid, known.resource_version, known.finalizers)
        self._leftovers.setdefault(known.namespace, {})[known.name] = leftover
        return True

    def on_delete(self, deleted: Object) -> None:
        if isinstance(deleted, Reservation):
            self._drop(deleted.metadata.namespace, deleted.metadata.name)

    def on_list(self, uids: set[str]) -> None:
        """After a list: objects that are not in it are deleted."""
        for namespace in self.namespaces:
            for name, leftover in list(self._leftovers[namespace].items()):
                if leftover.uid not in uids:
                    self._drop(namespace, name)

    def forget(self, namespace: str) -> None:
        """It is a cluster namespace now."""
        self._leftovers.pop(namespace, None)

    async def remove_finalizers(self, namespace: str) -> None:
        """Remove all of a namespace. After a conflict the watch reports the object again."""
        for name in list(self._leftovers.get(namespace, ())):
            leftover = self._leftovers.get(namespace, {}).get(name)
            if leftover is None:
                continue
            with contextlib.suppress(NotFound, Conflict):
                await self._remove_finalizer(namespace, name, leftover)
            if self._leftovers.get(namespace, {}).get(name) is leftover:
                self._drop(namespace, name)

    async def _remove_finalizer(
        self, namespace: str, name: str, leftover: LeftoverFinalizer
    ) -> None:
        left = [one for one in leftover.finalizers if one != RESERVATION_FINALIZER]
        change = {"metadata": {"finalizers": left, "resourceVersion": leftover.version}}
        await self._client.patch(marks.RESERVATION_RESOURCE, name, namespace, change)

    def _drop(self, namespace: str, name: str) -> None:
        namespaced = self._leftovers.get(namespace, {})
        namespaced.pop(name, None)
        if not namespaced:
            self._leftovers.pop(namespace, None)


def has_leftover_finalizer(found: Object) -> bool:
    """Whether it got its finalizer in a cluster namespace. Objects with a record are a store's."""
    if not isinstance(found, Reservation) or not marks.has_finalizer(found.metadata):
        return False
    was_mail = (
        found.status.response is not None
        or mailboxes.IDEMPOTENCY_ANNOTATION in found.metadata.annotations
    )
    return was_mail and found.status.record is None
