"""From a command to the broker and back: the one place where the command line runs an event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from kubelend.apps.settings import ClientSettings

if TYPE_CHECKING:
    from kubelend.transports.http_client import BrokerClient

Answer = TypeVar("Answer")


def call(settings: ClientSettings, ask: Callable[[BrokerClient], Awaitable[Answer]]) -> Answer:
    """Connect, ask, disconnect."""
    import asyncio

    from kubelend.transports.http_client import BrokerClient

    async def conversation() -> Answer:
        async with BrokerClient(
            settings.broker, settings.cert_path, timeout=settings.timeout
        ) as client:
            return await ask(client)

    return asyncio.run(conversation())
