"""The publisher: advertises this cluster to the broker, periodically and after significant changes.

It always sends the current measurement and queues nothing, so after an outage the broker receives the
current state. Reservations in the response go to the `ReservationCache`.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Final

from kubelend.agent import advertising, place
from kubelend.agent.advertising import Advertising
from kubelend.agent.ports import BrokerCommunicator, Clock, LocalObjects
from kubelend.agent.reservations import Reservations
from kubelend.agent.showing import Display
from kubelend.agent.standing import Standing
from kubelend.core import durations
from kubelend.core.errors import BrokerUnreachable, IdentityInUse, KubelendError, LimitExceeded
from kubelend.core.inventory import Inventory, Totals
from kubelend.kits import tasks
from kubelend.kits.backoff import Backoff
from kubelend.wire import bodies
from kubelend.wire.objects import AdvertisementStatus, with_status

PART: Final = "publisher"

GATHERING: Final = timedelta(milliseconds=200)
"""Changes come in bursts, and a comparison costs more than a change: wait for the rest of the burst."""

FIRST_PAUSE: Final = timedelta(seconds=1)
LEAST_PATIENCE: Final = timedelta(seconds=10)
"""Minimum timeout of a publish call, if the interval is shorter. Independent of the communicator's
retries: after this time there is a newer measurement to send."""


class Publisher:
    """Use `run` as a root task, and call `notify_changed` whenever the inventory may have changed."""

    def __init__(  # noqa: PLR0913 - explicit dependencies
        self,
        *,
        settings: Advertising,
        inventory: Inventory,
        communicator: BrokerCommunicator,
        reservations: Reservations,
        objects: LocalObjects,
        standing: Standing,
        clock: Clock,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.published_at: datetime | None = None
        """When the broker last accepted an advertisement."""
        self._settings = settings
        self._inventory = inventory
        self._communicator = communicator
        self._reservations = reservations
        self._standing = standing
        self._clock = clock
        self._chance = chance
        self._display = Display(objects, standing)
        self._news = asyncio.Event()
        self._trouble: KubelendError | None = None
        self._pauses = self._new_pauses()

    def changed(self) -> None:
        """Check whether the change is significant enough to advertise now."""
        self._news.set()

    async def run(self, measured: asyncio.Event) -> None:
        """Advertise from the first measurement on. Runs until cancelled."""
        await measured.wait()
        await tasks.run_all(
            {"publish": self._publish(), "write advertisement": self._display.run()}
        )

    async def _publish(self) -> None:
        while True:
            totals = self._inventory.totals()
            try:
                answer = await self._send(totals)
            except KubelendError as problem:
                self._show(totals, None, AdvertisementStatus(phase="Error", message=str(problem)))
                await asyncio.sleep(self._pause_after(problem))
            else:
                self._succeeded(totals, answer)
                await self._change_or_due(totals)

    async def _send(self, totals: Totals) -> bodies.Published:
        body = advertising.body(self._settings, totals, self._clock())
        patience = max(self._settings.interval, LEAST_PATIENCE)
        asked_at = self._reservations.now()
        try:
            async with asyncio.timeout(patience.total_seconds()):
                answer = await self._communicator.publish(body)
        except TimeoutError:
            raise BrokerUnreachable(
                f"the broker did not answer within {durations.short(patience)}"
            ) from None
        self._reservations.put_all(answer.provider_instructions, asked_at, source="advertisement")
        return answer

    def _succeeded(self, totals: Totals, answer: bodies.Published) -> None:
        self.published_at = self._clock()
        self._trouble, self._pauses = None, self._new_pauses()
        self._standing.report(PART)
        self._show(totals, answer, AdvertisementStatus(phase="Active", published=True))

    async def _change_or_due(self, published: Totals) -> None:
        """Wait for the next due time or a significant change; changes during damping are checked
        after it.
        """
        try:
            async with asyncio.timeout(self._until_due()):
                await asyncio.sleep(self._settings.damping.total_seconds())
                while not advertising.is_noticeable(published, self._inventory.totals()):
                    self._news.clear()
                    await self._news.wait()
                    await asyncio.sleep(GATHERING.total_seconds())
        except TimeoutError:
            return

    def _pause_after(self, problem: KubelendError) -> float:
        """Seconds until the next attempt. Permanent errors wait for the next due time."""
        if not problem.retryable:
            self._trouble, self._pauses = problem, self._new_pauses()
            self._standing.report(PART, str(problem))
            return self._until_due()
        # Retries may word the same failure differently; only another error class is logged again.
        if type(problem) is not type(self._trouble):
            self._trouble = problem
            self._standing.report(PART, str(problem))
        asked = problem.retry_after if isinstance(problem, LimitExceeded) else 0.0
        pause = max(next(self._pauses), min(asked, self._settings.interval.total_seconds()))
        is_in_turn = isinstance(problem, IdentityInUse)
        return min(pause, place.TRY_EVERY.total_seconds()) if is_in_turn else pause

    def _until_due(self) -> float:
        now = self._clock()
        return (self._settings.due(now) - now).total_seconds()

    def _new_pauses(self) -> Iterator[float]:
        backoff = Backoff(sys.maxsize, FIRST_PAUSE, longest=self._settings.interval)
        return backoff.delays(self._chance)

    def _show(
        self, totals: Totals, answer: bodies.Published | None, status: AdvertisementStatus
    ) -> None:
        now = self._clock()
        wanted = advertising.shown(self._settings, totals, now, answer)
        self._display.show(with_status(wanted, status, now))
