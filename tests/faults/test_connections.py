"""Ten thousand connections that say nothing: the broker holds few of them, and serves others as before."""

import asyncio
import contextlib
import os
import resource
from pathlib import Path

import pytest

import brokers
import raw_connections
import waiting
from waiting import PATIENCE

MANY = 10_000
HANDSHAKES = 512
"""The default of `--max-handshakes`."""
FILES = MANY + 2000
"""For this process; the broker's has as many, and its own limit."""


pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < FILES,
        reason=f"needs {FILES} open files: raise `ulimit -Hn`, in a container --ulimit nofile={FILES}",
    ),
]


@pytest.fixture(autouse=True)
def files():
    """As many as this process may have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def connections_of(broker):
    _, text = await broker.probe("/metrics", "metrics")
    return brokers.series(text, "kubelend_open_connections")


async def serves(broker):
    """Twenty calls, each on a new connection, long before the time of a handshake is over."""
    for _ in range(20):
        await raw_connections.others_are_served(broker)


def memory(broker):
    """What the process has in memory, in bytes."""
    return 4096 * int(Path(f"/proc/{broker.process.pid}/statm").read_text().split()[1])


async def test_ten_thousand_silent_connections_cost_little_and_stop_nobody(certificates, tmp_path):
    async with brokers.child(certificates, tmp_path, handshake_timeout="10m") as broker:
        before = memory(broker)
        with contextlib.ExitStack() as stack:
            many = (
                raw_connections.silent(broker.port, MANY // 100, f"127.0.1.{n}")
                for n in range(1, 101)
            )
            connections = [one for found in many for one in stack.enter_context(found)]
            closed = lambda: sum(map(raw_connections.is_closed, connections))  # noqa: E731
            await waiting.until(lambda: closed() >= MANY - HANDSHAKES, PATIENCE)
            await serves(broker)
            assert (await broker.probe("/healthz"))[0] == 200
            assert HANDSHAKES / 2 < await connections_of(broker) <= HANDSHAKES + 10
            assert memory(broker) - before < 80 * 2**20
        await waiting.until(none_left(broker), PATIENCE)
        await serves(broker)


async def test_more_connections_than_files_is_a_warning_and_fewer(certificates, tmp_path):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    async with brokers.child(
        certificates, tmp_path, max_connections="10000000", log_level="debug"
    ) as broker:
        (line,) = broker.logged("Raised limit of open files")
        assert line["limit"] == line["hard"] == hard
        (warning,) = [found for found in broker.log() if "requested" in found]
        assert (warning["level"], warning["requested"]) == ("warning", 10_000_000)
        assert 0 < warning["connections"] < hard
        await serves(broker)


async def test_broker_that_runs_out_of_files_makes_room_and_goes_on(certificates, tmp_path):
    """As if somebody had lowered its limit while it runs."""
    async with brokers.child(certificates, tmp_path, handshake_timeout="10m") as broker:
        resource.prlimit(broker.process.pid, resource.RLIMIT_NOFILE, (100, 100))
        with raw_connections.silent(broker.port, 300) as connections:
            # All of them have been seen: while they still come, each new one may push out a slow caller.
            await waiting.until(
                lambda: sum(map(raw_connections.is_closed, connections)) > 200, PATIENCE
            )
            await serves(broker)
            spent = processor_time(broker)
            await asyncio.sleep(1)
            assert processor_time(broker) - spent < 0.5
        assert {line["reason"] for line in broker.logged("Connection rejected")} == {"OutOfFiles"}
        await waiting.until(none_left(broker), PATIENCE)
        assert await broker.stop() == 0


def processor_time(broker):
    """Seconds that the process has computed."""
    fields = Path(f"/proc/{broker.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def none_left(broker):
    async def gone():
        return await connections_of(broker) == 0

    return gone
