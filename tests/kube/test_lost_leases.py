"""Two brokers under load, and somebody deletes the lease by which they agree: again and again another leads.

Their patience is long here, so that a leader that went on until its own time is up would do so for the whole
test, beside its successor.
"""

import asyncio
import contextlib
import json
from functools import partial

import pytest
from structlog.testing import capture_logs

import broker_process
import kube_broker
import kube_faults
import make
from kube_faults import BY_REST, CPUS, eventually
from kubelend.core.errors import Unavailable
from kubelend.core.lifecycle import Phase
from kubelend.core.models import ClusterId
from kubelend.kits.backoff import NO_RETRIES
from kubelend.kube import config
from kubelend.kube.leader_election import LEASES
from kubelend.stores.kubernetes.store import KubernetesStore
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from waiting import PATIENCE

pytestmark = pytest.mark.timeout(240)

NAMES = ("first", "second")
LEASE, RENEWAL = 4 * PATIENCE, 3 * PATIENCE
"""In seconds: nobody here waits for the end of a lease."""

RETRY = 0.3
TURNS = 3
OFFER = bodies.Advertisement(BY_REST, bodies.Metrics(bodies.Quantities(str(CPUS), "64Gi")))


def flags(kube, namespace, identity):
    return broker_process.election_flags(kube, namespace, identity, LEASE, RENEWAL, RETRY)


class Leases:
    """The lease, whoever deletes it, and the brokers that want it."""

    def __init__(self, objects, clients):
        self._client, self._namespace = objects.client, objects.namespace
        self._clients = clients

    async def holder(self):
        found = await self._client.find(LEASES, "kubelend-broker", self._namespace)
        return "" if found is None else found.spec.holder_identity

    async def pass_on(self):
        """Delete it until another has it: whoever had it may be the first to see that it is gone."""
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
async def home(kube, namespace, certificates, tmp_path):
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


def has_answered(load, enough):
    return load.answered >= enough


async def tells_of(load, promised):
    found = await load.rest("auditor", lambda one: one.all_reservations(), admin=True)
    return promised <= {one.id for one in found}


async def test_broker_that_does_not_know_its_successor_deletes_nothing_of_it(kube, namespace):
    """It believes that it leads, and what the other has made looks like ghosts to it."""
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


async def test_whoever_finds_the_lease_deleted_releases_nothing_and_one_leads(home, tmp_path):
    load, leases = home

    async def pass_on_again_and_again():
        for _ in range(TURNS):
            await leases.pass_on()
            # Both look once more, one stops and one reads the store: far less than it may lead without.
            await eventually(leases.has_one_leader)
            await eventually(partial(has_answered, load, load.answered + 10))

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
