"""`ReservationCache` holds the latest state of each reservation of this cluster.

Updates from the stream, polls, the response to an advertisement and responses to calls all end here,
ordered by the broker's `revision`: older ones are dropped, so duplicates and reordering change nothing.
Consumers subscribe to changes and read the cache, not the message.

Revisions can go back when a broker is restored from a backup or has lost its store. That interrupts the
stream: after such a gap, responses to calls made after the gap replace what is known, whatever their
revision. Responses to earlier calls still have to be newer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import structlog

from kubelend.core.lifecycle import Phase
from kubelend.wire import bodies

log = structlog.get_logger("kubelend.agent")

Listener = Callable[[str], None]
"""Called with the ID of a reservation that changed."""

LONG_AGO: Final = -1
"""A sequence number before any update: ordered by revision alone."""

OPEN = frozenset({Phase.PENDING.value, Phase.RESERVED.value, Phase.ACTIVE.value})
LIVE = frozenset({Phase.RESERVED.value, Phase.ACTIVE.value})


class Reservations:
    """The latest state of each reservation, by ID."""

    def __init__(self) -> None:
        self._known: dict[str, bodies.Reservation] = {}
        self._heard_at: dict[str, int] = {}
        """The sequence number of each reservation's last update."""
        self._heard = 0
        self._distrusted = LONG_AGO
        """States from up to this sequence number may be older than the gap."""
        self._listeners: list[Listener] = []
        self._on_contact: list[Callable[[], None]] = []

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def on_contact(self, callback: Callable[[], None]) -> None:
        """Call it when the broker is reachable again: failed work is retried at once."""
        self._on_contact.append(callback)

    def contact(self) -> None:
        """The broker is reachable again."""
        for callback in self._on_contact:
            callback()

    def find(self, reservation: str) -> bodies.Reservation | None:
        return self._known.get(reservation)

    def open(self) -> list[bodies.Reservation]:
        """Unfinished reservations. A copy: updates may arrive during iteration."""
        return [found for found in self._known.values() if found.status.phase in OPEN]

    def now(self) -> int:
        """The sequence number of the last update: read it before a call, and pass it to `put` with
        the response.
        """
        return self._heard

    def distrust(self) -> None:
        """Mark a gap in the stream, after which revisions may start anew."""
        self._distrusted = self._heard

    def unheard(self, since: int) -> list[str]:
        """IDs of unfinished reservations without an update since that sequence number."""
        return [found.id for found in self.open() if self._heard_at[found.id] <= since]

    def put(self, found: bodies.Reservation, asked_at: int = LONG_AGO) -> bool:
        """Store the state unless a newer one is known; True if it changed."""
        known = self._known.get(found.id)
        if known is not None and self._is_old(found, known, asked_at):
            return False
        self._heard += 1
        self._heard_at[found.id] = self._heard
        if found == known:
            return False
        self._known[found.id] = found
        self._tell(found.id)
        return True

    def put_instruction(
        self, found: bodies.Reservation, asked_at: int = LONG_AGO, *, source: str
    ) -> None:
        """Store a state that the broker sent as an instruction; logs it if it changed.

        `source` is how it arrived: stream, poll or advertisement.
        """
        if self.put(found, asked_at):
            log.info(
                "Instruction received",
                reservation=found.id,
                phase=found.status.phase,
                cluster=found.target_cluster_id,
                requester=found.requester_id,
                revision=found.revision,
                source=source,
            )

    def put_all(
        self, found: Iterable[bodies.Reservation], asked_at: int = LONG_AGO, *, source: str = "poll"
    ) -> None:
        for reservation in found:
            self.put_instruction(reservation, asked_at, source=source)

    def forget(self, reservation: str) -> None:
        """Remove a reservation that the broker does not know or that is no longer needed."""
        if self._known.pop(reservation, None) is not None:
            del self._heard_at[reservation]
            self._tell(reservation)

    def _is_old(self, found: bodies.Reservation, known: bodies.Reservation, asked_at: int) -> bool:
        believed_from = min(asked_at, self._distrusted)
        return found.revision < known.revision and self._heard_at[found.id] > believed_from

    def _tell(self, reservation: str) -> None:
        for listener in self._listeners:
            listener(reservation)
