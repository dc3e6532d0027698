"""What the broker last said of each reservation of this cluster, however it was heard.

The stream, the poll, the answer to an advertisement and the answers to calls all end here: what is older
than what is known is dropped, so that duplicates and answers out of order change nothing. Whoever acts on
reservations listens, and decides by what is known now and not by the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kubelend.core.lifecycle import Phase
from kubelend.wire import bodies

Listener = Callable[[str], None]
"""Is told the ID of a reservation of which something new is known."""

OPEN = frozenset({Phase.PENDING.value, Phase.RESERVED.value, Phase.ACTIVE.value})
LIVE = frozenset({Phase.RESERVED.value, Phase.ACTIVE.value})


class Reservations:
    """The newest word on each."""

    def __init__(self) -> None:
        self._known: dict[str, bodies.Reservation] = {}
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def find(self, reservation: str) -> bodies.Reservation | None:
        return self._known.get(reservation)

    def open(self) -> list[bodies.Reservation]:
        """Those that are not over, as far as is known. A list: news may come while one goes through it."""
        return [found for found in self._known.values() if found.status.phase in OPEN]

    def put(self, found: bodies.Reservation) -> bool:
        """Take it in, unless something newer is known; True if it was news."""
        known = self._known.get(found.id)
        if known is not None and (found.revision < known.revision or found == known):
            return False
        self._known[found.id] = found
        self._tell(found.id)
        return True

    def put_all(self, found: Iterable[bodies.Reservation]) -> None:
        for reservation in found:
            self.put(reservation)

    def forget(self, reservation: str) -> None:
        """The broker knows it no more, or nobody here cares for it any longer."""
        if self._known.pop(reservation, None) is not None:
            self._tell(reservation)

    def _tell(self, reservation: str) -> None:
        for listener in self._listeners:
            listener(reservation)
