"""Calls to the broker as the parts of the agent make them: how one stands, and for how long one waits.

A communicator tries again by itself, and with a broker that is hung that takes more than a minute: too long
for somebody who wants to know why nothing happens. Whoever calls here looks again later anyway.
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
"""For one call, with all that a communicator tries inside it."""

Answer = TypeVar("Answer")


async def bounded(call: Awaitable[Answer], limit: timedelta = PATIENCE) -> Answer:
    """The answer, if it comes in time; else `BrokerUnreachable`, which is worth another try."""
    try:
        async with asyncio.timeout(limit.total_seconds()):
            return await call
    except TimeoutError:
        raise BrokerUnreachable(
            f"the broker has not answered within {durations.short(limit)}"
        ) from None


async def newest(
    communicator: BrokerCommunicator, reservations: Reservations, reservation: str
) -> bodies.Reservation | None:
    """What is known once the broker has been asked; None if it knows no such reservation."""
    asked_at = reservations.now()
    try:
        reservations.put(await bounded(communicator.find(reservation)), asked_at)
    except NotFound:
        reservations.forget(reservation)
    return reservations.find(reservation)
