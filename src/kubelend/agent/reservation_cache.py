"""`ReservationCache` holds the latest state of each reservation of this cluster.

Updates from the stream, polls, the response to an advertisement and responses to calls all end here,
ordered by the broker's `revision`: older ones are dropped, so duplicates and reordering change nothing.
Consumers subscribe to changes and read the cache, not the message.

Revisions can go back when a broker is restored from a backup or has lost its store. That interrupts the
stream: after such a gap, responses to calls made after the gap replace what is known, whatever their
revision. Responses to earlier calls still have to be newer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from typing import Final, TypeVar

import structlog

from kubelend.agent.ports import BrokerCommunicator
from kubelend.core import durations
from kubelend.core.errors import BrokerUnreachable, NotFound
from kubelend.core.lifecycle import Phase
from kubelend.wire import bodies

log = structlog.get_logger("kubelend.agent")

ChangeListener = Callable[[str], None]
"""Called with the ID of a reservation that changed."""

BEFORE_ANY_UPDATE: Final = -1
"""A sequence number before any update: ordered by revision alone."""

UNFINISHED_PHASES = frozenset({Phase.PENDING.value, Phase.RESERVED.value, Phase.ACTIVE.value})
LIVE_PHASES = frozenset({Phase.RESERVED.value, Phase.ACTIVE.value})


class ReservationCache:
    """The latest state of each reservation, by ID."""

    def __init__(self) -> None:
        self._known: dict[str, bodies.Reservation] = {}
        self._updated_at: dict[str, int] = {}
        """The sequence number of each reservation's last update."""
        self._sequence = 0
        self._gap_at = BEFORE_ANY_UPDATE
        """States from up to this sequence number may be older than the gap."""
        self._listeners: list[ChangeListener] = []
        self._on_reconnect: list[Callable[[], None]] = []

    def subscribe(self, listener: ChangeListener) -> None:
        self._listeners.append(listener)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call it when the broker is reachable again: failed work is retried at once."""
        self._on_reconnect.append(callback)

    def notify_reconnected(self) -> None:
        """The broker is reachable again."""
        for callback in self._on_reconnect:
            callback()

    def find(self, reservation: str) -> bodies.Reservation | None:
        return self._known.get(reservation)

    def unfinished(self) -> list[bodies.Reservation]:
        """Unfinished reservations. A copy: updates may arrive during iteration."""
        return [found for found in self._known.values() if found.status.phase in UNFINISHED_PHASES]

    def sequence(self) -> int:
        """The sequence number of the last update: read it before a call, and pass it to `put` with
        the response.
        """
        return self._sequence

    def mark_gap(self) -> None:
        """Mark a gap in the stream, after which revisions may restart."""
        self._gap_at = self._sequence

    def not_updated_since(self, since: int) -> list[str]:
        """IDs of unfinished reservations without an update since that sequence number."""
        return [found.id for found in self.unfinished() if self._updated_at[found.id] <= since]

    def put(self, found: bodies.Reservation, requested_at: int = BEFORE_ANY_UPDATE) -> bool:
        """Store the state unless a newer one is known; True if it changed."""
        known = self._known.get(found.id)
        if known is not None and self._is_outdated(found, known, requested_at):
            return False
        self._sequence += 1
        self._updated_at[found.id] = self._sequence
        if found == known:
            return False
        self._known[found.id] = found
        self._notify(found.id)
        return True

    def put_instruction(
        self, found: bodies.Reservation, requested_at: int = BEFORE_ANY_UPDATE, *, source: str
    ) -> None:
        """Store a state that the broker sent as an instruction; logs it if it changed.

        `source` is how it arrived: stream, poll or advertisement.
        """
        if self.put(found, requested_at):
            log.info(
                "Instruction received",
                reservation=found.id,
                phase=found.status.phase,
                cluster=found.target_cluster_id,
                requester=found.requester_id,
                revision=found.revision,
                source=source,
            )

    def put_instructions(
        self,
        found: Iterable[bodies.Reservation],
        requested_at: int = BEFORE_ANY_UPDATE,
        *,
        source: str = "poll",
    ) -> None:
        for reservation in found:
            self.put_instruction(reservation, requested_at, source=source)

    def remove(self, reservation: str) -> None:
        """Remove a reservation that the broker does not know or that is no longer needed."""
        if self._known.pop(reservation, None) is not None:
            del self._updated_at[reservation]
            self._notify(reservation)

    def _is_outdated(
        self, found: bodies.Reservation, known: bodies.Reservation, requested_at: int
    ) -> bool:
        believed_from = min(requested_at, self._gap_at)
        return found.revision < known.revision and self._updated_at[found.id] > believed_from

    def _notify(self, reservation: str) -> None:
        for listener in self._listeners:
            listener(reservation)


CALL_TIMEOUT: Final = timedelta(seconds=10)
"""For one call, including the communicator's own retries."""

CallResult = TypeVar("CallResult")


async def with_timeout(call: Awaitable[CallResult], limit: timedelta = CALL_TIMEOUT) -> CallResult:
    """The result of the call; `BrokerUnreachable`, which is retryable, after the timeout."""
    try:
        async with asyncio.timeout(limit.total_seconds()):
            return await call
    except TimeoutError:
        raise BrokerUnreachable(
            f"the broker did not answer within {durations.format_duration_short(limit)}"
        ) from None


async def fetch_latest(
    communicator: BrokerCommunicator, reservations: ReservationCache, reservation: str
) -> bodies.Reservation | None:
    """Fetch a reservation into the cache. Returns the cached state; None if the broker does not know
    it.
    """
    sent_at = reservations.sequence()
    try:
        reservations.put(await with_timeout(communicator.find(reservation)), sent_at)
    except NotFound:
        reservations.remove(reservation)
    return reservations.find(reservation)
