"""From a command to whoever answers it and back: the one place where the command line runs an event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from kubelend.apps.settings import ClientSettings
from kubelend.cli.options import Target
from kubelend.wire import bodies

if TYPE_CHECKING:
    from kubelend.transports.http_client import BrokerClient

Answer = TypeVar("Answer")


class Backend(Protocol):
    """What everyday commands ask of: the broker itself, or the objects of a cluster."""

    async def reserve(
        self, request: bodies.ReservationRequest, *, key: str = ""
    ) -> bodies.Reservation: ...

    async def get_reservation(self, reservation: str) -> bodies.Reservation: ...

    async def release(self, reservation: str) -> bodies.Reservation: ...

    async def all_reservations(
        self, *, role: str = "", phase: str = "", cluster: str = ""
    ) -> list[bodies.Reservation]: ...

    def stream(self) -> AsyncGenerator[bodies.Instruction, None]: ...

    async def get_cluster(self, cluster: str) -> bodies.Cluster: ...

    async def all_clusters(self) -> list[bodies.Cluster]: ...


def call_backend(settings: Target, question: Callable[[Backend], Awaitable[Answer]]) -> Answer:
    """Ask whom the settings mean: a broker, or a cluster of the kubeconfig."""
    if isinstance(settings, ClientSettings):
        return call_broker(settings, question)
    import asyncio

    from kubelend.cli import kube_backend

    async def conversation() -> Answer:
        async with kube_backend.open_backend(settings) as desk:
            return await question(desk)

    return asyncio.run(conversation())


def search_scope(desk: Backend) -> str:
    """Where was looked, as the end of a sentence; a broker has no places."""
    return str(getattr(desk, "where", ""))


def call_broker(
    settings: ClientSettings, ask: Callable[[BrokerClient], Awaitable[Answer]]
) -> Answer:
    """Connect, ask, disconnect. When it worked and the certificate is near its end, renew that too."""
    import asyncio

    from kubelend.cli import renewal
    from kubelend.transports.http_client import BrokerClient

    async def conversation() -> Answer:
        async with BrokerClient(
            settings.broker, settings.cert_path, timeout=settings.timeout
        ) as client:
            answer = await ask(client)
            if settings.auto_renew:
                await renewal.renew_if_due(settings, client)
            return answer

    return asyncio.run(conversation())
