"""A broker at home in Kubernetes, under load from both sides, while what it stands on fails.

Each ends with all of it equal: what was answered, what is shown, what is stored. And the audit is clean.
"""

import asyncio
import contextlib
from contextlib import aclosing
from urllib.parse import urlsplit

import pytest

import kube_faults
import tcp_cuts
from kube_faults import BY_OBJECT, eventually
from kubelend.core.errors import Gone
from kubelend.envtest import servers
from kubelend.kube import resources
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from shelves import new_namespace

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
async def home(own, certificates):
    async with kube_faults.home(own, new_namespace(own), certificates) as home:
        yield home


@pytest.fixture
async def line(own):
    """Between the broker and the API server."""
    async with tcp_cuts.network(urlsplit(own.url).port) as line:
        yield line


@pytest.fixture
async def far_home(own, certificates, line, tmp_path):
    """A broker behind the line; those who use objects are not."""
    kubeconfig = tmp_path / "kubeconfig"
    text = own.admin_kubeconfig.read_text()
    kubeconfig.write_text(text.replace(own.url, f"https://127.0.0.1:{line.port}"))
    namespace = new_namespace(own)
    async with kube_faults.home(own, namespace, certificates, kubeconfig) as home:
        yield home


def cut_power(cluster):
    cluster.kill()
    cluster.start()
    cluster.wait_until_ready()


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_api_server_that_goes_and_comes_back_costs_no_promise(own, home, how):
    async def trouble():
        await asyncio.to_thread(getattr(own, how))
        await eventually(home.is_unready)
        await asyncio.to_thread(own.start)
        await asyncio.to_thread(own.wait_until_ready)
        await eventually(home.is_ready)

    await home.load.check(await home.load.under(trouble))


async def test_etcd_that_stands_still_keeps_everybody_waiting_and_nothing_else(lab, home):
    answered = []

    async def trouble():
        lab.etcd.pause()
        try:
            await eventually(home.is_unready)
            answered.append(home.load.answered)
            # As long as the lease is good for, so that another broker would lead by now.
            await asyncio.sleep(3)
            answered.append(home.load.answered)
        finally:
            lab.etcd.resume()
        await eventually(home.is_ready)

    promised = await home.load.under(trouble)
    assert answered[0] == answered[1]  # while nothing can be kept nothing is promised
    await home.load.check(promised)


async def leave_and_come(load):
    """What the broker cannot see: deletions, also by force, a new wish, and a lender's new word."""
    await load.objects.delete(Reservation, "leaves")
    await load.objects.edit(Reservation, "vanishes", {"metadata": {"finalizers": None}})
    await load.objects.delete(Reservation, "vanishes")
    await load.objects.reserve("comes")
    await load.objects.delete(ClusterAdvertisement, "passing-adv")
    labels = {"spec": {"labels": {"said": "unseen"}}}
    await load.objects.edit(ClusterAdvertisement, f"{BY_OBJECT}-adv", labels)


async def settle_before(load):
    for name in ("leaves", "vanishes"):
        assert await load.wish(name)
    await load.objects.advertise("passing", "0")
    await load.shows(ClusterAdvertisement, "passing-adv", lambda one: one.status.score != "")


async def is_caught_up(home):
    ledger, _ = home.broker.service.current()
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
async def test_what_happens_behind_a_cut_line_is_made_up_for(lab, own, far_home, line, forgets):
    """Where the server has forgotten what it was last asked for (410), everything is listed anew."""
    load = far_home.load

    async def trouble():
        since = (await load.objects.client.list(RESERVATIONS)).resource_version
        line.cut()
        try:
            await leave_and_come(load)
            if forgets:
                await asyncio.to_thread(cut_power, own)
                lab.etcd.compact()
                await eventually(lambda: has_forgotten(load.objects.client, since))
            await eventually(far_home.is_unready)
        finally:
            line.mend()
        await eventually(far_home.is_ready)
        await eventually(lambda: is_caught_up(far_home))
        await load.remove("comes")

    await settle_before(load)
    await load.check(await load.under(trouble))
