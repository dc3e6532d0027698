"""Over real sockets the loop matters: these tests run on the one that the broker runs on."""

import gc

import pytest
import uvloop


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module", autouse=True)
def left_sockets():
    """Collected here and now: a module that ignores `agents.LEFT_SOCKETS` leaves none to the next ones."""
    yield
    gc.collect()
