"""What the broker last said of each reservation of this cluster, however it was heard.

The stream, the poll, the answer to an advertisement and the answers to calls all end here: what is older
than what is known is dropped, so that duplicates and answers out of order change nothing. Whoever acts on
reservations listens, and decides by what is known now and not by the message.

The order is that of the broker's revisions, until a broker is restored from a backup or has lost its store
and counts from where it was then. That makes a gap in the conversation: what was known before it gives way
to the answers to what is asked after it, whatever their revision. Answers to what was asked before have to
be newer, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kubelend.core.lifecycle import Phase
from kubelend.wire import bodies

Listener = Callable[[str], None]
"""Is told the ID of a reservation of which something new is known."""

LONG_AGO: Final = -1
"""A moment before anything was heard: whoever asked then knows the order by revisions alone."""

OPEN = frozenset({Phase.PENDING.value, Phase.RESERVED.value, Phase.ACTIVE.value})
LIVE = frozenset({Phase.RESERVED.value, Phase.ACTIVE.value})


class Reservations:
    """The newest word on each."""

    def __init__(self) -> None:
        self._known: dict[str, bodies.Reservation] = {}
        self._heard_at: dict[str, int] = {}
        """Moments, as `now` gives them."""
        self._heard = 0
        self._distrusted = LONG_AGO
        """What was heard up to this moment may be from before the broker began anew."""
        self._listeners: list[Listener] = []
        self._on_contact: list[Callable[[], None]] = []

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def on_contact(self, callback: Callable[[], None]) -> None:
        """Call it whenever the broker can be heard again: what waits to be tried may be tried at once."""
        self._on_contact.append(callback)

    def contact(self) -> None:
        """The broker can be heard again."""
        for callback in self._on_contact:
            callback()

    def find(self, reservation: str) -> bodies.Reservation | None:
        return self._known.get(reservation)

    def open(self) -> list[bodies.Reservation]:
        """Those that are not over, as far as is known. A list: news may come while one goes through it."""
        return [found for found in self._known.values() if found.status.phase in OPEN]

    def now(self) -> int:
        """The moment, counted in words: take it before you ask, and give it to `put` with the answer."""
        return self._heard

    def distrust(self) -> None:
        """There was a gap, and behind it the broker may count anew."""
        self._distrusted = self._heard

    def unheard(self, since: int) -> list[str]:
        """Those that are not over, of which no word has come since."""
        return [found.id for found in self.open() if self._heard_at[found.id] <= since]

    def put(self, found: bodies.Reservation, asked_at: int = LONG_AGO) -> bool:
        """Take it in, unless something newer is known; True if it was news."""
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

    def put_all(self, found: Iterable[bodies.Reservation], asked_at: int = LONG_AGO) -> None:
        for reservation in found:
            self.put(reservation, asked_at)

    def forget(self, reservation: str) -> None:
        """The broker knows it no more, or nobody here cares for it any longer."""
        if self._known.pop(reservation, None) is not None:
            del self._heard_at[reservation]
            self._tell(reservation)

    def _is_old(self, found: bodies.Reservation, known: bodies.Reservation, asked_at: int) -> bool:
        believed_from = min(asked_at, self._distrusted)
        return found.revision < known.revision and self._heard_at[found.id] > believed_from

    def _tell(self, reservation: str) -> None:
        for listener in self._listeners:
            listener(reservation)
