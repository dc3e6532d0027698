"""The ReservationInstructions that there are, as a watch tells of them, and those that went.

`agent.peering` looks at the ones that this says want looking at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from kubelend.agent import joints
from kubelend.agent.ports import Deleted, Listed
from kubelend.wire.objects import ReservationInstruction


class Roster:
    """`look` is called with the keys of those of which something is new."""

    def __init__(self, look: Callable[[str], None]) -> None:
        self._look = look
        self._seen: dict[str, ReservationInstruction] = {}
        self._keys: dict[str, str] = {}
        """The key of each reservation's object."""
        self._gone: defaultdict[str, list[ReservationInstruction]] = defaultdict(list)

    def take(self, event: ReservationInstruction | Deleted | Listed) -> None:
        """Something has happened to an object."""
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
        """The broker has said something new of it."""
        key = self._keys.get(reservation)
        if key is not None:
            self._look(key)

    def find(self, key: str) -> ReservationInstruction | None:
        """As it was last seen."""
        return self._seen.get(key)

    def take_gone(self, key: str) -> list[ReservationInstruction]:
        """Those of this name that went, once: usually our finalizer has gone before, but perhaps not."""
        return self._gone.pop(key, [])

    def _see(self, found: ReservationInstruction) -> None:
        known = self._seen.get(found.key)
        if known is not None and known.metadata.uid != found.metadata.uid:
            self._miss(known)
        self._seen[found.key] = found
        self._keys[found.spec.reservation_name] = found.key
        # What is written here is no reason to look again: it would make every pause a short one.
        if known is None or joints.cause(known) != joints.cause(found):
            self._look(found.key)

    def _miss(self, gone: ReservationInstruction) -> None:
        self._seen.pop(gone.key, None)
        if self._keys.get(gone.spec.reservation_name) == gone.key:
            del self._keys[gone.spec.reservation_name]
        self._gone[gone.key].append(gone)
        self._look(gone.key)
