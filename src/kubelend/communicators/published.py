"""What the broker of the published system has no routes for, as far as an agent can do without.

That broker takes advertisements and requests and lists a provider's instructions; it has no stream, no
reads of single reservations, no release. An agent polls it, remembers what it was told, and lets
reservations expire.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import structlog
from msgspec.structs import replace

from kubelend.core import errors
from kubelend.core.lifecycle import Phase, Reason
from kubelend.wire import bodies

log = structlog.get_logger("kubelend.agent")

POLL_INTERVAL: Final = timedelta(seconds=5)

ListInstructions = Callable[[], Awaitable[list[bodies.Reservation]]]


class PublishedBroker:
    """The reservations of this cluster, as the published broker has told of them."""

    def __init__(
        self,
        list_instructions: ListInstructions,
        *,
        poll_interval: timedelta = POLL_INTERVAL,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._list_instructions = list_instructions
        self._poll_interval = poll_interval
        self._clock = clock
        self._cluster = ""
        self._requested: dict[str, bodies.Reservation] = {}
        self._lent: dict[str, bodies.Reservation] = {}

    def on_published(self, result: bodies.PublishResult) -> bodies.PublishResult:
        """Add the steps of this side to the instructions in the response to an advertisement."""
        self._cluster = result.advertisement.cluster_id
        listed = result.provider_instructions
        if not listed or listed[0].revision:
            return result
        return replace(result, provider_instructions=self._put_lent(listed))

    def on_requested(self, reservation: bodies.Reservation) -> None:
        """Remember a reservation of this cluster: that broker cannot be asked for it again."""
        # Only the published broker has no revisions.
        if not reservation.revision:
            self._requested[reservation.id] = reservation

    async def reservations(self) -> list[bodies.Reservation]:
        """All unfinished reservations of this cluster, as requester and as provider."""
        lent = self._put_lent(await self._list_instructions())
        now = self._clock()
        self._requested = {
            name: found for name, found in self._requested.items() if not _is_expired(found, now)
        }
        return [*lent, *self._requested.values()]

    async def find(self, reservation: str) -> bodies.Reservation:
        known = {found.id: found for found in await self.reservations()}
        if reservation in known:
            return known[reservation]
        if reservation.startswith(f"rsv-{self._cluster}-"):
            # It may be as it was before this process started: what is known of it must not be lost.
            raise errors.MissingRoute(
                f"the broker has no route to read {reservation}", hint="it ends by its expiry"
            )
        raise errors.reservation_not_found(reservation)

    def mark(self, reservation: str, **status: Any) -> bodies.Reservation:
        """Note a step of this side that the broker has no route for, such as the acknowledgement."""
        for known in (self._lent, self._requested):
            if (found := known.get(reservation)) is not None:
                known[reservation] = replace(found, status=replace(found.status, **status))
                return known[reservation]
        raise errors.reservation_not_found(reservation)

    def release(self, reservation: str) -> bodies.Reservation:
        """Forget a reservation of this cluster; the broker holds it until it expires."""
        message = "The broker has no route to release it, and holds it until it expires"
        log.warning("Reservation cannot be released", reservation=reservation, reason=message)
        released = self.mark(reservation, phase=Phase.RELEASED.value, message=message)
        self._requested.pop(reservation, None)
        return released

    async def poll(self, on_reset: Callable[[], None]) -> AsyncGenerator[bodies.Instruction, None]:
        """Yield changes, as the stream of instructions would."""
        log.info("Broker without instruction stream", poll_interval=str(self._poll_interval))
        on_reset()
        while True:
            # Responses to advertisements list them too, at any time.
            known = self._lent | self._requested
            current = {found.id: found for found in await self.reservations()}
            for changed in self._changes(known, current):
                yield bodies.Instruction(
                    revision=0, role="", action="", message="", reservation=changed
                )
            await asyncio.sleep(self._poll_interval.total_seconds())

    def _put_lent(self, listed: list[bodies.Reservation]) -> list[bodies.Reservation]:
        """Store the complete list of what this cluster lends."""
        self._lent = {found.id: self._with_steps(found) for found in listed}
        return list(self._lent.values())

    def _with_steps(self, listed: bodies.Reservation) -> bodies.Reservation:
        known = self._lent.get(listed.id)
        if known is None:
            return listed
        status = replace(
            listed.status, acknowledged_at=known.status.acknowledged_at, held=known.status.held
        )
        return replace(listed, status=status)

    def _changes(
        self, known: dict[str, bodies.Reservation], current: dict[str, bodies.Reservation]
    ) -> Iterator[bodies.Reservation]:
        yield from (found for name, found in current.items() if found != known.get(name))
        now = self._clock()
        for name, found in known.items():
            if name not in current:
                reason = Reason.EXPIRED.value if _is_expired(found, now) else ""
                message = "The broker no longer lists it"
                status = replace(
                    found.status, phase=Phase.RELEASED.value, reason=reason, message=message
                )
                yield replace(found, status=status)


def _is_expired(found: bodies.Reservation, now: datetime) -> bool:
    return found.status.expires_at is not None and found.status.expires_at <= now
