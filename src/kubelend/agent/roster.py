"""The cache of ReservationInstructions, with those that were deleted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from kubelend.agent import joints
from kubelend.agent.ports import Deleted, Listed
from kubelend.wire.objects import ReservationInstruction


class Roster:
    """Fed by the watch. `enqueue` is called with the keys to reconcile."""

    def __init__(self, look: Callable[[str], None]) -> None:
        self._look = look
        self._seen: dict[str, ReservationInstruction] = {}
        self._keys: dict[str, str] = {}
        """The object key of each reservation."""
        self._gone: defaultdict[str, list[ReservationInstruction]] = defaultdict(list)

    def take(self, event: ReservationInstruction | Deleted | Listed) -> None:
        """Handle a watch event."""
        match event:
            case Listed(objects):
                there = [one for one in objects if isinstance(one, ReservationInstruction)]
                for gone in self._seen.keys() - {one.key for one in there}:
                    self._miss(self._seen[gone])
                for one in there:
                    self._see(one)
            case Deleted(found):
                if isinstance(found, ReservationInstruction):
                    self._miss(found)
            case found:
                self._see(found)

    def heard(self, reservation: str) -> None:
        """The reservation has changed."""
        key = self._keys.get(reservation)
        if key is not None:
            self._look(key)

    def find(self, key: str) -> ReservationInstruction | None:
        """The last watched state."""
        return self._seen.get(key)

    def take_gone(self, key: str) -> list[ReservationInstruction]:
        """Deleted objects of this key, returned once: somebody may have removed the finalizer."""
        return self._gone.pop(key, [])

    def _see(self, found: ReservationInstruction) -> None:
        known = self._seen.get(found.key)
        if known is not None and known.metadata.uid != found.metadata.uid:
            self._miss(known)
        self._seen[found.key] = found
        self._keys[found.spec.reservation_name] = found.key
        # The peering's own status writes must not trigger a reconcile: they would cut retry pauses short.
        if known is None or joints.cause(known) != joints.cause(found):
            self._look(found.key)

    def _miss(self, gone: ReservationInstruction) -> None:
        self._seen.pop(gone.key, None)
        if self._keys.get(gone.spec.reservation_name) == gone.key:
            del self._keys[gone.spec.reservation_name]
        self._gone[gone.key].append(gone)
        self._look(gone.key)
