"""No peering: reservations are made, and running workloads at the provider is left to other tools."""

from __future__ import annotations

from kubelend.agent.ports import Peer, Readiness

ALWAYS_READY = Readiness(is_ready=True, reason="no peering configured")


class NoPeering:
    """Creates nothing, and is ready immediately."""

    async def connect(self, peer: Peer) -> None:
        """Does nothing."""

    async def size(self, peer: Peer) -> None:
        """Does nothing."""

    async def ready(self, peer: Peer) -> Readiness:  # noqa: ARG002 - the port's signature
        return ALWAYS_READY

    async def disconnect(self, peer: Peer) -> None:
        """Does nothing."""
