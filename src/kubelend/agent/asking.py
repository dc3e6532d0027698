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
from kubelend.agent.reservations import Reservations
from kubelend.core import durations
from kubelend.core.errors import BrokerUnreachable, NotFound
from kubelend.wire import bodies

PATIENCE: Final = timedelta(seconds=10)
"""For one call, including the communicator's own retries."""

Answer = TypeVar("Answer")


async def bounded(call: Awaitable[Answer], limit: timedelta = PATIENCE) -> Answer:
    """The result of the call; `BrokerUnreachable`, which is retryable, after the timeout."""
    try:
        async with asyncio.timeout(limit.total_seconds()):
            return await call
    except TimeoutError:
        raise BrokerUnreachable(
            f"the broker did not answer within {durations.short(limit)}"
        ) from None


async def newest(
    communicator: BrokerCommunicator, reservations: Reservations, reservation: str
) -> bodies.Reservation | None:
    """Fetch a reservation into the cache. Returns the cached state; None if the broker does not know
    it.
    """
    asked_at = reservations.now()
    try:
        reservations.put(await bounded(communicator.find(reservation)), asked_at)
    except NotFound:
        reservations.forget(reservation)
    return reservations.find(reservation)
