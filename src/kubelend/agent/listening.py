"""Hears what the broker says of this cluster's reservations: by its stream, and by asking while it is down.

A root task of the agent. All it hears goes into `agent.reservations`, which drops what is old; so nothing
here has to care for duplicates or for the order of things, but only to say since when it has been asking.
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
from kubelend.agent.standing import Standing
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
"""One by one, after a list in which they are not: a drained cluster must not ask a thousand times at once."""
SLOWLY: Final = timedelta(seconds=30)
"""Between two tries if the broker's answer is one that will not be better by itself."""
WELL_AFTER: Final = timedelta(seconds=30)
"""A stream that lived for so long was a good one, though it said nothing."""
BACKOFF: Final = Backoff(
    retries=sys.maxsize, first=timedelta(milliseconds=200), longest=timedelta(seconds=30)
)


class Listener:
    """Keeps a stream open. While there is none it polls, and after a gap it reads everything once.

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
        """`poll_every` of zero: never."""
        self._communicator = communicator
        self._reservations = reservations
        self._standing = standing
        self._poll_every = poll_every
        self._chance = chance
        self._connected = False
        self._try: object | None = None
        """The stream that is open, or about to be; None in between."""
        self._since = LONG_AGO
        """The moment in which that stream was asked for."""
        self._missed = False
        self._unread = ""
        """What keeps the agent from reading what it missed, though the stream is open."""
        self._unsettled: int | None = None
        """Since when all is to be heard of again, if that takes more than one list."""
        self._refusal = ""
        """The code of an answer that will not be better by itself; empty if it may."""
        self._woken = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Whether instructions come as they are made."""
        return self._connected

    async def run(self) -> None:
        """Listen, for ever."""
        await tasks.run_all({"listening": self._listen(), "polling": self._catch_up()})

    # -- the stream

    async def _listen(self) -> None:
        clock, pauses = asyncio.get_running_loop().time, BACKOFF.delays(self._chance)
        while True:
            began = clock()
            told, error = await self._one_stream()
            self._down(error)
            if told or clock() - began >= WELL_AFTER.total_seconds():
                pauses = BACKOFF.delays(self._chance)
            await asyncio.sleep(_pause(error, next(pauses)))

    async def _one_stream(self) -> tuple[bool, KubelendError]:
        """Until it breaks: whether it said anything, and what it broke by."""
        told, self._try, self._since = False, object(), self._reservations.now()
        with self._trusted_after_a_while():
            try:
                async with contextlib.aclosing(self._communicator.stream(self._reset)) as told_of:
                    async for instruction in told_of:
                        told = True
                        self._up()
                        self._reservations.put(instruction.reservation, self._since)
            except KubelendError as error:
                return told, error
        return told, Unavailable("the broker's stream has ended")

    @contextlib.contextmanager
    def _trusted_after_a_while(self) -> Iterator[None]:
        """A stream that goes on where it was says nothing at first. Without polls only time can tell."""
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
        """Told once, and again only if it is now for a reason of quite another kind."""
        refusal = error.code if _is_refusal(error) else ""
        if self._unread or PART not in self._standing.problems or refusal != self._refusal:
            self._standing.report(PART, f"no instructions come: {error}")
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
        """Until something was missed, or a poll is due."""
        while not self._missed:
            self._woken.clear()
            try:
                async with asyncio.timeout(self._until_poll()):
                    await self._woken.wait()
            except TimeoutError:
                return

    def _until_poll(self) -> float | None:
        """Seconds; None if no poll is called for. A little less at random: a restart cuts off all at once."""
        if self._connected or not self._poll_every:
            return None
        pause = max(self._poll_every, SLOWLY) if self._refusal else self._poll_every
        return pause.total_seconds() * (1 - self._chance() / 5)

    async def _read_all(self) -> bool:
        """True if the broker has answered; what that leaves open is missed still."""
        missed, self._missed, tried = self._missed, False, self._try
        try:
            is_settled = await self._read_list()
        except KubelendError as error:
            self._missed = self._missed or missed
            self._failed(error)
            return False
        self._missed, self._unread = self._missed or not is_settled, ""
        if tried is not None and tried is self._try:
            # The broker is there, and the stream has not broken: it is open, and says nothing.
            self._up()
        return True

    def _failed(self, error: KubelendError) -> None:
        """The stream may be open all the same; told once, in the words of the first try."""
        if self._connected and self._missed and not self._unread:
            self._unread = f"what was missed cannot be read: {error}"
            self._up()

    async def _read_list(self) -> bool:
        """False if some are in doubt that there was no time to ask for."""
        asked_at = self._reservations.now()
        listed = await asking.bounded(self._communicator.instructions())
        self._reservations.put_all(listed, asked_at)
        since = asked_at if self._unsettled is None else self._unsettled
        # Of what the stream has told meanwhile the list may be silent: that proves nothing.
        missing = self._reservations.unheard(since)
        is_settled = len(missing) <= ASKED_AT_ONCE
        # After another reset all is to be heard of again, and not only what is left.
        self._unsettled = None if is_settled or self._missed else since
        for found in missing[:ASKED_AT_ONCE]:
            await asking.newest(self._communicator, self._reservations, found)
        return is_settled


def _is_refusal(error: KubelendError) -> bool:
    """Whether it will not be better by itself, or only once another agent of this name is gone."""
    return not error.retryable or isinstance(error, Conflict)


def _pause(error: KubelendError, delay: float) -> float:
    """Seconds before the stream is tried again."""
    if isinstance(error, IdentityInUse):
        return min(delay, place.TRY_EVERY.total_seconds())
    if _is_refusal(error):
        return SLOWLY.total_seconds()
    return max(delay, error.retry_after) if isinstance(error, LimitExceeded) else delay
