"""From a command to the broker and back: the one place where the command line runs an event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from kubelend.apps.settings import ClientSettings

if TYPE_CHECKING:
    from kubelend.transports.http_client import BrokerClient

Answer = TypeVar("Answer")


def call(settings: ClientSettings, ask: Callable[[BrokerClient], Awaitable[Answer]]) -> Answer:
    """Connect, ask, disconnect. When it worked and the certificate is near its end, renew that too."""
    import asyncio

    from kubelend.cli import renewing
    from kubelend.transports.http_client import BrokerClient

    async def conversation() -> Answer:
        async with BrokerClient(
            settings.broker, settings.cert_path, timeout=settings.timeout
        ) as client:
            answer = await ask(client)
            if settings.auto_renew:
                await renewing.after_call(settings, client)
            return answer

    return asyncio.run(conversation())
