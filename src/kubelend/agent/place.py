"""Whether this agent is the active one of its cluster: only the active agent acts.

Of two agents with the same identity the broker accepts one, see ADR 0015. The other one may read, but
must not act: it would overwrite objects, or hold and connect what belongs to another cluster. So
everything that acts waits here for the first advertisement. An unreachable broker has rejected nobody:
the gate opens, so that users see their requests pending with the reason.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Final

from kubelend.core.errors import IdentityInUse, KubelendError

TAKEOVER_RETRY_INTERVAL: Final = timedelta(seconds=2)
"""Upper bound for the takeover time after the other agent has stopped."""


class ActiveAgentGate:
    """Use `run` as a root task."""

    def __init__(self) -> None:
        self._is_active = asyncio.Event()
        self._is_replaced = asyncio.Event()
        self._replaced_error: IdentityInUse | None = None

    def on_advertised(self, error: KubelendError | None = None) -> None:
        """Record the result of an advertisement."""
        if not isinstance(error, IdentityInUse):
            self._is_active.set()
        elif self._is_active.is_set():
            self._replaced_error = error
            self._is_replaced.set()

    async def wait(self) -> None:
        """Wait until no other agent is known to be active."""
        await self._is_active.wait()

    async def run(self) -> None:
        """Raises when another agent has taken over, which ends the process; after a restart it waits
        to take over.
        """
        await self._is_replaced.wait()
        if self._replaced_error is not None:
            raise self._replaced_error
