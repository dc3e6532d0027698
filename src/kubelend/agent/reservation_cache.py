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

OnReservationChange = Callable[[str], None]
"""Called with the ID of a reservation that changed."""

BEFORE_ANY_UPDATE: Final = -1
"""A sequence number before any update: ordered by revision alone."""

UNFINISHED_PHASES = frozenset({Phase.PENDING.value, Phase.RESERVED.value, Phase.ACTIVE.value})
LIVE_PHASES = frozenset({Phase.RESERVED.value, Phase.ACTIVE.value})


class ReservationCache:
    """The latest state of each reservation, by ID."""

    def __init__(self) -> None:
        self._known: dict[str, bodies.Reservation] = {}
        self._grants: dict[str, str] = {}
        self._updated_at: dict[str, int] = {}
        """The sequence number of each reservation's last update."""
        self._sequence = 0
        self._gap_at = BEFORE_ANY_UPDATE
        """States from up to this sequence number may be older than the gap."""
        self._listeners: list[OnReservationChange] = []
        self._on_reconnect: list[Callable[[], None]] = []

    def subscribe(self, listener: OnReservationChange) -> None:
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

    def grant(self, reservation: str) -> str:
        """The grant that came with the last instruction; empty if none has."""
        return self._grants.get(reservation, "")

    def put_grant(self, reservation: str, grant: str) -> None:
        if grant:
            self._grants[reservation] = grant
        else:
            self._grants.pop(reservation, None)

    def unfinished(self) -> list[bodies.Reservation]:
        """Unfinished reservations. A copy: updates may arrive during iteration."""
        return [found for found in self._known.values() if found.status.phase in UNFINISHED_PHASES]

    def sequence(self) -> int:
        """Of the last update: read it before a call, and pass it to `put` with the response."""
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
        is_older = known is not None and found.revision < known.revision
        if is_older and self._updated_at[found.id] > min(requested_at, self._gap_at):
            return False
        self._sequence += 1
        self._updated_at[found.id] = self._sequence
        if found == known:
            return False
        self._known[found.id] = found
        self._notify(found.id)
        return True

    async def update(self, call: Awaitable[bodies.Reservation]) -> bodies.Reservation:
        """Store the state that a call returns; returns the latest state, which may be newer."""
        sent_at = self._sequence
        body = await with_timeout(call)
        self.put(body, sent_at)
        return self._known.get(body.id, body)

    async def fetch(
        self, communicator: BrokerCommunicator, reservation: str
    ) -> bodies.Reservation | None:
        """Fetch the latest state; None if the broker does not know it."""
        try:
            return await self.update(communicator.find(reservation))
        except NotFound:
            self.remove(reservation)
            return None

    def put_instructions(
        self,
        instructions: Iterable[bodies.Reservation],
        requested_at: int = BEFORE_ANY_UPDATE,
        source: str = "poll",
    ) -> None:
        """Store states that the broker sent as instructions; logs those that changed.

        `source` is how they arrived: stream, poll or advertisement.
        """
        for found in instructions:
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

    def remove(self, reservation: str) -> None:
        """Remove a reservation that the broker does not know or that is no longer needed."""
        self._grants.pop(reservation, None)
        if self._known.pop(reservation, None) is not None:
            del self._updated_at[reservation]
            self._notify(reservation)

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
