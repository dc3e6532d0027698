"""Over real sockets the loop matters: these tests run on the one that the broker runs on."""

import contextlib
import gc
from typing import cast

import pytest
import uvloop

import agent_process
import agents
import brokers
from kubelend.agent.ports import LocalObjects


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module", autouse=True)
def left_sockets():
    """Collected here and now: a module that ignores `agents.LEFT_SOCKETS` leaves none to the next ones."""
    yield
    gc.collect()


@pytest.fixture
async def scene(certificates, tmp_path):
    """A broker in this process, and agents."""
    async with agents.scene(certificates, tmp_path) as scene:
        yield scene


@pytest.fixture
async def child_broker(certificates, tmp_path):
    """A broker in a process of its own."""
    async with brokers.child(certificates, tmp_path) as broker:
        yield broker
        assert await broker.stop() == 0
    brokers.audited(tmp_path / "kubelend.db")


@pytest.fixture
def cluster_of(tmp_path):
    """A cluster as its users see it, whichever process serves them."""

    def cluster_of(name):
        objects = agent_process.ObjectFiles(tmp_path / name / "objects")
        return agents.Cluster(name, cast("LocalObjects", objects))

    return cluster_of


@pytest.fixture
def start_agent(child_broker, certificates, tmp_path):
    """Starts agents as processes."""
    with contextlib.ExitStack() as stack:

        def start_agent(name, directory=""):
            url, own = f"https://localhost:{child_broker.port}", tmp_path / (directory or name)
            return stack.enter_context(agent_process.running(url, certificates.cluster(name), own))

        yield start_agent
