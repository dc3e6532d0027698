"""Two brokers on one store under load; the leader sleeps in the middle of it, or is killed."""

import asyncio
import contextlib
import json
import signal

import pytest

import broker_process
from kubelend.core import audit
from kubelend.core.errors import Conflict, KubelendError, NoCapacity
from kubelend.core.ledger import Ledger
from kubelend.kits.backoff import Backoff
from kubelend.stores.kubernetes.store import KubernetesStore
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies
from waiting import PATIENCE, until

pytestmark = pytest.mark.timeout(180)

LEASE = 3.0
FLAGS = (
    "--leader-elect-lease-duration=3s",
    "--leader-elect-renew-deadline=2s",
    "--leader-elect-retry-period=500ms",
    "--rate-limit=0",
)
ONCE = Backoff(retries=0)
CPUS = 12
"""Of the one lender: as many reservations of one CPU fit."""

REQUEST = bodies.ReservationRequest(bodies.Quantities("1", "1Gi"), duration="1h")


@contextlib.contextmanager
def two(certificates, tmp_path, place):
    store = f"--store={place.url}"
    with contextlib.ExitStack() as stack:
        started = []
        for name in ("first", "second"):
            directory = tmp_path / name
            directory.mkdir()
            flags = (store, f"--leader-elect-identity={name}", *FLAGS)
            running = broker_process.running(certificates.server(), directory, *flags)
            started.append(stack.enter_context(running))
        yield started


class Callers:
    """Clusters that know both brokers, and ask the other where one does not take a change."""

    def __init__(self, running, certificates, stack):
        self.brokers = running
        self._certificates = certificates
        self._stack = stack
        self._clients = {}

    async def client(self, cluster, broker):
        if (cluster, broker.url) not in self._clients:
            made = BrokerClient(broker.url, self._certificates.cluster(cluster), backoff=ONCE)
            self._clients[cluster, broker.url] = await self._stack.enter_async_context(made)
        return self._clients[cluster, broker.url]

    async def call(self, cluster, what, patience=2 * PATIENCE):
        """Until one of them answers, or refuses for good."""
        async with asyncio.timeout(patience):
            while True:
                for broker in self.brokers:
                    client = await self.client(cluster, broker)
                    try:
                        async with asyncio.timeout(1.0):
                            return await what(client)
                    except TimeoutError:
                        continue
                    except Conflict:
                        raise
                    except KubelendError as error:
                        if not error.retryable:
                            raise
                await asyncio.sleep(0.05)

    async def offer(self):
        amounts = bodies.Metrics(bodies.Quantities(str(CPUS), "64Gi"))
        await self.call("lender", lambda one: one.publish(bodies.Advertisement("lender", amounts)))

    async def borrow(self, number):
        """One of many at once; the key makes a repeated question the same question."""
        try:
            found = await self.call(
                f"borrower-{number % 4}", lambda one: one.reserve(REQUEST, key=f"key-{number}")
            )
        except NoCapacity:
            return None
        return found.id


@pytest.fixture
async def callers(certificates, tmp_path, place):
    async with contextlib.AsyncExitStack() as stack:
        running = stack.enter_context(two(certificates, tmp_path, place))
        made = Callers(running, certificates, stack)
        await made.offer()
        yield made


def stored(place):
    store = KubernetesStore.open_readonly(place.access, place.namespace)
    with contextlib.closing(store):
        return Ledger.restore(store.load())


async def has_led(broker):
    """Wait until it has begun to lead; all questions may have been answered before."""
    await until(lambda: bool(leadings(broker)))


def leadings(broker):
    lines = map(json.loads, (broker.store.parent / "broker.log").read_text().splitlines())
    return [line for line in lines if line["event"] == "Became leader"]


async def load_with(callers, trouble):
    """Thirty questions at once, and `trouble` when some of them are answered."""
    asked = [asyncio.create_task(callers.borrow(number)) for number in range(30)]
    await asyncio.wait(asked[:10], return_when=asyncio.FIRST_COMPLETED)
    await asyncio.to_thread(trouble)
    return [one for one in await asyncio.gather(*asked) if one is not None]


def check(place, answered):
    """Nothing promised twice, nothing that was answered lost, and all that fits is used."""
    ledger = stored(place)
    assert audit.invariant_violations(ledger) == []
    live = {found.id for found in ledger.reservations.values() if found.is_live}
    assert live == set(answered)
    assert len(answered) == len(live) == CPUS


async def test_suspended_leader_reserves_nothing_twice(callers, place):
    first = callers.brokers[0]

    def fall_asleep():
        first.process.send_signal(signal.SIGSTOP)

    try:
        answered = await load_with(callers, fall_asleep)
        await has_led(callers.brokers[1])  # they may all have been answered before
    finally:
        first.process.send_signal(signal.SIGCONT)
    # It wakes up, finds its successor, and answers questions again: those of a follower.
    lender = await callers.client("lender", first)

    async def knows_all():
        return len(await lender.instructions()) == CPUS

    await until(knows_all, retry=lambda error: isinstance(error, KubelendError))
    with pytest.raises(KubelendError, match="send the request to second, the current leader"):
        await lender.publish(
            bodies.Advertisement("lender", bodies.Metrics(bodies.Quantities("99", "64Gi")))
        )
    await asyncio.to_thread(check, place, answered)


async def test_killed_leader_is_replaced_after_the_lease_expires(callers, place):
    first = callers.brokers[0]

    def kill():
        first.process.kill()
        first.process.wait()

    answered = await load_with(callers, kill)
    await has_led(callers.brokers[1])
    await asyncio.to_thread(check, place, answered)


async def test_stopping_leader_hands_over_immediately(callers, place):
    first = callers.brokers[0]
    stopped = []

    def stop():
        first.process.terminate()
        first.process.wait()
        stopped.append(True)

    answered = await load_with(callers, stop)
    assert stopped == [True]
    await asyncio.to_thread(check, place, answered)
