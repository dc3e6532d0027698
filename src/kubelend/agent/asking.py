"""Broker calls with a timeout, and fetching the latest state of one reservation.

A communicator retries by itself, which takes more than a minute if the broker hangs: too long for a
user who waits for a status. Callers here requeue and try again anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from datetime import timedelta
from typing import Final, TypeVar

from kubelend.agent.ports import BrokerCommunicator
from kubelend.agent.reservations import ReservationCache
from kubelend.core import durations
from kubelend.core.errors import BrokerUnreachable, NotFound
from kubelend.wire import bodies

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
    asked_at = reservations.sequence()
    try:
        reservations.put(await with_timeout(communicator.find(reservation)), asked_at)
    except NotFound:
        reservations.remove(reservation)
    return reservations.find(reservation)
