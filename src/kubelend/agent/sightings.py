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


class Sightings:
    """Fed by the watch. `enqueue` is called with the keys to reconcile."""

    def __init__(self, look: Callable[[str], None]) -> None:
        self.is_complete = False
        """Whether the first list has been received."""
        self._look = look
        self._seen: dict[str, ResourceRequest] = {}
        self._owners: dict[str, str] = {}
        self._lost: defaultdict[str, list[ResourceRequest]] = defaultdict(list)
        self._free: set[str] = set()
        """UIDs of objects whose deletion is expected."""

    def take(self, event: ResourceRequest | Deleted | Listed) -> None:
        match event:
            case Listed(objects):
                self._take_all([found for found in objects if isinstance(found, ResourceRequest)])
            case Deleted(found):
                if isinstance(found, ResourceRequest):
                    self._miss(found)
            case found:
                self._see(found)

    def owner(self, reservation: str) -> str:
        """The key of the ResourceRequest of a reservation; empty if there is none here."""
        return self._owners.get(reservation, "")

    def own(self, reservation: str, key: str) -> None:
        self._owners[reservation] = key

    def disown(self, reservation: str) -> None:
        self._owners.pop(reservation, None)

    def lost(self, key: str) -> list[ResourceRequest]:
        """Objects of this key that were deleted although they may still hold a reservation."""
        return list(self._lost.get(key, ()))

    def bury(self, gone: ResourceRequest) -> None:
        """The deleted object holds nothing any more."""
        others = [each for each in self._lost.pop(gone.key, ()) if each is not gone]
        if others:
            self._lost[gone.key] = others
        else:
            self._disown_all(gone.key)

    def free(self, found: ResourceRequest) -> None:
        """The object holds nothing; its deletion is expected."""
        self._free.add(found.metadata.uid)

    def _take_all(self, objects: list[ResourceRequest]) -> None:
        present = {found.metadata.uid for found in objects}
        for known in list(self._seen.values()):
            if known.metadata.uid not in present:
                self._miss(known)
        for found in objects:
            self._see(found)
        self.is_complete = True

    def _see(self, found: ResourceRequest) -> None:
        known = self._seen.get(found.key)
        if known is not None and known.metadata.uid != found.metadata.uid:
            self._miss(known)
        self._seen[found.key] = found
        if known is not None and known.status.reservation_name != found.status.reservation_name:
            self.disown(known.status.reservation_name)
        if found.status.reservation_name:
            self.own(found.status.reservation_name, found.key)
        # The agent's own status writes must not trigger a reconcile: they would cut every retry pause short.
        if known is None or _wish(known) != _wish(found):
            self._look(found.key)

    def _miss(self, gone: ResourceRequest) -> None:
        known = self._seen.get(gone.key)
        if known is not None and known.metadata.uid == gone.metadata.uid:
            del self._seen[gone.key]
        if gone.metadata.uid in self._free:
            self._free.discard(gone.metadata.uid)
            self._disown_all(gone.key)
        else:
            self._lost[gone.key].append(gone)
            self._look(gone.key)

    def _disown_all(self, key: str) -> None:
        """Also reservations that are not in a status yet; but not those of a recreated object with
        the same key.
        """
        if key not in self._seen:
            self._owners = {name: owner for name, owner in self._owners.items() if owner != key}


def _wish(found: ResourceRequest) -> tuple[object, ...]:
    known = found.metadata
    return known.uid, known.generation, known.deletion_timestamp
