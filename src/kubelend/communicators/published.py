"""What the broker of the published system has no routes for, as far as an agent can do without.

That broker takes advertisements and requests and lists a provider's instructions; it has no stream, no
reads of single reservations, no release. An agent polls it, remembers what it was told, and lets
reservations expire.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Container
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import structlog
from msgspec.structs import replace

from kubelend.core import errors
from kubelend.core.lifecycle import Phase, Reason
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies

log = structlog.get_logger("kubelend.agent")

POLL_INTERVAL: Final = timedelta(seconds=5)


class PublishedBroker:
    """The reservations of this cluster, as the published broker has told of them."""

    def __init__(
        self,
        client: BrokerClient,
        *,
        poll_interval: timedelta = POLL_INTERVAL,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client = client
        self._poll_interval = poll_interval
        self._clock = clock
        self._cluster = ""
        self._requested: dict[str, bodies.Reservation] = {}
        self._lent: dict[str, bodies.Reservation] = {}
        self._lent_before: dict[str, bodies.Reservation] = {}
        """All that the agent was told to hold, until `poll` has reported its end."""

    async def is_there(self) -> bool:
        """Whether the broker is a published one, and not a proxy that answers in place of ours."""
        try:
            await self._client.version()
        except errors.MissingRoute:
            return await self._client.healthz() == "ok"
        return False

    def on_publish(self, advertisement: bodies.Advertisement) -> None:
        self._cluster = advertisement.cluster_id

    def on_published(self, result: bodies.PublishResult) -> bodies.PublishResult:
        """Add the steps of this side to the instructions in the response to an advertisement."""
        listed = result.provider_instructions
        # Only the published broker has no revisions.
        if not listed or listed[0].revision:
            return result
        return replace(result, provider_instructions=self._put_lent(listed))

    def on_requested(self, reservation: bodies.Reservation) -> None:
        """Remember a reservation of this cluster: that broker cannot be asked for it again."""
        if not reservation.revision:
            self._requested[reservation.id] = reservation

    async def reservations(self) -> list[bodies.Reservation]:
        """The reservations of this cluster, as provider and as requester; those that expired are Released."""
        lent = self._put_lent(await self._client.instructions())
        now = self._clock()
        return [*lent, *(_as_of(now, found) for found in self._requested.values())]

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

    def refuse(self, reservation: str, reason: str) -> bodies.Reservation:
        """Do not hold it; the broker goes on to count it until it expires."""
        log.warning("Reservation cannot be refused at the broker", reservation=reservation)
        return self.mark(reservation, phase=Phase.FAILED.value, message=reason)

    async def poll(self, on_reset: Callable[[], None]) -> AsyncGenerator[bodies.Instruction, None]:
        """Yield changes, as the stream of instructions would; ends when another broker has come."""
        log.info("Broker without instruction stream", poll_interval=str(self._poll_interval))
        on_reset()
        reported: dict[str, bodies.Reservation] = {}
        while await self.is_there():
            current = {found.id: found for found in await self.reservations()}
            changed = [found for name, found in current.items() if found != reported.get(name)]
            for found in [*changed, *self._ended(current)]:
                yield bodies.Instruction(0, role="", action="", message="", reservation=found)
            reported = current
            await asyncio.sleep(self._poll_interval.total_seconds())

    def _put_lent(self, listed: list[bodies.Reservation]) -> list[bodies.Reservation]:
        """Store the complete list of what this cluster lends."""
        self._lent = {found.id: self._with_steps(found) for found in listed}
        self._lent_before |= self._lent
        return list(self._lent.values())

    def _with_steps(self, listed: bodies.Reservation) -> bodies.Reservation:
        known = self._lent.get(listed.id)
        if known is None or known.status.phase == Phase.FAILED:
            return known or listed
        status = replace(
            listed.status, acknowledged_at=known.status.acknowledged_at, held=known.status.held
        )
        return replace(listed, status=status)

    def _ended(self, current: Container[str]) -> list[bodies.Reservation]:
        """Those that were listed before and are not any more."""
        now = self._clock()
        names = [name for name in self._lent_before if name not in current]
        return [_finished(self._lent_before.pop(name), now) for name in names]


def _as_of(now: datetime, found: bodies.Reservation) -> bodies.Reservation:
    expires_at = found.status.expires_at
    return _finished(found, now) if expires_at is not None and expires_at <= now else found


def _finished(found: bodies.Reservation, now: datetime) -> bodies.Reservation:
    expires_at = found.status.expires_at
    is_expired = expires_at is not None and expires_at <= now
    status = replace(
        found.status,
        phase=Phase.RELEASED.value,
        reason=Reason.EXPIRED.value if is_expired else "",
        message="It has expired" if is_expired else "The broker no longer lists it",
    )
    return replace(found, status=status)
