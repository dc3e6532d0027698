"""Where a listener listens, and whom it takes for one and the same. On asyncio's own loop."""

import asyncio
import socket

import pytest
from aiohttp import web

from kubelend.transports import listener as transports_listener
from kubelend.transports import server


async def test_empty_host_listens_on_every_family_of_the_machine():
    listeners = await transports_listener.open_listeners("", 0)
    try:
        assert socket.AF_INET in {listener.family for listener in listeners}
        assert all(listener.getsockname()[1] for listener in listeners)
    finally:
        for listener in listeners:
            listener.close()


async def test_address_that_is_taken_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        await transports_listener.open_listeners("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
async def test_address_of_another_machine_is_an_error(host):
    with pytest.raises(OSError):
        await transports_listener.open_listeners(host, 0)


async def test_the_standard_loop_serves_too():
    async def answer(_):
        return web.Response(text="served")

    async with server.serve_http(answer, "127.0.0.1", 0, server.ServerLimits()) as port:
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            assert (await reader.read()).endswith(b"served")
            writer.close()
            await writer.wait_closed()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)
