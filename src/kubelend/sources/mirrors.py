"""A cache of the projections of one kind, fed by a watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, NamedTuple, Protocol, TypeVar, cast

import structlog

from kubelend.kube.answers import Unreadable
from kubelend.kube.watching import Deleted, Listed

Kept = TypeVar("Kept")
Gone = TypeVar("Gone")
Kept_co = TypeVar("Kept_co", covariant=True)

log = structlog.get_logger("kubelend.source")


class Sight(Protocol[Kept_co]):
    """A decoded object and its projection."""

    @property
    def key(self) -> str: ...

    @property
    def kept(self) -> Kept_co: ...


class Relisted(NamedTuple):
    """Everything may have changed."""


RELISTED: Final = Relisted()


class Mirror(Generic[Kept, Gone]):
    """`handle_event` returns what an event changes in the cache: often nothing."""

    def __init__(self, gone: Callable[[str], Gone], key_of: Callable[[Unreadable], str]) -> None:
        self.listings = 0
        """How many lists were received."""
        self._gone = gone
        self._key_of = key_of
        self._kept: dict[str, Kept] = {}
        self._left_out: dict[str, str] = {}
        """The decode error of each undecodable object, to log it once."""

    def all(self) -> list[Kept]:
        return list(self._kept.values())

    def take(self, event: object) -> Kept | Gone | Relisted | None:
        match event:
            case Listed(objects, unreadable):
                return self._reset(cast(list[Sight[Kept]], objects), unreadable)
            case Deleted(found):
                return self._drop(cast(Sight[Kept], found).key)
            case Unreadable():
                return self._leave_out(event)
            case _:
                return self._put(cast(Sight[Kept], event))

    def _reset(self, objects: list[Sight[Kept]], unreadable: list[Unreadable]) -> Relisted:
        self.listings += 1
        self._kept = {found.key: found.kept for found in objects}
        known = self._left_out
        self._left_out = {}
        for one in unreadable:
            key = self._key_of(one)
            if key in known:
                self._left_out[key] = known[key]
            self._leave_out(one)
        return RELISTED

    def _put(self, found: Sight[Kept]) -> Kept | None:
        self._left_out.pop(found.key, None)
        if self._kept.get(found.key) == found.kept:
            return None
        self._kept[found.key] = found.kept
        return found.kept

    def _drop(self, key: str) -> Gone | None:
        self._left_out.pop(key, None)
        return None if self._kept.pop(key, None) is None else self._gone(key)

    def _leave_out(self, one: Unreadable) -> Gone | None:
        key = self._key_of(one)
        known = self._left_out.get(key)
        gone = self._drop(key)
        if not one.is_deleted:
            self._left_out[key] = one.problem
            if known != one.problem:
                name = f"{one.namespace}/{one.name}" if one.namespace else one.name
                log.warning("Skipping object that cannot be decoded", name=name, error=one.problem)
        return gone
