"""The objects of one kind as the watch tells of them, and those that have gone.

A look that finds nothing to do in here costs no call. What has gone is remembered until a look has drawn the
consequences: our finalizer can be taken off by anybody who may write the object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import structlog

from kubelend.kube.answers import Unreadable
from kubelend.kube.watching import Change, Deleted, Listed
from kubelend.wire.objects import Object

Kind = TypeVar("Kind", bound=Object)

log = structlog.get_logger("kubelend.controllers")


class Turn(NamedTuple, Generic[Kind]):
    """An object that is otherwise than it was."""

    before: Kind
    after: Kind


class Mirror(Generic[Kind]):
    """`look` is called with the names of what has changed, `turn` with what it was before and is now."""

    def __init__(
        self, look: Callable[[str], None], turn: Callable[[Turn[Kind]], None] = lambda _: None
    ) -> None:
        self.is_complete = False
        """Whether all objects have been seen once."""
        self._look = look
        self._turn = turn
        self._seen: dict[str, Kind] = {}
        self._gone: dict[str, list[Kind]] = {}
        self._unreadable: dict[str, Unreadable] = {}

    def find(self, name: str) -> Kind | None:
        return self._seen.get(name)

    def all(self) -> list[Kind]:
        return list(self._seen.values())

    def gone(self, name: str) -> list[Kind]:
        """Those of this name that have gone, as they were at last."""
        return list(self._gone.get(name, ()))

    def bury(self, gone: Kind) -> None:
        """All that follows from its end is done."""
        name = gone.metadata.name
        self._gone[name] = [one for one in self._gone.pop(name, ()) if one is not gone]
        if not self._gone[name]:
            del self._gone[name]

    def unreadable(self, name: str) -> Unreadable | None:
        """Why the object of this name cannot be read as it is now; None if it can, or is not there."""
        return self._unreadable.get(name)

    def look_at_all(self) -> None:
        """The ledger was read anew, or this broker leads from now on."""
        for name in dict.fromkeys((*self._seen, *self._gone, *self._unreadable)):
            self._look(name)

    def take(self, change: Change[Kind]) -> None:
        match change:
            case Listed(objects, unreadable):
                self._take_all(objects, unreadable)
            case Deleted(found):
                self._miss(found)
            case Unreadable():
                self._puzzle_over(change)
            case found:
                self._see(found)

    def _take_all(self, objects: list[Kind], unreadable: Iterable[Unreadable]) -> None:
        present = {found.metadata.uid for found in objects}
        kept = present | {one.uid for one in unreadable}
        for known in list(self._seen.values()):
            if known.metadata.uid not in kept:
                self._miss(known)
        for name in self._unreadable.keys() - {one.name for one in unreadable}:
            del self._unreadable[name]
        for found in objects:
            self._see(found)
        for one in unreadable:
            self._puzzle_over(one)
        self.is_complete = True

    def _see(self, found: Kind) -> None:
        name = found.metadata.name
        before = self._seen.get(name)
        if before is not None and before.metadata.uid != found.metadata.uid:
            self._miss(before)
            before = None
        self._seen[name] = found
        self._unreadable.pop(name, None)
        if before is not None and before != found:
            self._turn(Turn(before, found))
        self._look(name)

    def _miss(self, gone: Kind) -> None:
        name = gone.metadata.name
        known = self._seen.get(name)
        if known is not None and known.metadata.uid == gone.metadata.uid:
            del self._seen[name]
        self._gone.setdefault(name, []).append(gone)
        self._look(name)

    def _puzzle_over(self, found: Unreadable) -> None:
        """Its end, too, may come in a form that cannot be read."""
        if found.is_deleted:
            self._unreadable.pop(found.name, None)
            known = self._seen.get(found.name)
            if known is not None and known.metadata.uid == found.uid:
                self._miss(known)
            else:  # nobody ever knew what it was, but a record of it may be there
                self._look(found.name)
        elif self._unreadable.get(found.name) != found:  # told once, and not at every list
            self._unreadable[found.name] = found
            log.warning(
                "object cannot be read, and is left alone", object=found.name, why=found.problem
            )
            self._look(found.name)
