"""The cache of ReservationInstructions, with those that were deleted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from kubelend.agent import joints
from kubelend.agent.ports import Deleted, Listed
from kubelend.wire.objects import ReservationInstruction


class InstructionCache:
    """Fed by the watch. `enqueue` is called with the keys to reconcile."""

    def __init__(self, enqueue: Callable[[str], None]) -> None:
        self._enqueue = enqueue
        self._objects: dict[str, ReservationInstruction] = {}
        self._keys_by_reservation: dict[str, str] = {}
        """The object key of each reservation."""
        self._deleted: defaultdict[str, list[ReservationInstruction]] = defaultdict(list)

    def handle_event(self, event: ReservationInstruction | Deleted | Listed) -> None:
        """Handle a watch event."""
        match event:
            case Listed(objects):
                there = [one for one in objects if isinstance(one, ReservationInstruction)]
                for gone in self._objects.keys() - {one.key for one in there}:
                    self._on_delete(self._objects[gone])
                for one in there:
                    self._on_update(one)
            case Deleted(found):
                if isinstance(found, ReservationInstruction):
                    self._on_delete(found)
            case found:
                self._on_update(found)

    def on_reservation_change(self, reservation: str) -> None:
        """The reservation has changed."""
        key = self._keys_by_reservation.get(reservation)
        if key is not None:
            self._enqueue(key)

    def find(self, key: str) -> ReservationInstruction | None:
        """The last watched state."""
        return self._objects.get(key)

    def pop_deleted(self, key: str) -> list[ReservationInstruction]:
        """Deleted objects of this key, returned once: somebody may have removed the finalizer."""
        return self._deleted.pop(key, [])

    def _on_update(self, found: ReservationInstruction) -> None:
        known = self._objects.get(found.key)
        if known is not None and known.metadata.uid != found.metadata.uid:
            self._on_delete(known)
        self._objects[found.key] = found
        self._keys_by_reservation[found.spec.reservation_name] = found.key
        # The peering's own status writes must not trigger a reconcile: they would cut retry pauses short.
        if known is None or joints.trigger_fields(known) != joints.trigger_fields(found):
            self._enqueue(found.key)

    def _on_delete(self, gone: ReservationInstruction) -> None:
        self._objects.pop(gone.key, None)
        if self._keys_by_reservation.get(gone.spec.reservation_name) == gone.key:
            del self._keys_by_reservation[gone.spec.reservation_name]
        self._deleted[gone.key].append(gone)
        self._enqueue(gone.key)
