"""The ResourceRequests that there are, whose reservations are whose, and which have gone without our leave.

Our finalizer keeps a request until it is given back. Somebody may remove it all the same, with the
finalizer or the whole file: then this still knows what it was, and what has to be given back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from kubelend.agent.ports import Deleted, Listed
from kubelend.wire.objects import ResourceRequest


class Sightings:
    """What the watch of requests has told. `look` is called with the keys that want looking at."""

    def __init__(self, look: Callable[[str], None]) -> None:
        self.is_complete = False
        """Whether all requests have been seen once."""
        self._look = look
        self._seen: dict[str, ResourceRequest] = {}
        self._owners: dict[str, str] = {}
        self._lost: defaultdict[str, list[ResourceRequest]] = defaultdict(list)
        self._free: set[str] = set()
        """The UIDs of those that may go."""

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
        """The key of the request for which it was made; empty if that is none here."""
        return self._owners.get(reservation, "")

    def own(self, reservation: str, key: str) -> None:
        self._owners[reservation] = key

    def disown(self, reservation: str) -> None:
        self._owners.pop(reservation, None)

    def lost(self, key: str) -> list[ResourceRequest]:
        """Those of this name that have gone and may have left something behind."""
        return list(self._lost.get(key, ()))

    def bury(self, gone: ResourceRequest) -> None:
        """It has left nothing behind."""
        others = [each for each in self._lost.pop(gone.key, ()) if each is not gone]
        if others:
            self._lost[gone.key] = others
        else:
            self._disown_all(gone.key)

    def free(self, found: ResourceRequest) -> None:
        """It holds nothing, and may go."""
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
        # What we write ourselves is no reason to look again: it would make every pause a short one.
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
        """Also what was never written at it; but not what one has that was made anew under its name."""
        if key not in self._seen:
            self._owners = {name: owner for name, owner in self._owners.items() if owner != key}


def _wish(found: ResourceRequest) -> tuple[object, ...]:
    known = found.metadata
    return known.uid, known.generation, known.deletion_timestamp
