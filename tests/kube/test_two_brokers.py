"""Two brokers on one store under load; the leader is suspended in the middle of it, or stopped."""

import asyncio
import contextlib
import json
import signal
from functools import partial

import pytest

import broker_process
import kube_faults
from kube_faults import REQUEST
from kubelend.core import audit
from kubelend.core.errors import KubelendError, NoCapacity
from kubelend.core.ledger import Ledger
from kubelend.kits.backoff import NO_RETRIES
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies
from waiting import until

pytestmark = pytest.mark.timeout(180)

FLAGS = (
    "--leader-elect-lease-duration=3s",
    "--leader-elect-renew-deadline=2s",
    "--leader-elect-retry-period=500ms",
    "--rate-limit=0",
)
CPUS = 12
"""Of the one lender: as many reservations of one CPU fit."""
OFFER = bodies.Advertisement("lender", bodies.Metrics(bodies.Quantities(str(CPUS), "64Gi")))


@pytest.fixture
async def running(certificates, tmp_path, place):
    """Both brokers, of which the first leads."""
    with contextlib.ExitStack() as stack:
        started = []
        for name in ("first", "second"):
            directory = tmp_path / name
            directory.mkdir()
            flags = (f"--store={place.url}", f"--leader-elect-identity={name}", *FLAGS)
            broker = broker_process.running(certificates.server(), directory, *flags)
            started.append(stack.enter_context(broker))
        yield started


@pytest.fixture
async def load(running, kube, place, certificates):
    """Clients that ask the other broker where one does not accept a change."""
    urls = [broker.url for broker in running]
    async with kube_faults.loading(kube, place.namespace, urls, certificates) as load:
        await load.rest("lender", lambda client: client.publish(OFFER))
        yield load


async def borrow(load, number):
    """With a key, which makes a repeated request the same request."""
    caller, key = f"borrower-{number % 4}", f"key-{number}"
    try:
        return (await load.rest(caller, lambda client: client.reserve(REQUEST, key=key))).id
    except NoCapacity:
        return None


async def requests_during(load, fault):
    """Thirty requests at once, and `fault` when some of them are answered; the reservations' IDs."""
    asked = [asyncio.create_task(borrow(load, number)) for number in range(30)]
    await asyncio.wait(asked[:10], return_when=asyncio.FIRST_COMPLETED)
    await asyncio.to_thread(fault)
    return [one for one in await asyncio.gather(*asked) if one is not None]


def check(place, answered):
    """Nothing is reserved twice, no acknowledged reservation is lost, and all that fits is used."""
    with contextlib.closing(place.open_readonly()) as store:
        ledger = Ledger.restore(store.load())
    assert audit.invariant_violations(ledger) == []
    live = {found.id for found in ledger.reservations.values() if found.is_live}
    assert live == set(answered)
    assert len(answered) == len(live) == CPUS


def has_led(broker):
    log = (broker.store.parent / "broker.log").read_text().splitlines()
    return any(line["event"] == "Became leader" for line in map(json.loads, log))


async def test_suspended_leader_reserves_nothing_twice(running, load, place, certificates):
    first, second = running
    try:
        suspend = partial(first.process.send_signal, signal.SIGSTOP)
        answered = await requests_during(load, suspend)
        await until(lambda: has_led(second))  # they may all have been answered before
    finally:
        first.process.send_signal(signal.SIGCONT)
    # It resumes, observes its successor, and answers reads again as a follower.
    own = BrokerClient(first.url, certificates.cluster("lender"), backoff=NO_RETRIES)
    async with own as lender:

        async def knows_all():
            return len(await lender.instructions()) == CPUS

        await until(knows_all, retry=lambda error: isinstance(error, KubelendError))
        with pytest.raises(KubelendError, match="send the request to second, the current leader"):
            await lender.publish(OFFER)
    await asyncio.to_thread(check, place, answered)


async def test_stopping_leader_hands_over(running, load, place):
    first = running[0]

    def stop():
        first.process.terminate()
        assert first.process.wait() == 0

    answered = await requests_during(load, stop)
    await asyncio.to_thread(check, place, answered)
