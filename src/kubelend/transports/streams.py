"""The instruction stream: reconnects and resumes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from datetime import timedelta

from kubelend.core.errors import KubelendError
from kubelend.kits.backoff import Backoff
from kubelend.transports import calls, event_streams
from kubelend.transports.calls import Response
from kubelend.transports.event_streams import ServerSentEvent
from kubelend.transports.sessions import Session
from kubelend.wire import bodies, route

STREAM_TIMEOUT = timedelta(seconds=60)
"""A stream without data for this long is dead: the broker sends a keep-alive every 15 seconds."""


async def stream_instructions(
    session: Session,
    *,
    after: str,
    on_reset: Callable[[], None] | None,
    backoff: Backoff,
    read_timeout: timedelta,
) -> AsyncGenerator[bodies.Instruction, None]:
    """Implements `BrokerClient.stream`."""
    delays, clock = backoff.delays(), asyncio.get_running_loop().time
    while True:
        began = clock()
        try:
            async with contextlib.aclosing(_stream_events(session, after, read_timeout)) as events:
                async for event in events:
                    after, delays = event.id or after, backoff.delays()
                    if event.name == "instruction":
                        yield Response(200, event.data.encode()).decode(bodies.Instruction)
                    elif event.name == "reset":
                        # Earlier event IDs are invalid: the revisions of the broker may have been reset.
                        after = event.id
                        if on_reset is not None:
                            on_reset()
        except KubelendError as error:
            if clock() - began > backoff.longest.total_seconds():
                delays = backoff.delays()
            await session.wait_before_retry(error, next(delays, None), backoff)


async def _stream_events(
    session: Session, after: str, silence: timedelta
) -> AsyncGenerator[ServerSentEvent, None]:
    """Yields the events of one connection; ends without an error only for a new certificate."""
    call = calls.make_request("stream", headers={route.LAST_EVENT_ID: after} if after else None)
    parser = event_streams.EventStreamParser()
    async with contextlib.aclosing(session.stream(call, silence)) as chunks:
        async for chunk in chunks:
            for event in parser.feed(chunk):
                yield event
