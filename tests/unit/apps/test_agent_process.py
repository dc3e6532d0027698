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


LOADED = """
import sys
from kubelend.apps import {cluster}
print(*sys.modules)
"""


@pytest.mark.parametrize(
    "cluster, others",
    [
        ("real_cluster", ["kubelend.sources.simulation", "kubelend.sources.file_objects", "yaml"]),
        ("simulated_cluster", ["kubelend.kube.client", "kubelend.sources.kubernetes"]),
    ],
)
def test_neither_kind_of_cluster_brings_the_other(modules, cluster, others):
    program = LOADED.format(cluster=cluster)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = ended.stdout.split()
    assert f"kubelend.apps.{cluster}" in loaded
    assert not {*others} & {*loaded, *modules}
    for library in HEAVY:
        assert library not in loaded


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
