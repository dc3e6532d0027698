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


class Stray(NamedTuple):
    """What is needed of an object to remove its finalizer."""

    uid: str
    version: str
    finalizers: tuple[str, ...]


class Strays:
    """Leftover finalizers, by namespace and name."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._found: dict[str, dict[str, Stray]] = {}

    @property
    def namespaces(self) -> list[str]:
        """Namespaces with leftover finalizers."""
        return list(self._found)

    def see(self, found: Object) -> bool:
        """Whether the object has a leftover finalizer."""
        if not is_stray(found):
            self.miss(found)
            return False
        known = found.metadata
        leftover = Stray(known.uid, known.resource_version, known.finalizers)
        self._found.setdefault(known.namespace, {})[known.name] = leftover
        return True

    def miss(self, gone: Object) -> None:
        if isinstance(gone, Reservation):
            self._drop(gone.metadata.namespace, gone.metadata.name)

    def keep_only(self, uids: set[str]) -> None:
        """After a list: objects that are not in it are deleted."""
        for namespace in self.namespaces:
            for name, leftover in list(self._found[namespace].items()):
                if leftover.uid not in uids:
                    self._drop(namespace, name)

    def forget(self, namespace: str) -> None:
        """It is a cluster namespace now."""
        self._found.pop(namespace, None)

    async def let_go(self, namespace: str) -> None:
        """Remove all of a namespace. After a conflict the watch reports the object again."""
        for name in list(self._found.get(namespace, ())):
            leftover = self._found.get(namespace, {}).get(name)
            if leftover is None:
                continue
            with contextlib.suppress(NotFound, Conflict):
                await self._write(namespace, name, leftover)
            if self._found.get(namespace, {}).get(name) is leftover:
                self._drop(namespace, name)

    async def _write(self, namespace: str, name: str, stray: Stray) -> None:
        left = [one for one in stray.finalizers if one != RESERVATION_FINALIZER]
        change = {"metadata": {"finalizers": left, "resourceVersion": stray.version}}
        await self._client.patch(marks.RESERVATIONS, name, namespace, change)

    def _drop(self, namespace: str, name: str) -> None:
        namespaced = self._found.get(namespace, {})
        namespaced.pop(name, None)
        if not namespaced:
            self._found.pop(namespace, None)


def is_stray(found: Object) -> bool:
    """Whether it got its finalizer in a cluster namespace. Objects with a record are a store's."""
    if not isinstance(found, Reservation) or not marks.holds_on(found.metadata):
        return False
    was_mail = found.status.response is not None or mailboxes.KEY in found.metadata.annotations
    return was_mail and found.status.record is None
