"""Cache of the objects of one cluster namespace, with the set of those that were not processed yet.

What the broker writes is put here as the API server returned it, so that it never acts on its own changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kubelend.controllers import mailbox_plans, marks
from kubelend.core.models import Reservation as Record
from kubelend.core.models import ReservationId
from kubelend.wire import mailboxes
from kubelend.wire.broker_objects import ClusterAdvertisement, ClusterSession, Reservation
from kubelend.wire.objects import Object, ProviderInstruction

NAMESPACE_KINDS = (ClusterSession, ClusterAdvertisement, Reservation, ProviderInstruction)


class PendingWork(NamedTuple):
    """Objects with a pending event, and reservations that have changed in the ledger."""

    objects: list[Object]
    reservations: list[ReservationId]


class NamespaceCache:
    """All objects of a namespace, by kind and name."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str], Object] = {}
        self._names_by_reservation: dict[ReservationId, str] = {}
        """Names of the objects that show a reservation to its requester, by reservation ID."""
        self._names_by_key: dict[str, str] = {}
        """Names of the objects that request a reservation, by idempotency key."""
        self._pending_objects: dict[tuple[str, str], None] = {}
        self._pending_reservations: dict[ReservationId, None] = {}
        self._unlisted = {kind.kind for kind in NAMESPACE_KINDS}
        """Kinds of which there may be more objects than the watch has reported."""
        self._deleted_uids: set[str] = set()
        """UIDs of objects deleted while lists were pending: a list may still have them."""

    @property
    def session(self) -> ClusterSession | None:
        found = self._objects.get((ClusterSession.kind, mailboxes.SESSION_NAME))
        return found if isinstance(found, ClusterSession) else None

    def all(self) -> list[Object]:
        return list(self._objects.values())

    def handle(self, found: Object) -> bool:
        """Handle an object from a watch or a write; False if it is not newer."""
        at = found.kind, found.metadata.name
        known = self._objects.get(at)
        if known is not None and not _is_newer(found, known):
            return False
        self._objects[at] = found
        self._index(found)
        self._pending_objects[at] = None
        return True

    def awaits_list(self, kind: str) -> bool:
        """Whether the kind has not been listed yet."""
        return kind in self._unlisted

    def add_list(self, kind: str, found: Iterable[Object]) -> None:
        """Handle a list made beside the watch, which may be ahead of it."""
        if kind in self._unlisted:
            for one in found:
                if one.metadata.uid not in self._deleted_uids:
                    self.handle(one)
            self._mark_listed(kind)

    def on_delete(self, deleted: Object) -> None:
        if self._unlisted:
            self._deleted_uids.add(deleted.metadata.uid)
        at = deleted.kind, deleted.metadata.name
        known = self._objects.get(at)
        if known is not None and known.metadata.uid == deleted.metadata.uid:
            del self._objects[at]
            self._pending_objects.pop(at, None)
        if (reservation := _reservation_of(deleted)) is not None:
            self._names_by_reservation.pop(reservation, None)
            self._pending_reservations[reservation] = None
        if isinstance(deleted, Reservation):
            self._names_by_key.pop(mailbox_plans.idempotency_key(deleted), None)

    def on_list(self, kind: str, uids: set[str]) -> None:
        """After a list: objects that are not in it are deleted."""
        for found in [one for (one_kind, _), one in self._objects.items() if one_kind == kind]:
            if found.metadata.uid not in uids:
                self.on_delete(found)
        self._mark_listed(kind)

    def enqueue_reservation(self, reservation: ReservationId) -> None:
        """The reservation has changed in the ledger."""
        self._pending_reservations[reservation] = None

    def shows(self, reservation: ReservationId) -> bool:
        name = mailboxes.instruction_object_name(reservation)
        return (
            reservation in self._names_by_reservation
            or (ProviderInstruction.kind, name) in self._objects
        )

    def enqueue_all(self) -> None:
        self._pending_objects = dict.fromkeys(self._objects)
        for found in self._objects.values():
            if (reservation := _reservation_of(found)) is not None:
                self._pending_reservations[reservation] = None

    def enqueue_matching(self, is_wanted: Callable[[Object], bool]) -> None:
        """Enqueue these objects, although nothing has changed."""
        wanted = (at for at, found in self._objects.items() if is_wanted(found))
        self._pending_objects.update(dict.fromkeys(wanted))

    def pop_pending(self) -> PendingWork:
        """Returns and clears what is pending; later events are for the next call."""
        pending, reservations = self._pending_objects, self._pending_reservations
        self._pending_objects, self._pending_reservations = {}, {}
        found = [self._objects[at] for at in pending if at in self._objects]
        return PendingWork(found, list(reservations))

    def pop_reservations(self) -> list[ReservationId]:
        reservations, self._pending_reservations = self._pending_reservations, {}
        return list(reservations)

    def requester_object(self, id: ReservationId, record: Record | None) -> Reservation | None:
        """The object that shows a reservation to its requester, or requested it."""
        name = self._names_by_reservation.get(id)
        if name is None and record is not None and record.request.key is not None:
            name = self._name_by_key(record.request.key)
        return self._reservation(name or mailboxes.reservation_object_name(id))

    def has_other_object(self, record: Record, obj: Reservation) -> bool:
        """Whether another object than `obj`, which is not being deleted, stands for the reservation."""
        return any(
            mailbox_plans.is_object_of(one, record)
            for one in self._objects.values()
            if isinstance(one, Reservation)
            and one.metadata.uid != obj.metadata.uid
            and not marks.is_being_deleted(one.metadata)
        )

    def provider_object(self, id: ReservationId) -> ProviderInstruction | None:
        found = self._objects.get((ProviderInstruction.kind, mailboxes.instruction_object_name(id)))
        return found if isinstance(found, ProviderInstruction) else None

    def _name_by_key(self, key: str) -> str | None:
        """Excludes an object that is being deleted: its deletion would release the reservation."""
        found = self._reservation(self._names_by_key.get(key, ""))
        return (
            None if found is None or marks.is_being_deleted(found.metadata) else found.metadata.name
        )

    def _reservation(self, name: str) -> Reservation | None:
        found = self._objects.get((Reservation.kind, name))
        return found if isinstance(found, Reservation) else None

    def _mark_listed(self, kind: str) -> None:
        self._unlisted.discard(kind)
        if not self._unlisted:
            self._deleted_uids.clear()

    def _index(self, found: Object) -> None:
        if isinstance(found, Reservation):
            self._names_by_key[mailbox_plans.idempotency_key(found)] = found.metadata.name
            if (reservation := _reservation_of(found)) is not None:
                self._names_by_reservation[reservation] = found.metadata.name


def _reservation_of(found: Object) -> ReservationId | None:
    if not isinstance(found, Reservation | ProviderInstruction):
        return None
    response = mailbox_plans.instruction_of(found)
    return None if response is None else ReservationId(response.reservation.id)


def _is_newer(found: Object, known: Object) -> bool:
    """Events from before a write may arrive after it. Versions of one object are increasing numbers."""
    new, old = found.metadata.resource_version, known.metadata.resource_version
    if new.isdigit() and old.isdigit():
        return int(new) > int(old)
    return new != old
