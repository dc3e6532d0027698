"""Certificates that change under a running client: no call fails, and no old connection is used again."""

import asyncio
import shutil

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

import tls_peers
import waiting
from certificates import Certificates
from holders import LATER, SOON, Holder
from kubelend.core.errors import BrokerUnreachable, Forbidden
from kubelend.kits.files import AtomicDirectory
from kubelend.pki import files
from kubelend.wire import bodies
from scripted_broker import ScriptedBroker, body, hang_up, problem

VERSION = body(bodies.Version("1"))
WORKERS = 16


@pytest.fixture
def holder(tmp_path):
    return Holder(tmp_path, Certificates(tmp_path / "certificates"))


@pytest.fixture
async def broker(holder):
    async with ScriptedBroker(holder.certificates.server()) as broker:
        broker.responses.append(VERSION)
        yield broker


async def test_sixteen_callers_see_no_failure_while_the_certificate_changes_ten_times(
    holder, broker
):
    stop = asyncio.Event()

    async def work(client):
        while not stop.is_set():
            await client.version()

    async with holder.client(broker.url) as client, asyncio.TaskGroup() as group:
        for _ in range(WORKERS):
            group.create_task(work(client))
        for _ in range(10):
            holder.renew()
            await waiting.until(lambda: seen_with(broker, holder.serial) >= WORKERS)
        stop.set()
    assert len({seen.serial for seen in broker.seen}) >= 10


def seen_with(broker, serial):
    return sum(seen.serial == serial for seen in broker.seen)


async def test_calls_that_have_begun_finish_over_the_connection_they_have(holder, broker):
    finish = asyncio.Event()

    async def slowly(request):
        await finish.wait()
        return await VERSION(request)

    broker.responses[:] = [slowly, VERSION]
    old = holder.serial
    async with holder.client(broker.url) as client:
        begun = asyncio.create_task(client.version())
        await waiting.until(lambda: len(broker.seen) == 1)
        holder.renew()
        await asyncio.sleep(SOON.total_seconds())
        await client.version()
        assert not begun.done()
        assert broker.open_connections == 2
        finish.set()
        assert await begun == bodies.Version("1")
        assert [seen.serial for seen in broker.seen] == [old, holder.serial]
        await waiting.until(lambda: broker.open_connections == 1)


async def test_an_idle_connection_of_the_old_certificate_is_closed(holder, broker):
    async with holder.client(broker.url, LATER) as client:
        await client.version()
        holder.renew()
        assert await client.refresh() is True
        await waiting.until(lambda: broker.open_connections == 0)
        await client.version()
        assert len(broker.connections) == 2
        assert await client.refresh() is False


async def test_the_files_are_not_looked_at_for_each_call(holder, broker):
    old = holder.serial
    async with holder.client(broker.url, LATER) as client:
        await client.version()
        holder.renew()
        await client.version()
    assert {seen.serial for seen in broker.seen} == {old}


@pytest.mark.parametrize(
    "failures",
    [[hang_up, hang_up], [problem(Forbidden("has ended"))]],
    ids=["cut off, twice as the HTTP library itself tries again", "refused"],
)
async def test_a_call_that_fails_looks_at_them_and_goes_on_with_the_new(holder, broker, failures):
    async with holder.client(broker.url, LATER) as client:
        await client.version()
        holder.renew()
        broker.responses[:] = [*failures, VERSION]
        await client.version()
    assert broker.seen[-1].serial == holder.serial


async def test_a_call_that_must_not_be_repeated_is_not(holder, broker):
    async with holder.client(broker.url, LATER) as client:
        holder.renew()
        broker.responses[:] = [hang_up, VERSION]
        with pytest.raises(BrokerUnreachable):
            await client.drain("x")
        assert len(broker.seen) == 1
        await client.version()
    assert broker.seen[-1].serial == holder.serial


@pytest.mark.parametrize("first", ["tls.crt", "tls.key"])
async def test_a_pair_caught_in_the_middle_leaves_the_old_one_in_use(
    holder, broker, tmp_path, first
):
    old = holder.serial
    files.save_credentials(tmp_path / "next", holder.issue())
    (second,) = {"tls.crt", "tls.key"} - {first}
    async with holder.client(broker.url) as client:
        holder.put(tmp_path / "next", first)
        for _ in range(3):
            assert await client.refresh() is False
            await client.version()
        assert {seen.serial for seen in broker.seen} == {old}
        assert ["do not match" in str(report) for report in holder.reports] == [True]
        holder.put(tmp_path / "next", second)
        assert await client.refresh() is True
        await client.version()
    assert broker.seen[-1].serial == tls_peers.serial_in(tmp_path / "next")


async def test_a_new_certificate_that_the_broker_does_not_accept_is_said_to_be_the_reason(
    holder, broker
):
    async with holder.client(broker.url) as client:
        await client.version()
        holder.put(holder.certificates.stranger("a"), "tls.crt", "tls.key")
        assert await client.refresh()
        with pytest.raises(BrokerUnreachable, match=r"it may not accept .*tls\.crt"):
            await client.version()


async def test_an_authority_that_is_no_longer_trusted_is_not_spoken_to_again(
    holder, broker, tmp_path
):
    other = Certificates(tmp_path / "other", authority="other")
    async with holder.client(broker.url) as client:
        await client.version()
        holder.put(other.cluster("a"), "ca.crt")
        assert await client.refresh()
        with pytest.raises(BrokerUnreachable, match="not signed by a CA"):
            await client.version()


async def test_a_broker_of_a_new_authority_is_trusted_once_its_certificate_is_there(
    holder, tmp_path
):
    other = Certificates(tmp_path / "other", authority="other")
    server = shutil.copytree(other.server(), tmp_path / "server")
    both = [*other.authority.trusted, *holder.certificates.authority.trusted]
    (server / "ca.crt").write_bytes(files_text(both))
    async with ScriptedBroker(server) as broker, holder.client(broker.url, LATER) as client:
        broker.responses.append(VERSION)
        with pytest.raises(BrokerUnreachable, match="not signed by a CA"):
            await client.version()
        (holder.directory / "ca.crt").write_bytes(files_text(both))
        # The failure itself makes it look: nobody waits an hour.
        await client.version()


def files_text(certificates):
    return b"".join(each.public_bytes(Encoding.PEM) for each in certificates)


async def test_a_client_that_starts_in_the_middle_of_an_exchange_reads_again(
    holder, broker, tmp_path
):
    """Starts beside a writer that never rests, but exchanges all files at once."""
    names = ("tls.crt", "tls.key", "ca.crt")
    generations, stop = AtomicDirectory(holder.directory, names), asyncio.Event()
    files.save_credentials(tmp_path / "next", holder.issue())
    pairs = [
        {name: (directory / name).read_bytes() for name in names}
        for directory in (holder.directory, tmp_path / "next")
    ]

    def exchange():
        while not stop.is_set():
            for pair in pairs:
                generations.switch_to(generations.stage(pair))

    writing = asyncio.create_task(asyncio.to_thread(exchange))
    try:
        for _ in range(100):
            async with holder.client(broker.url):
                await asyncio.sleep(0)
    finally:
        stop.set()
        await writing
