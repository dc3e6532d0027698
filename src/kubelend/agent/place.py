"""Whether this agent is the one that speaks for its cluster: only that one acts.

Of two agents with one identity the broker listens to one, see ADR 0015. The other may read what there is,
and must not act on it: it would write over the other's objects, or hold and join what is another cluster's.
So what acts waits here for the first advertisement. A broker that cannot be reached has refused nobody:
then users are to see their requests wait, with the reason.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Final

from kubelend.core.errors import IdentityInUse, KubelendError

TRY_EVERY: Final = timedelta(seconds=2)
"""At most so long after the other has ended this one should take over."""


class Place:
    """Use `run` as a root task."""

    def __init__(self) -> None:
        self._is_ours = asyncio.Event()
        self._is_lost = asyncio.Event()
        self._loss: IdentityInUse | None = None

    def heard(self, problem: KubelendError | None = None) -> None:
        """What came of an advertisement."""
        if not isinstance(problem, IdentityInUse):
            self._is_ours.set()
        elif self._is_ours.is_set():
            self._loss = problem
            self._is_lost.set()

    async def ours(self) -> None:
        """Until nobody else has it, as far as is known."""
        await self._is_ours.wait()

    async def run(self) -> None:
        """Ends the agent when another one has taken over: started anew, it waits for its turn."""
        await self._is_lost.wait()
        if self._loss is not None:
            raise self._loss
