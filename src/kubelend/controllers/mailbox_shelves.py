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
from kubelend.wire.broker_objects import ClusterAdvertisement, Mailbox, Reservation
from kubelend.wire.objects import Object, ProviderInstruction

KINDS = (Mailbox, ClusterAdvertisement, Reservation, ProviderInstruction)


class Unread(NamedTuple):
    """Objects with a pending event, and reservations that have changed in the ledger."""

    objects: list[Object]
    reservations: list[ReservationId]


class Shelf:
    """All objects of a namespace, by kind and name."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str], Object] = {}
        self._names: dict[ReservationId, str] = {}
        """Names of the objects that show a reservation to its requester, by reservation ID."""
        self._keys: dict[str, str] = {}
        """Names of the objects that request a reservation, by idempotency key."""
        self._unread: dict[tuple[str, str], None] = {}
        self._news: dict[ReservationId, None] = {}
        self._unlisted = {kind.kind for kind in KINDS}
        """Kinds of which there may be more objects than the watch has reported."""
        self._gone: set[str] = set()
        """UIDs of objects deleted while lists were pending: a list may still have them."""

    @property
    def mailbox(self) -> Mailbox | None:
        found = self._objects.get((Mailbox.kind, mailboxes.NAME))
        return found if isinstance(found, Mailbox) else None

    def all(self) -> list[Object]:
        return list(self._objects.values())

    def see(self, found: Object) -> bool:
        """Handle an object from a watch or a write; False if it is not newer."""
        at = found.kind, found.metadata.name
        known = self._objects.get(at)
        if known is not None and not _is_later(found, known):
            return False
        self._objects[at] = found
        self._index(found)
        self._unread[at] = None
        return True

    def awaits(self, kind: str) -> bool:
        """Whether the kind has not been listed yet."""
        return kind in self._unlisted

    def fill(self, kind: str, found: Iterable[Object]) -> None:
        """Handle a list made beside the watch, which may be ahead of it."""
        if kind in self._unlisted:
            for one in found:
                if one.metadata.uid not in self._gone:
                    self.see(one)
            self._listed(kind)

    def miss(self, gone: Object) -> None:
        if self._unlisted:
            self._gone.add(gone.metadata.uid)
        at = gone.kind, gone.metadata.name
        known = self._objects.get(at)
        if known is not None and known.metadata.uid == gone.metadata.uid:
            del self._objects[at]
            self._unread.pop(at, None)
        if (reservation := _reservation_of(gone)) is not None:
            self._names.pop(reservation, None)
            self._news[reservation] = None
        if isinstance(gone, Reservation):
            self._keys.pop(mailbox_plans.key_of(gone), None)

    def keep_only(self, kind: str, uids: set[str]) -> None:
        """After a list: objects that are not in it are deleted."""
        for found in [one for (one_kind, _), one in self._objects.items() if one_kind == kind]:
            if found.metadata.uid not in uids:
                self.miss(found)
        self._listed(kind)

    def hear(self, reservation: ReservationId) -> None:
        """The reservation has changed in the ledger."""
        self._news[reservation] = None

    def tells_of(self, reservation: ReservationId) -> bool:
        name = mailboxes.instruction_name(reservation)
        return reservation in self._names or (ProviderInstruction.kind, name) in self._objects

    def look_at_all(self) -> None:
        self._unread = dict.fromkeys(self._objects)
        for found in self._objects.values():
            if (reservation := _reservation_of(found)) is not None:
                self._news[reservation] = None

    def look_at(self, is_wanted: Callable[[Object], bool]) -> None:
        """Enqueue these objects, although nothing has changed."""
        wanted = (at for at, found in self._objects.items() if is_wanted(found))
        self._unread.update(dict.fromkeys(wanted))

    def take(self) -> Unread:
        """Returns and clears what is pending; later events are for the next call."""
        pending, reservations = self._unread, self._news
        self._unread, self._news = {}, {}
        found = [self._objects[at] for at in pending if at in self._objects]
        return Unread(found, list(reservations))

    def take_news(self) -> list[ReservationId]:
        reservations, self._news = self._news, {}
        return list(reservations)

    def own(self, id: ReservationId, record: Record | None) -> Reservation | None:
        """The object that shows a reservation to its requester, or requested it."""
        name = self._names.get(id)
        if name is None and record is not None and record.request.key is not None:
            name = self._asked_under(record.request.key)
        return self._reservation(name or mailboxes.mirror_name(id))

    def has_other(self, record: Record, seen: Reservation) -> bool:
        """Whether another object than `obj`, which is not being deleted, stands for the reservation."""
        return any(
            mailbox_plans.stands_for(one, record)
            for one in self._objects.values()
            if isinstance(one, Reservation)
            and one.metadata.uid != seen.metadata.uid
            and not marks.is_leaving(one.metadata)
        )

    def lent(self, id: ReservationId) -> ProviderInstruction | None:
        found = self._objects.get((ProviderInstruction.kind, mailboxes.instruction_name(id)))
        return found if isinstance(found, ProviderInstruction) else None

    def _asked_under(self, key: str) -> str | None:
        """Excludes an object that is being deleted: its deletion would release the reservation."""
        found = self._reservation(self._keys.get(key, ""))
        return None if found is None or marks.is_leaving(found.metadata) else found.metadata.name

    def _reservation(self, name: str) -> Reservation | None:
        found = self._objects.get((Reservation.kind, name))
        return found if isinstance(found, Reservation) else None

    def _listed(self, kind: str) -> None:
        self._unlisted.discard(kind)
        if not self._unlisted:
            self._gone.clear()

    def _index(self, found: Object) -> None:
        if isinstance(found, Reservation):
            self._keys[mailbox_plans.key_of(found)] = found.metadata.name
            if (reservation := _reservation_of(found)) is not None:
                self._names[reservation] = found.metadata.name


def _reservation_of(found: Object) -> ReservationId | None:
    if not isinstance(found, Reservation | ProviderInstruction):
        return None
    response = mailbox_plans.instruction(found)
    return None if response is None else ReservationId(response.reservation.id)


def _is_later(found: Object, known: Object) -> bool:
    """Events from before a write may arrive after it. Versions of one object are increasing numbers."""
    new, old = found.metadata.resource_version, known.metadata.resource_version
    if new.isdigit() and old.isdigit():
        return int(new) > int(old)
    return new != old
