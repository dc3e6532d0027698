"""No peering: reservations are made and kept, and how work reaches the provider is somebody else's matter."""

from __future__ import annotations

from kubelend.agent.ports import Peer, Readiness

READY = Readiness(is_ready=True, reason="no peering is configured")


class NoPeering:
    """Builds nothing, and is ready at once."""

    async def connect(self, peer: Peer) -> None:
        """Nothing to do."""

    async def size(self, peer: Peer) -> None:
        """Nothing to do."""

    async def ready(self, peer: Peer) -> Readiness:  # noqa: ARG002 - the same for all
        return READY

    async def disconnect(self, peer: Peer) -> None:
        """Nothing to do."""
