"""The cache of ResourceRequests, and which reservation belongs to which.

The agent's finalizer keeps an object until its reservation is released. If somebody removes the
finalizer or the whole file, the cache still has the object's last state, so that the reservation can be
released.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from kubelend.agent.ports import Deleted, Listed
from kubelend.wire.objects import ResourceRequest


class RequestCache:
    """Fed by the watch. `enqueue` is called with the keys to reconcile."""

    def __init__(self, enqueue: Callable[[str], None]) -> None:
        self.is_synced = False
        """Whether the first list has been received."""
        self._enqueue = enqueue
        self._objects: dict[str, ResourceRequest] = {}
        self._owners: dict[str, str] = {}
        self._deleted: defaultdict[str, list[ResourceRequest]] = defaultdict(list)
        self._released: set[str] = set()
        """UIDs of objects whose deletion is expected."""

    def handle_event(self, event: ResourceRequest | Deleted | Listed) -> None:
        match event:
            case Listed(objects):
                self._replace_all(
                    [found for found in objects if isinstance(found, ResourceRequest)]
                )
            case Deleted(found):
                if isinstance(found, ResourceRequest):
                    self._on_delete(found)
            case found:
                self._on_update(found)

    def owner(self, reservation: str) -> str:
        """The key of the ResourceRequest of a reservation; empty if there is none here."""
        return self._owners.get(reservation, "")

    def bind(self, reservation: str, key: str) -> None:
        self._owners[reservation] = key

    def unbind(self, reservation: str) -> None:
        self._owners.pop(reservation, None)

    def deleted_unfinalized(self, key: str) -> list[ResourceRequest]:
        """Objects of this key that were deleted although they may still hold a reservation."""
        return list(self._deleted.get(key, ()))

    def forget_deleted(self, gone: ResourceRequest) -> None:
        """The deleted object holds nothing any more."""
        others = [each for each in self._deleted.pop(gone.key, ()) if each is not gone]
        if others:
            self._deleted[gone.key] = others
        else:
            self._unbind_all(gone.key)

    def mark_released(self, found: ResourceRequest) -> None:
        """The object holds nothing; its deletion is expected."""
        self._released.add(found.metadata.uid)

    def _replace_all(self, objects: list[ResourceRequest]) -> None:
        present = {found.metadata.uid for found in objects}
        for known in list(self._objects.values()):
            if known.metadata.uid not in present:
                self._on_delete(known)
        for found in objects:
            self._on_update(found)
        self.is_synced = True

    def _on_update(self, found: ResourceRequest) -> None:
        known = self._objects.get(found.key)
        if known is not None and known.metadata.uid != found.metadata.uid:
            self._on_delete(known)
        self._objects[found.key] = found
        if known is not None and known.status.reservation_name != found.status.reservation_name:
            self.unbind(known.status.reservation_name)
        if found.status.reservation_name:
            self.bind(found.status.reservation_name, found.key)
        # The agent's own status writes must not trigger a reconcile: they would cut every retry pause short.
        if known is None or _trigger_fields(known) != _trigger_fields(found):
            self._enqueue(found.key)

    def _on_delete(self, gone: ResourceRequest) -> None:
        known = self._objects.get(gone.key)
        if known is not None and known.metadata.uid == gone.metadata.uid:
            del self._objects[gone.key]
        if gone.metadata.uid in self._released:
            self._released.discard(gone.metadata.uid)
            self._unbind_all(gone.key)
        else:
            self._deleted[gone.key].append(gone)
            self._enqueue(gone.key)

    def _unbind_all(self, key: str) -> None:
        """Also reservations that are not in a status yet; but not those of a recreated object with
        the same key.
        """
        if key not in self._objects:
            self._owners = {name: owner for name, owner in self._owners.items() if owner != key}


def _trigger_fields(found: ResourceRequest) -> tuple[object, ...]:
    known = found.metadata
    return known.uid, known.generation, known.deletion_timestamp
