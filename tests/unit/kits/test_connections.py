"""Connections that are given up leave no socket open, whatever the server does."""

import asyncio
import gc
import socket
import ssl
import threading
import warnings
from contextlib import aclosing, closing

from certificates import Certificates
from config_maps import CONFIG_MAPS
from kubelend.kube.client import Client
from kubelend.kube.config import DataOrFile, KubeConfig
from scripted_api import event, one
from waiting import PATIENCE


def serve_one_event(listener, context, is_over):
    """Over one connection, which is not closed from this side."""
    with context.wrap_socket(listener.accept()[0], server_side=True) as connection:
        connection.recv(1 << 16)
        body = event("ADDED", one("a", "11"))
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"%x\r\n%s\r\n" % (len(body), body))
        is_over.wait(PATIENCE)


async def watch_until_the_first_event(server):
    async with (
        Client.open(server) as client,
        aclosing(client.watch(CONFIG_MAPS, since="10")) as events,
    ):
        return [seen async for seen in _until(events, "ADDED")]


async def _until(events, kind):
    async for seen in events:
        yield seen
        if seen.type == kind:
            return


def test_watch_that_is_given_up_leaves_no_socket(tmp_path):
    directory = Certificates(tmp_path).server()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    is_over = threading.Event()
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        server = KubeConfig(
            server=f"https://127.0.0.1:{listener.getsockname()[1]}",
            authorities=DataOrFile(path=directory / "ca.crt"),
        )
        thread = threading.Thread(target=serve_one_event, args=(listener, context, is_over))
        thread.start()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ResourceWarning)
            asyncio.run(watch_until_the_first_event(server))
            gc.collect()
        is_over.set()
        thread.join(PATIENCE)
    assert not [str(warning.message) for warning in caught]
