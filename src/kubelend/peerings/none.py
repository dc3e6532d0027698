"""No peering: reservations are made, and running workloads at the provider is left to other tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kubelend.agent.ports import DONE, Peer, Readiness

ALWAYS_READY = Readiness(is_ready=True, reason="no peering configured")


class NoPeering:
    """Creates nothing, and is ready immediately."""

    async def watch(self, on_change: Callable[[str], None]) -> None:  # noqa: ARG002
        await asyncio.Event().wait()

    async def connect(self, peer: Peer) -> Readiness:  # noqa: ARG002
        return DONE

    async def size(self, peer: Peer) -> Readiness:  # noqa: ARG002
        return DONE

    async def ready(self, peer: Peer) -> Readiness:  # noqa: ARG002 - the port's signature
        return ALWAYS_READY

    async def disconnect(self, peer: Peer) -> Readiness:  # noqa: ARG002
        return DONE
