"""What the agent's process loads: as little as it can do with, or it does not fit beside what it measures."""

import os
import subprocess
import sys

import pytest

from kubelend.apps import agent_launcher

HEAVY = ("aiohttp.web", "cryptography", "numpy", "sqlite3", "typer", "uvloop")

PROGRAM = """
import os, sys
from kubelend.apps import agent_process
try:
    agent_process.main()
except SystemExit:
    from kubelend.communicators import http
    print(os.environ.get("SSL_CERT_FILE"), *sys.modules)
    raise
"""


def started(**variables):
    """An agent without settings, when it gives up: its variable of authorities, and what it has loaded."""
    kept = {name: text for name, text in os.environ.items() if name != "SSL_CERT_FILE"}
    kept.pop(agent_launcher.SETTINGS_VARIABLE, None)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env=kept | variables,
    )
    assert f"{agent_launcher.SETTINGS_VARIABLE} is not set" in ended.stderr
    place, *modules = ended.stdout.split()
    assert {"kubelend.apps.agent", "kubelend.communicators.http", "aiohttp"} <= set(modules)
    return place, modules


@pytest.fixture(scope="module")
def modules():
    return started()[1]


@pytest.mark.parametrize("library", ["rich.console", *HEAVY])
def test_an_agent_does_without(modules, library):
    assert library not in modules


KUBERNETES = """
import asyncio, sys
from kubelend.apps import agent_environment
from kubelend.apps.agent_settings import AgentSettings
from kubelend.kube import config

async def load():
    config.load_config = lambda path: config.KubeConfig(server="https://127.0.0.1:1")
    async with agent_environment.open_environment(AgentSettings(source="kubernetes")):
        print(*sys.modules)

asyncio.run(load())
"""

SIMULATED = """
import asyncio, sys
from kubelend.apps import agent_environment
from kubelend.apps.agent_settings import AgentSettings

async def load(simulation):
    settings = AgentSettings(source="simulated", simulation=simulation)
    async with agent_environment.open_environment(settings):
        print(*sys.modules)

asyncio.run(load(sys.argv[1]))
"""

KUBERNETES_ONLY = {"kubelend.kube.client", "kubelend.sources.kubernetes"}
SIMULATED_ONLY = {"kubelend.sources.simulation", "kubelend.sources.file_objects", "yaml"}


@pytest.mark.parametrize(
    "program, needed, others",
    [
        pytest.param(KUBERNETES, KUBERNETES_ONLY, SIMULATED_ONLY, id="kubernetes"),
        pytest.param(SIMULATED, SIMULATED_ONLY, KUBERNETES_ONLY, id="simulated"),
    ],
)
def test_neither_kind_of_cluster_loads_the_other(modules, tmp_path, program, needed, others):
    simulation = tmp_path / "cluster.yaml"
    simulation.write_text("nodes: [{capacity: {cpu: 4, memory: 8Gi}}]")
    ended = subprocess.run(
        [sys.executable, "-c", program, str(simulation)], capture_output=True, text=True, check=True
    )
    loaded = set(ended.stdout.split())
    assert needed <= loaded
    assert not others & (loaded | set(modules))
    assert not loaded & set(HEAVY)


def test_an_agent_has_no_list_in_cpp(modules):
    assert "frozenlist._frozenlist" not in modules


@pytest.mark.parametrize(
    "variables, left",
    [
        pytest.param({}, "None", id="not set"),
        pytest.param({"SSL_CERT_FILE": "/etc/ours.pem"}, "/etc/ours.pem", id="set"),
    ],
)
def test_programs_that_it_starts_see_the_systems_authorities(variables, left):
    assert started(**variables)[0] == left


def test_the_command_starts_it():
    assert agent_launcher.agent_command()[-2:] == ["-m", "kubelend.apps.agent_process"]


def test_the_systems_authorities_are_not_read():
    program = (
        "from kubelend.apps import agent_process\n"
        "try: agent_process.main()\n"
        "except SystemExit: pass\n"
        "from aiohttp import connector\n"
        "print(len(connector._SSL_CONTEXT_VERIFIED.get_ca_certs()))"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["0"]
