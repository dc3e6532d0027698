"""A broker in Kubernetes under load from REST and objects, while what it depends on fails or it is killed."""

import asyncio
import contextlib
import random
from collections import Counter
from contextlib import aclosing
from urllib.parse import urlsplit

import pytest
import yaml

import broker_process
import kube_faults
import kube_fixtures
import tcp_cuts
from kube_faults import BY_OBJECT, CPUS, LIVE, eventually
from kubelend.core.errors import Gone
from kubelend.envtest import assets, servers
from kubelend.kube import resources
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from store_kinds import new_namespace

pytestmark = pytest.mark.timeout(240)

RESERVATIONS = resources.resource_for(Reservation)


@pytest.fixture(scope="module")
def own(lab):
    """A cluster whose API server may be stopped."""
    [cluster] = lab.start("broker-faults")
    servers.install_crds(cluster)
    yield cluster
    cluster.kill()


@pytest.fixture
async def loaded(own, certificates):
    async with kube_faults.loaded(own, new_namespace(own), certificates) as loaded:
        yield loaded


@pytest.fixture
async def line(own):
    """Between the broker and the API server."""
    async with tcp_cuts.network(urlsplit(own.url).port) as line:
        yield line


@pytest.fixture
async def distant(own, certificates, line, tmp_path):
    """A broker behind the line; those who use objects are not."""
    kubeconfig = tmp_path / "kubeconfig"
    text = own.admin_kubeconfig.read_text()
    kubeconfig.write_text(text.replace(own.url, f"https://127.0.0.1:{line.port}"))
    namespace = new_namespace(own)
    async with kube_faults.loaded(own, namespace, certificates, kubeconfig) as loaded:
        yield loaded


async def test_missing_permissions_are_reported_by_the_probe(kube, namespace, certificates):
    nobody = kube.kubeconfig_for("nobody")
    async with kube_faults.starting(kube, namespace, certificates, nobody) as started:

        async def reports_why():
            return "forbidden" in await started.readiness()

        await eventually(reports_why)


def cut_power(cluster):
    cluster.kill()
    cluster.start()
    cluster.wait_until_ready()


async def test_restart_of_the_api_server_loses_no_reservation(own, loaded):
    async def fault():
        await asyncio.to_thread(own.kill)
        await eventually(loaded.is_unready)
        await asyncio.to_thread(own.start)
        await asyncio.to_thread(own.wait_until_ready)
        await eventually(loaded.is_ready)

    await loaded.load.check(await loaded.load.under(fault))


async def test_suspended_etcd_delays_only(lab, loaded):
    answered = []

    async def is_silent():
        """What was written before may still be answered."""
        before = loaded.load.answered
        await asyncio.sleep(1)
        return loaded.load.answered == before

    async def fault():
        lab.etcd.pause()
        try:
            await eventually(loaded.is_unready)
            await eventually(is_silent)
            answered.append(loaded.load.answered)
            # As long as the lease is good for, so that another broker would lead by now.
            await asyncio.sleep(3)
            answered.append(loaded.load.answered)
        finally:
            lab.etcd.resume()
        await eventually(loaded.is_ready)

    promised = await loaded.load.under(fault)
    assert answered[0] == answered[1]  # while nothing can be kept nothing is promised
    await loaded.load.check(promised)


async def leave_and_come(load):
    """Changes that the broker misses: deletions, also by force, a new request and a new advertisement."""
    await load.objects.delete(Reservation, "leaves")
    await load.objects.edit(Reservation, "vanishes", {"metadata": {"finalizers": None}})
    await load.objects.delete(Reservation, "vanishes")
    await load.objects.reserve("comes", wait="1h")  # there may be no room at that moment
    await load.objects.delete(ClusterAdvertisement, "passing-adv")
    labels = {"spec": {"labels": {"said": "unseen"}}}
    await load.objects.edit(ClusterAdvertisement, f"{BY_OBJECT}-adv", labels)


async def settle_before(load):
    for name in ("leaves", "vanishes"):
        assert await load.apply_request(name)
    await load.objects.advertise("passing", "0")
    await load.objects.shows(
        ClusterAdvertisement, "passing-adv", lambda one: one.status.score != ""
    )


async def is_caught_up(loaded):
    ledger, _ = loaded.broker.service.current()
    lenders = ledger.clusters
    known = ledger.reservations
    return (
        "comes" in known
        and not {"leaves", "vanishes"} & {one.id for one in known.values() if one.is_live}
        and "passing" not in lenders
        and lenders[BY_OBJECT].advertisement.labels == {"said": "unseen"}
    )


async def has_forgotten(client, since):
    """Whether the server cannot go on from this version."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2), aclosing(client.watch(RESERVATIONS, since=since)) as events:
            try:
                async for _ in events:
                    pass
            except Gone:
                return True
    return False


@pytest.mark.parametrize("forgets", [False, True], ids=["remembers", "has forgotten"])
async def test_changes_during_a_network_partition_are_caught_up(lab, own, distant, line, forgets):
    """Where the server has forgotten what it was last asked for (410), everything is listed anew."""
    load = distant.load

    async def fault():
        since = (await load.objects.client.list(RESERVATIONS)).resource_version
        line.cut()
        try:
            await leave_and_come(load)
            if forgets:
                await asyncio.to_thread(cut_power, own)
                kube_fixtures.compact(lab.etcd)
                await eventually(lambda: has_forgotten(load.objects.client, since))
            await eventually(distant.is_unready)
        finally:
            line.mend()
        await eventually(distant.is_ready)
        await eventually(lambda: is_caught_up(distant))
        await load.remove("comes")

    await settle_before(load)
    await load.check(await load.under(fault))


# -- killed brokers

KILLS = 4
REQUESTS = 12


def flags(kube, namespace, identity):
    return broker_process.election_flags(kube, namespace, identity, 3, 2, 0.5)


def kill(broker):
    broker.process.kill()
    broker.process.wait()


async def test_broker_killed_at_any_moment_leaves_one_reservation_or_none(
    kube, namespace, certificates, tmp_path
):
    """Started anew at the same address each time, and with the same name: so it has not to wait."""
    port, dice = assets.free_port(), random.Random(7)
    options = (*flags(kube, namespace, "only"), f"--http-port={port}")

    def running():
        return broker_process.running(certificates.server(), tmp_path, *options)

    async with contextlib.AsyncExitStack() as stack:
        broker = await asyncio.to_thread(stack.enter_context, running())
        urls = [f"https://localhost:{port}"]
        load = await stack.enter_async_context(
            kube_faults.loading(kube, namespace, urls, certificates)
        )
        await load.offer()

        async def kill_again_and_again():
            nonlocal broker
            for _ in range(KILLS):
                await load.answers(dice.randrange(12))
                await asyncio.sleep(dice.random() / 10)
                await asyncio.to_thread(kill, broker)
                broker = await asyncio.to_thread(stack.enter_context, running())

        promised = await load.under(kill_again_and_again)
        await load.check(promised)
        await asyncio.to_thread(kill, broker)


def requests(namespace):
    """A document for each, as one would hand it to kubectl."""
    return yaml.safe_dump_all(
        {
            "apiVersion": "broker.fluidos.eu/v1alpha1",
            "kind": "Reservation",
            "metadata": {"name": f"request-{number}", "namespace": namespace},
            "spec": {"requestedResources": {"cpu": "1", "memory": "1Gi"}, "requesterID": "me"},
        }
        for number in range(REQUESTS)
    )


async def test_leader_killed_while_objects_are_applied_leaves_each_in_one_phase(
    kube, namespace, certificates, tmp_path
):
    documents = tmp_path / "requests.yaml"
    documents.write_text(requests(namespace))
    async with contextlib.AsyncExitStack() as stack:
        brokers = []
        for name in ("first", "second"):
            directory = tmp_path / name
            directory.mkdir()
            running = broker_process.running(
                certificates.server(), directory, *flags(kube, namespace, name)
            )
            brokers.append(await asyncio.to_thread(stack.enter_context, running))
        urls = [broker.url for broker in brokers]
        load = await stack.enter_async_context(
            kube_faults.loading(kube, namespace, urls, certificates)
        )
        await load.offer()
        applying = asyncio.create_task(
            asyncio.to_thread(kube.kubectl, "apply", f"--filename={documents}")
        )
        await load.objects.shows(Reservation, "request-1", lambda one: one.status.phase != "")
        await asyncio.to_thread(kill, brokers[0])
        await applying
        found = [
            await load.objects.shows(
                Reservation, f"request-{number}", lambda one: one.status.phase != ""
            )
            for number in range(REQUESTS)
        ]
        phases = Counter(one.status.phase for one in found)
        assert phases == {"Reserved": 2 * CPUS, "Failed": REQUESTS - 2 * CPUS}
        await load.check({one.metadata.name for one in found if one.status.phase in LIVE})
        for one in found:
            emitted = Counter(reason for reason, _ in await load.objects.events(one.metadata.name))
            assert set(emitted) <= {one.status.phase}
            assert emitted.total() <= 2
