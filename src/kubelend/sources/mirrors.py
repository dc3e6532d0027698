"""A cache of the projections of one kind, fed by a watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, NamedTuple, Protocol, TypeVar, cast

import structlog

from kubelend.kube.answers import UndecodableObject
from kubelend.kube.watching import Deleted, Listed

Projected = TypeVar("Projected")
Deletion = TypeVar("Deletion")
Projected_co = TypeVar("Projected_co", covariant=True)

log = structlog.get_logger("kubelend.source")


class ProjectedObject(Protocol[Projected_co]):
    """A decoded object and its projection."""

    @property
    def key(self) -> str: ...

    @property
    def projected(self) -> Projected_co: ...


class Relisted(NamedTuple):
    """Everything may have changed."""


RELISTED: Final = Relisted()


class ProjectionCache(Generic[Projected, Deletion]):
    """`handle_event` returns what an event changes in the cache: often nothing."""

    def __init__(
        self, deletion: Callable[[str], Deletion], key_of: Callable[[UndecodableObject], str]
    ) -> None:
        self.list_count = 0
        """How many lists were received."""
        self._deletion = deletion
        self._key_of = key_of
        self._projected: dict[str, Projected] = {}
        self._undecodable: dict[str, str] = {}
        """The decode error of each undecodable object, to log it once."""

    def all(self) -> list[Projected]:
        return list(self._projected.values())

    def handle_event(self, event: object) -> Projected | Deletion | Relisted | None:
        match event:
            case Listed(objects, unreadable):
                return self._reset(cast(list[ProjectedObject[Projected]], objects), unreadable)
            case Deleted(found):
                return self._drop(cast(ProjectedObject[Projected], found).key)
            case UndecodableObject():
                return self._skip_undecodable(event)
            case _:
                return self._put(cast(ProjectedObject[Projected], event))

    def _reset(
        self, objects: list[ProjectedObject[Projected]], unreadable: list[UndecodableObject]
    ) -> Relisted:
        self.list_count += 1
        self._projected = {found.key: found.projected for found in objects}
        known = self._undecodable
        self._undecodable = {}
        for one in unreadable:
            key = self._key_of(one)
            if key in known:
                self._undecodable[key] = known[key]
            self._skip_undecodable(one)
        return RELISTED

    def _put(self, found: ProjectedObject[Projected]) -> Projected | None:
        self._undecodable.pop(found.key, None)
        if self._projected.get(found.key) == found.projected:
            return None
        self._projected[found.key] = found.projected
        return found.projected

    def _drop(self, key: str) -> Deletion | None:
        self._undecodable.pop(key, None)
        return None if self._projected.pop(key, None) is None else self._deletion(key)

    def _skip_undecodable(self, one: UndecodableObject) -> Deletion | None:
        key = self._key_of(one)
        known = self._undecodable.get(key)
        gone = self._drop(key)
        if not one.is_deleted:
            self._undecodable[key] = one.error
            if known != one.error:
                name = f"{one.namespace}/{one.name}" if one.namespace else one.name
                log.warning("Skipping object that cannot be decoded", name=name, error=one.error)
        return gone
