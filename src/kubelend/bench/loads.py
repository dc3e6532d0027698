"""Load generation: connections, connection strategies, and a closed loop of reservations.

`send_reservations` sends a fixed number of reservations as fast as the responses arrive, and ends with the
last response; it suits slow stores. `bench reserve`, which compares rates, runs for a fixed time instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kubelend.bench import connections, fleets, requests
from kubelend.bench.connections import LoadConnection
from kubelend.core.errors import UnexpectedAnswer
from kubelend.transports import tls

_CREATED = 201


class ReservationLoad:
    """Responses and latencies of a run."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.latencies: list[float] = []
        self.responses: list[bytes] = []
        """Includes those of the warm-up."""

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.seconds


async def send_reservations(port: int, certificates: Sequence[Path], count: int) -> ReservationLoad:
    """Opens a connection per certificate; each sends the next request when it is free."""
    opened = [
        await connections.open_connection(port, tls.client_context(path)) for path in certificates
    ]
    wanted = fleets.tiny_requests(len(opened) + count)
    messages = [
        requests.reservation_requests(one, "bench")(number) for number, one in enumerate(wanted)
    ]
    # The first responses of a process are slow: they count for the audit only.
    warm_up = await _send_all(opened, messages[: len(opened)])
    load = await _send_all(opened, messages[len(opened) :])
    load.responses += warm_up.responses
    for connection in opened:
        connection.close()
    return load


async def _send_all(opened: Sequence[LoadConnection], messages: Sequence[bytes]) -> ReservationLoad:
    load, waiting, begin = ReservationLoad(), iter(messages), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for connection in opened:
            group.create_task(_send_on_connection(connection, waiting, load))
    load.seconds = time.perf_counter() - begin
    return load


async def _send_on_connection(
    connection: LoadConnection, waiting: Iterator[bytes], load: ReservationLoad
) -> None:
    for message in waiting:
        sent = time.perf_counter()
        answer = await connection.call(message)
        if answer.status != _CREATED:
            raise UnexpectedAnswer(f"{answer.status}: {answer.body.decode()}")
        load.latencies.append(time.perf_counter() - sent)
        load.responses.append(answer.body)
