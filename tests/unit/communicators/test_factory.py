"""Transports by name, and each loaded only when it is asked for."""

import subprocess
import sys

import pytest

from kubelend.communicators import factory
from kubelend.communicators.factory import CommunicatorOptions
from kubelend.communicators.http import HttpCommunicator
from kubelend.core.errors import InvalidSettings

pytestmark = pytest.mark.broker("scripted")


async def test_http_is_opened_without_a_call(broker, certificates):
    options = CommunicatorOptions(broker.url, certificates.cluster("a"))
    opened = await factory.open_communicator("http", options)
    assert isinstance(opened, HttpCommunicator)
    await opened.close()
    assert broker.seen == []


async def test_no_name_is_no_broker():
    assert await factory.open_communicator("", CommunicatorOptions()) is None


@pytest.mark.parametrize(
    "name, words",
    [
        (
            "mqtt",
            "--broker-transport: unknown transport 'mqtt'; use http or kubernetes, or leave it empty",
        ),
        ("HTTP", "--broker-transport: unknown transport 'HTTP'"),
    ],
)
async def test_what_there_is_not_is_refused_clearly(name, words):
    with pytest.raises(InvalidSettings) as refused:
        await factory.open_communicator(name, CommunicatorOptions("https://localhost"))
    assert str(refused.value).startswith(words)


async def test_http_says_what_is_missing(certificates, tmp_path):
    for options, words in (
        (CommunicatorOptions(certificates=certificates.cluster("a")), "--broker-url"),
        (CommunicatorOptions("https://localhost"), "--broker-cert-path"),
        (CommunicatorOptions("https://localhost", tmp_path / "absent"), "tls.crt"),
    ):
        with pytest.raises(InvalidSettings, match=words):
            await factory.open_communicator("http", options)


@pytest.mark.parametrize(
    "module, absent",
    [
        ("communicators.factory", "aiohttp numpy rich cryptography uvloop"),
        ("communicators.middleware", "aiohttp numpy rich cryptography uvloop"),
        ("communicators.http", "numpy rich cryptography uvloop typer"),
        ("peerings.none", "aiohttp numpy rich cryptography uvloop"),
        ("peerings.liqoctl", "aiohttp numpy rich cryptography uvloop"),
        ("agent.peering", "aiohttp numpy cryptography uvloop typer"),
    ],
)
def test_an_agent_loads_no_more_than_it_needs(module, absent):
    program = f"import sys, kubelend.{module}; print(*({absent.split()} & sys.modules.keys()))"
    program = program.replace("[", "{").replace("]", "}")
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == ""
