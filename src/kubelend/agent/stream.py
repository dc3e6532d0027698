"""Receives instructions: by the broker's stream, and by polling while the stream is disconnected.

A root task of the agent. Updates go into the `ReservationCache`, which drops outdated ones, so
duplicates and reordering need no care here; only the sequence number from before each call is passed
on.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final

from kubelend.agent import health as agent_health
from kubelend.agent import reservation_cache
from kubelend.agent.health import ComponentHealth, HealthMessages
from kubelend.agent.ports import BrokerCommunicator
from kubelend.agent.reservation_cache import BEFORE_ANY_UPDATE, ReservationCache
from kubelend.core import durations
from kubelend.core.errors import Conflict, IdentityInUse, KubelendError, Unavailable
from kubelend.kits import tasks
from kubelend.kits.backoff import Backoff

COMPONENT: Final = "stream"
POLL_INTERVAL: Final = timedelta(seconds=5)
MAX_FETCHES_PER_LIST: Final = 100
"""Reservations fetched one by one per list in which they are missing: a drained cluster must not
fetch a thousand at once."""
PERMANENT_ERROR_INTERVAL: Final = timedelta(seconds=30)
"""Between two attempts after a permanent error."""
CONNECTED_AFTER: Final = timedelta(seconds=30)
"""A stream that stayed open for this long is connected although it delivered nothing."""
BACKOFF: Final = Backoff(
    retries=sys.maxsize, first=timedelta(milliseconds=200), longest=timedelta(seconds=30)
)


class InstructionListener:
    """Keeps a stream open. While it is disconnected it polls, and after a gap it lists everything once.

    A thousand agents that polled beside their streams would cost the broker 200 calls a second.
    """

    def __init__(
        self,
        communicator: BrokerCommunicator,
        reservations: ReservationCache,
        health: ComponentHealth,
        *,
        poll_interval: timedelta = POLL_INTERVAL,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`poll_interval` of zero disables polling."""
        self._communicator = communicator
        self._reservations = reservations
        self._health = health
        self._poll_interval = poll_interval
        disconnected = "Broker stream disconnected"
        if poll_interval:
            disconnected += f", polling every {durations.format_duration_short(poll_interval)}"
        self._health_messages = HealthMessages(disconnected, "Broker stream reconnected")
        self._chance = chance
        self._is_connected = False
        self._stream_attempt: object | None = None
        """The stream that is open or being opened; None in between."""
        self._opened_at = BEFORE_ANY_UPDATE
        """The cache's sequence number when that stream was opened."""
        self._needs_list = False
        self._list_error = ""
        """Why the list after a gap failed, although the stream is connected."""
        self._incomplete_since: int | None = None
        """Sequence number since which all reservations have to be updated, if that takes more than
        one list."""
        self._permanent_error_code = ""
        """The code of a permanent error; empty otherwise."""
        self._wake = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    async def run(self) -> None:
        """Runs until cancelled."""
        await tasks.run_all({"stream": self._stream_loop(), "poll": self._poll_loop()})

    # -- the stream

    async def _stream_loop(self) -> None:
        clock, pauses = asyncio.get_running_loop().time, BACKOFF.delays(self._chance)
        while True:
            began = clock()
            delivered, error = await self._read_stream()
            self._on_disconnected(error)
            if delivered or clock() - began >= CONNECTED_AFTER.total_seconds():
                pauses = BACKOFF.delays(self._chance)
            await asyncio.sleep(_reconnect_delay(error, next(pauses)))

    async def _read_stream(self) -> tuple[bool, KubelendError]:
        """Read one stream until it fails: whether it delivered anything, and the error."""
        delivered = False
        # Polls may have updated the cache since the last stream, before the broker was restored.
        self._reservations.mark_gap()
        self._stream_attempt, self._opened_at = object(), self._reservations.sequence()
        with self._connected_after_delay():
            try:
                async with contextlib.aclosing(self._communicator.stream(self._on_reset)) as events:
                    async for instruction in events:
                        delivered = True
                        self._on_connected()
                        found = instruction.reservation
                        self._reservations.put_grant(found.id, instruction.grant)
                        self._reservations.put_instructions([found], self._opened_at, "stream")
            except KubelendError as error:
                return delivered, error
        return delivered, Unavailable("the broker closed the stream")

    @contextlib.contextmanager
    def _connected_after_delay(self) -> Iterator[None]:
        """A resumed stream may deliver nothing for long. Without polling only time shows that it works."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(CONNECTED_AFTER.total_seconds(), self._on_connected)
        if self._poll_interval:
            timer.cancel()
        try:
            yield
        finally:
            timer.cancel()

    def _on_reset(self) -> None:
        self._needs_list, self._incomplete_since = True, None
        self._reservations.mark_gap()
        self._on_connected()
        self._wake.set()

    def _on_connected(self) -> None:
        self._health.report(COMPONENT, self._list_error, is_partial=bool(self._list_error))
        if not self._is_connected:
            self._is_connected, self._permanent_error_code = True, ""
            self._wake.set()
            self._reservations.notify_reconnected()

    def _on_disconnected(self, error: KubelendError) -> None:
        """Reported once, and again only if it turns into a permanent error or another one."""
        refusal = error.code if _is_permanent(error) else ""
        if (
            self._list_error
            or COMPONENT not in self._health.errors
            or refusal != self._permanent_error_code
        ):
            self._health.report(COMPONENT, str(error), messages=self._health_messages)
        if self._is_connected:
            self._wake.set()
        self._is_connected, self._stream_attempt = False, None
        self._permanent_error_code, self._list_error = refusal, ""
        self._reservations.mark_gap()

    # -- the list

    async def _poll_loop(self) -> None:
        pauses = BACKOFF.delays(self._chance)
        while True:
            await self._wait_for_list()
            works = await self._list_all()
            if works:
                pauses = BACKOFF.delays(self._chance)
            if self._needs_list and (not works or self._incomplete_since is not None):
                await asyncio.sleep(self._poll_delay() or next(pauses))

    async def _wait_for_list(self) -> None:
        """Wait until a list is needed after a gap, or a poll is due."""
        while not self._needs_list:
            self._wake.clear()
            try:
                async with asyncio.timeout(self._poll_delay()):
                    await self._wake.wait()
            except TimeoutError:
                return

    def _poll_delay(self) -> float | None:
        """None if no poll is needed. With jitter, because a broker restart disconnects all agents at once."""
        if self._is_connected or not self._poll_interval:
            return None
        pause = self._poll_interval
        if self._permanent_error_code:
            pause = max(pause, PERMANENT_ERROR_INTERVAL)
        return pause.total_seconds() * (1 - self._chance() / 5)

    async def _list_all(self) -> bool:
        """True if the broker responded; reservations that are still missing are listed again."""
        missed, self._needs_list, tried = self._needs_list, False, self._stream_attempt
        try:
            is_settled = await self._list_and_fetch()
        except KubelendError as error:
            self._needs_list = self._needs_list or missed
            self._on_list_failed(error)
            return False
        self._needs_list, self._list_error = self._needs_list or not is_settled, ""
        if tried is not None and tried is self._stream_attempt:
            # The broker responds and the stream has not failed: it is connected, but idle.
            self._on_connected()
        return True

    def _on_list_failed(self, error: KubelendError) -> None:
        """The stream may be connected all the same; the first error is reported, not each retry."""
        if self._is_connected and self._needs_list and not self._list_error:
            self._list_error = f"cannot list instructions after a gap: {error}"
            self._on_connected()

    async def _list_and_fetch(self) -> bool:
        """False if there are more missing reservations than one round may fetch."""
        sent_at = self._reservations.sequence()
        listed = await reservation_cache.with_timeout(self._communicator.instructions())
        self._reservations.put_instructions(listed, sent_at, "poll")
        since = sent_at if self._incomplete_since is None else self._incomplete_since
        # The list may lack what the stream delivered in the meantime: that proves nothing.
        missing = self._reservations.not_updated_since(since)
        is_settled = len(missing) <= MAX_FETCHES_PER_LIST
        # After another reset everything has to be updated again, not only the rest.
        self._incomplete_since = None if is_settled or self._needs_list else since
        for found in missing[:MAX_FETCHES_PER_LIST]:
            await self._reservations.fetch(self._communicator, found)
        return is_settled


def _is_permanent(error: KubelendError) -> bool:
    """Whether retrying does not help, or only after another agent with this identity has stopped."""
    return not error.retryable or isinstance(error, Conflict)


def _reconnect_delay(error: KubelendError, delay: float) -> float:
    """Seconds until the stream is opened again."""
    if isinstance(error, IdentityInUse):
        return min(delay, agent_health.TAKEOVER_RETRY_INTERVAL.total_seconds())
    if _is_permanent(error):
        return PERMANENT_ERROR_INTERVAL.total_seconds()
    return max(delay, error.retry_after)
