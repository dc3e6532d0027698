"""Leader election on a real API server, also while the lease is deleted under load."""

import asyncio
import contextlib
import json
from datetime import timedelta
from functools import partial

import pytest
from structlog.testing import capture_logs

import broker_process
import kube_broker
import kube_faults
import make
from kube_faults import BY_REST, CPUS, eventually
from kubelend.core.errors import Forbidden, Unavailable
from kubelend.core.lifecycle import Phase
from kubelend.core.models import ClusterId
from kubelend.kits.backoff import NO_RETRIES
from kubelend.kube import config
from kubelend.kube.client import Client
from kubelend.kube.leader_election import LEASES, LeaderElection, LeaseIdentity, LeaseTimings
from kubelend.stores.kubernetes.store import KubernetesStore
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from waiting import PATIENCE, until

pytestmark = pytest.mark.timeout(240)

TIMES = LeaseTimings(timedelta(seconds=15), timedelta(seconds=10), timedelta(seconds=2))


class Watch:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.seconds = 1000.0

    def __call__(self):
        return self.seconds

    @property
    def passed(self):
        return timedelta(seconds=self.seconds)


@pytest.fixture
def watch():
    return Watch()


@pytest.fixture
def candidate(kube_client, namespace, watch):
    def candidate(identity, times=TIMES, client=kube_client):
        chosen = LeaseIdentity(identity, namespace)
        return LeaderElection(client, chosen, times, lambda: make.T0 + watch.passed, watch)

    return candidate


async def lease(client, namespace):
    return (await client.find(LEASES, "kubelend-broker", namespace)).spec


async def test_renewing_leader_stays_leader(candidate, watch, kube_client, namespace):
    first, second = candidate("broker-1"), candidate("broker-2")
    for _ in range(10):
        await first.try_acquire_or_renew()
        await second.try_acquire_or_renew()
        assert (first.is_leader, second.is_leader) == (True, False)
        assert (first.leader, second.leader) == ("broker-1", "broker-1")
        watch.seconds += 5
    found = await lease(kube_client, namespace)
    assert (found.lease_duration_seconds, found.lease_transitions) == (15, 0)


async def test_one_of_many_replicas_leads(candidate):
    many = [candidate(f"broker-{number}") for number in range(8)]
    for _ in range(2):
        await asyncio.gather(*(one.try_acquire_or_renew() for one in many))
    assert sum(one.is_leader for one in many) == 1
    assert len({one.leader for one in many}) == 1


async def test_interruption_begins_another_term(candidate, watch):
    only = candidate("broker-1")
    for _ in range(3):
        await only.try_acquire_or_renew()
        watch.seconds += 5
    assert only.term == 1
    watch.seconds += 10
    await only.try_acquire_or_renew()
    assert (only.is_leader, only.term) == (True, 2)


async def test_silent_leader_steps_down_before_another_may_acquire(
    candidate, watch, kube_client, namespace
):
    first, second = candidate("broker-1"), candidate("broker-2")
    await first.try_acquire_or_renew()
    await second.try_acquire_or_renew()
    watch.seconds += 9.9
    assert first.is_leader
    watch.seconds += 0.2
    assert not first.is_leader
    watch.seconds += 4.8
    await second.try_acquire_or_renew()
    assert not second.is_leader
    watch.seconds += 0.2
    await second.try_acquire_or_renew()
    assert (second.is_leader, second.leader) == (True, "broker-2")
    await first.try_acquire_or_renew()
    assert (first.is_leader, first.leader) == (False, "broker-2")
    assert (await lease(kube_client, namespace)).lease_transitions == 1


async def test_released_lease_is_acquired_immediately(candidate):
    first, second = candidate("broker-1"), candidate("broker-2")
    await first.try_acquire_or_renew()
    await first.release()
    assert not first.is_leader
    await second.try_acquire_or_renew()
    assert second.is_leader


async def test_lease_duration_of_the_holder_counts(candidate, watch):
    first = candidate("broker-1")
    hasty = candidate("broker-2", LeaseTimings(timedelta(seconds=3), timedelta(seconds=2)))
    await first.try_acquire_or_renew()
    await hasty.try_acquire_or_renew()
    watch.seconds += 14
    await hasty.try_acquire_or_renew()
    assert not hasty.is_leader
    watch.seconds += 1.1
    await hasty.try_acquire_or_renew()
    assert hasty.is_leader


async def test_nobody_leads_without_the_permission(candidate, kube, namespace):
    stranger = config.config_from_kubeconfig(kube.kubeconfig_for("stranger"))
    async with Client.open(stranger) as client:
        only = candidate(
            "broker-1", TIMES._replace(retry_period=timedelta(milliseconds=50)), client
        )
        with pytest.raises(Forbidden):
            await only.try_acquire_or_renew()
        running = asyncio.create_task(only.run())
        verbs = ["--verb=get,create,update", "--resource=leases.coordination.k8s.io"]
        kube.kubectl("create", "role", "elector", f"--namespace={namespace}", *verbs)
        binding = ["--role=elector", "--user=stranger", f"--namespace={namespace}"]
        kube.kubectl("create", "rolebinding", "elector", *binding)
        await until(lambda: only.is_leader)
        running.cancel()
        await asyncio.wait([running])


# -- deleted leases

NAMES = ("first", "second")
LEASE, RENEWAL = 4 * PATIENCE, 3 * PATIENCE
"""In seconds: nobody here waits for the end of a lease."""

RETRY = 0.3
TURNS = 3
OFFER = bodies.Advertisement(BY_REST, bodies.Metrics(bodies.Quantities(str(CPUS), "64Gi")))


def flags(kube, namespace, identity):
    return broker_process.election_flags(kube, namespace, identity, LEASE, RENEWAL, RETRY)


class Leases:
    """The lease, and the brokers that compete for it."""

    def __init__(self, objects, clients):
        self._client, self._namespace = objects.client, objects.namespace
        self._clients = clients

    async def holder(self):
        found = await self._client.find(LEASES, "kubelend-broker", self._namespace)
        return "" if found is None else found.spec.holder_identity

    async def pass_on(self):
        """Delete it until another holds it: the holder may be the first to notice the deletion."""
        before = await self.holder()
        while await self.holder() in ("", before):
            await self._client.delete(LEASES, "kubelend-broker", self._namespace)
            await eventually(self.holder)

    async def leaders(self):
        """Who takes changes, as each of them says."""
        return [name for name in NAMES if await self._takes_changes(name)]

    async def has_one_leader(self):
        return await self.leaders() == [await self.holder()]

    async def _takes_changes(self, name):
        try:
            await self._clients[name].publish(OFFER)
        except Unavailable:
            return False
        return True


@pytest.fixture
async def contest(kube, namespace, certificates, tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        clients, urls = {}, []
        for name in NAMES:
            directory = tmp_path / name
            directory.mkdir()
            running = broker_process.running(
                certificates.server(), directory, *flags(kube, namespace, name)
            )
            broker = await asyncio.to_thread(stack.enter_context, running)
            caller = BrokerClient(broker.url, certificates.cluster(BY_REST), backoff=NO_RETRIES)
            clients[name] = await stack.enter_async_context(caller)
            urls.append(broker.url)
        loading = kube_faults.loading(kube, namespace, urls, certificates)
        load = await stack.enter_async_context(loading)
        await load.offer()
        yield load, Leases(load.objects, clients)


def logged(tmp_path, event):
    logs = [(tmp_path / name / "broker.log").read_text().splitlines() for name in NAMES]
    lines = [json.loads(line) for log in logs for line in log]
    return [line for line in lines if line["event"] == event]


async def tells_of(load, promised):
    return promised <= {one.id for one in await load.all_reservations()}


async def test_broker_that_has_not_noticed_its_successor_deletes_nothing(kube, namespace):
    """It believes that it leads, and takes the objects of the other for orphans."""
    held = make.reservation(
        "rsv-1",
        phase=Phase.RESERVED,
        target=ClusterId("lender"),
        reserved_at=make.T0,
        expires_at=make.T0 + make.HOUR,
    )
    found = config.config_from_kubeconfig(kube.admin_kubeconfig)
    with capture_logs() as logs:
        async with kube_broker.running(kube, namespace) as older:

            def take_over():
                with contextlib.closing(KubernetesStore.open(found, namespace)) as newer:
                    newer.load()
                    newer.commit([make.cluster("lender"), held], 1)
                    newer.flush()

            await asyncio.to_thread(take_over)

            def waiting():
                return {
                    one["name"] for one in logs if one["event"] == "Reconcile failed, will retry"
                }

            await older.until(lambda: waiting() == {"lender-adv", "rsv-1"})
            for kind, name in ((ClusterAdvertisement, "lender-adv"), (Reservation, "rsv-1")):
                shown = await older.find(kind, name)
                assert shown is not None
                assert shown.metadata.deletion_timestamp is None


async def test_deleted_lease_releases_nothing_and_one_broker_leads(contest, tmp_path):
    load, leases = contest

    async def pass_on_again_and_again():
        for _ in range(TURNS):
            await leases.pass_on()
            # Both look once more, one stops and one reads the store: far less than it may lead without.
            await eventually(leases.has_one_leader)
            await load.answers(10)

    promised = await load.under(pass_on_again_and_again)
    await eventually(
        partial(tells_of, load, promised)
    )  # a follower may be asked, and be a bit behind
    await load.check(promised)
    assert await leases.has_one_leader()
    taken = [
        one for one in logged(tmp_path, "Store failed, will reload") if "another broker" in str(one)
    ]
    assert len(taken) <= 2 * TURNS, "they took the store from each other by turns"
