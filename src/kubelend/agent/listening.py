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

from kubelend.agent import asking, place
from kubelend.agent.ports import BrokerCommunicator
from kubelend.agent.reservations import LONG_AGO, Reservations
from kubelend.agent.standing import HealthMessages, Standing
from kubelend.core import durations
from kubelend.core.errors import (
    Conflict,
    IdentityInUse,
    KubelendError,
    LimitExceeded,
    Unavailable,
)
from kubelend.kits import tasks
from kubelend.kits.backoff import Backoff

PART: Final = "stream"
POLL_EVERY: Final = timedelta(seconds=5)
ASKED_AT_ONCE: Final = 100
"""Reservations fetched one by one per list in which they are missing: a drained cluster must not
fetch a thousand at once."""
SLOWLY: Final = timedelta(seconds=30)
"""Between two attempts after a permanent error."""
WELL_AFTER: Final = timedelta(seconds=30)
"""A stream that stayed open for this long is connected although it delivered nothing."""
BACKOFF: Final = Backoff(
    retries=sys.maxsize, first=timedelta(milliseconds=200), longest=timedelta(seconds=30)
)


class Listener:
    """Keeps a stream open. While it is disconnected it polls, and after a gap it lists everything once.

    A thousand agents that polled beside their streams would cost the broker 200 calls a second.
    """

    def __init__(
        self,
        communicator: BrokerCommunicator,
        reservations: Reservations,
        standing: Standing,
        *,
        poll_every: timedelta = POLL_EVERY,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`poll_interval` of zero disables polling."""
        self._communicator = communicator
        self._reservations = reservations
        self._standing = standing
        self._poll_every = poll_every
        polling = f", polling every {durations.short(poll_every)}" if poll_every else ""
        self._messages = HealthMessages(
            f"Broker stream disconnected{polling}", "Broker stream reconnected"
        )
        self._chance = chance
        self._connected = False
        self._try: object | None = None
        """The stream that is open or being opened; None in between."""
        self._since = LONG_AGO
        """The cache's sequence number when that stream was opened."""
        self._missed = False
        self._unread = ""
        """Why the list after a gap failed, although the stream is connected."""
        self._unsettled: int | None = None
        """Sequence number since which all reservations have to be updated, if that takes more than
        one list."""
        self._refusal = ""
        """The code of a permanent error; empty otherwise."""
        self._woken = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Whether the stream is connected."""
        return self._connected

    async def run(self) -> None:
        """Runs until cancelled."""
        await tasks.run_all({"stream": self._listen(), "poll": self._catch_up()})

    # -- the stream

    async def _listen(self) -> None:
        clock, pauses = asyncio.get_running_loop().time, BACKOFF.delays(self._chance)
        while True:
            began = clock()
            delivered, error = await self._one_stream()
            self._down(error)
            if delivered or clock() - began >= WELL_AFTER.total_seconds():
                pauses = BACKOFF.delays(self._chance)
            await asyncio.sleep(_pause(error, next(pauses)))

    async def _one_stream(self) -> tuple[bool, KubelendError]:
        """Read one stream until it fails: whether it delivered anything, and the error."""
        delivered, self._try, self._since = False, object(), self._reservations.now()
        with self._trusted_after_a_while():
            try:
                async with contextlib.aclosing(self._communicator.stream(self._reset)) as events:
                    async for instruction in events:
                        delivered = True
                        self._up()
                        self._reservations.put_instruction(
                            instruction.reservation, self._since, source="stream"
                        )
            except KubelendError as error:
                return delivered, error
        return delivered, Unavailable("the broker closed the stream")

    @contextlib.contextmanager
    def _trusted_after_a_while(self) -> Iterator[None]:
        """A resumed stream may deliver nothing for long. Without polling only time shows that it
        works.
        """
        loop = asyncio.get_running_loop()
        timer = loop.call_later(WELL_AFTER.total_seconds(), self._up)
        if self._poll_every:
            timer.cancel()
        try:
            yield
        finally:
            timer.cancel()

    def _reset(self) -> None:
        self._missed, self._unsettled = True, None
        self._reservations.distrust()
        self._up()
        self._woken.set()

    def _up(self) -> None:
        self._standing.report(PART, self._unread, is_partial=bool(self._unread))
        if not self._connected:
            self._connected, self._refusal = True, ""
            self._woken.set()
            self._reservations.contact()

    def _down(self, error: KubelendError) -> None:
        """Reported once, and again only if it turns into a permanent error or another one."""
        refusal = error.code if _is_refusal(error) else ""
        if self._unread or PART not in self._standing.problems or refusal != self._refusal:
            self._standing.report(PART, str(error), messages=self._messages)
        if self._connected:
            self._woken.set()
        self._connected, self._refusal, self._try, self._unread = False, refusal, None, ""
        self._reservations.distrust()

    # -- the list

    async def _catch_up(self) -> None:
        pauses = BACKOFF.delays(self._chance)
        while True:
            await self._until_needed()
            works = await self._read_all()
            if works:
                pauses = BACKOFF.delays(self._chance)
            if self._missed and (not works or self._unsettled is not None):
                await asyncio.sleep(self._until_poll() or next(pauses))

    async def _until_needed(self) -> None:
        """Wait until a list is needed after a gap, or a poll is due."""
        while not self._missed:
            self._woken.clear()
            try:
                async with asyncio.timeout(self._until_poll()):
                    await self._woken.wait()
            except TimeoutError:
                return

    def _until_poll(self) -> float | None:
        """Seconds; None if no poll is needed. With jitter, because a broker restart disconnects all
        agents at once.
        """
        if self._connected or not self._poll_every:
            return None
        pause = max(self._poll_every, SLOWLY) if self._refusal else self._poll_every
        return pause.total_seconds() * (1 - self._chance() / 5)

    async def _read_all(self) -> bool:
        """True if the broker responded; reservations that are still missing are listed again."""
        missed, self._missed, tried = self._missed, False, self._try
        try:
            is_settled = await self._read_list()
        except KubelendError as error:
            self._missed = self._missed or missed
            self._failed(error)
            return False
        self._missed, self._unread = self._missed or not is_settled, ""
        if tried is not None and tried is self._try:
            # The broker responds and the stream has not failed: it is connected, but idle.
            self._up()
        return True

    def _failed(self, error: KubelendError) -> None:
        """The stream may be connected all the same; the first error is reported, not each retry."""
        if self._connected and self._missed and not self._unread:
            self._unread = f"cannot list instructions after a gap: {error}"
            self._up()

    async def _read_list(self) -> bool:
        """False if there are more missing reservations than one round may fetch."""
        asked_at = self._reservations.now()
        listed = await asking.bounded(self._communicator.instructions())
        self._reservations.put_all(listed, asked_at, source="poll")
        since = asked_at if self._unsettled is None else self._unsettled
        # The list may lack what the stream delivered in the meantime: that proves nothing.
        missing = self._reservations.unheard(since)
        is_settled = len(missing) <= ASKED_AT_ONCE
        # After another reset everything has to be updated again, not only the rest.
        self._unsettled = None if is_settled or self._missed else since
        for found in missing[:ASKED_AT_ONCE]:
            await asking.newest(self._communicator, self._reservations, found)
        return is_settled


def _is_refusal(error: KubelendError) -> bool:
    """Whether retrying does not help, or only after another agent with this identity has stopped."""
    return not error.retryable or isinstance(error, Conflict)


def _pause(error: KubelendError, delay: float) -> float:
    """Seconds until the stream is opened again."""
    if isinstance(error, IdentityInUse):
        return min(delay, place.TRY_EVERY.total_seconds())
    if _is_refusal(error):
        return SLOWLY.total_seconds()
    return max(delay, error.retry_after) if isinstance(error, LimitExceeded) else delay
