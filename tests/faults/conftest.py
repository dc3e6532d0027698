"""Over real sockets the loop matters: these tests run on the one that the broker runs on."""

import uvloop


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}
