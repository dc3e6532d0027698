"""Over real sockets the loop matters: these tests run on the one that the broker runs on."""

import io
import json

import pytest
import uvloop

import logging_state
from kubelend.kits import logs


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


class Log:
    """What has been logged so far."""

    def __init__(self):
        self.stream = io.StringIO()

    @property
    def text(self):
        return self.stream.getvalue()

    @property
    def all(self):
        return [json.loads(line) for line in self.text.splitlines()]

    def lines(self, event):
        return [line for line in self.all if line["event"] == event]


@pytest.fixture
def log():
    """The log as the broker would write it, for this test alone."""
    captured = Log()
    with logging_state.put_back():
        logs.setup("info", "json", captured.stream)
        yield captured


@pytest.fixture
def r(broker):
    """A requester; most tests have one."""
    return broker.cluster("r")


@pytest.fixture
def admin(broker):
    return broker.admin()


@pytest.fixture
async def a(broker):
    """A provider."""
    found = broker.cluster("a")
    await found.advertise("8", "16Gi")
    return found
