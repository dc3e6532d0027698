"""ClusterAdvertisement objects: what is said by them, and what is shown on them, on a real API server."""

import asyncio
import itertools
import re
import shlex
import time
from pathlib import Path

import pytest

import charts
import make
import shipped
from kube_broker import Objects, events_of, quiet
from kubelend.core.errors import Forbidden
from kubelend.kube import config
from kubelend.kube.client import Client
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from kubelend.wire.objects import Condition
from waiting import until

pytestmark = [pytest.mark.timeout(120), pytest.mark.kube, pytest.mark.broker("objects")]

UNSAID = Condition("", "Unknown")
EXAMPLES = Path(__file__).parents[2] / "examples" / "objects"


async def shows(broker, name, look):
    return await broker.shows(ClusterAdvertisement, name, look)


def condition(found, type):
    return next((one for one in found.status.conditions if one.type == type), UNSAID)


async def test_example_with_prices_is_active_with_its_score(broker):
    await broker.apply_text((EXAMPLES / "cluster-advertisement-priced.yaml").read_text())
    shown = await shows(broker, "cluster-1-abc123-adv", lambda one: one.status.score != "")
    status = shown.status
    assert (status.score, status.phase, status.active) == ("66.67", "Active", True)
    assert status.observed_generation == shown.metadata.generation
    assert status.valid_until == make.T0 + make.STALE_AFTER
    assert {one.type: (one.status, one.reason) for one in status.conditions} == {
        "Ready": ("True", "ClusterActive"),
        "Stale": ("False", "AdvertisementAge"),
        "Overcommitted": ("False", "ResourceCheck"),
    }
    assert broker.ledger.clusters["cluster-1-abc123"].advertisement.prices is not None


async def test_example_without_allocatable_and_time_offers_its_capacity(broker):
    """Its name is not the cluster's; and what it says of reserved and available is repaired."""
    await broker.apply_text((EXAMPLES / "cluster-advertisement.yaml").read_text())
    shown = await shows(broker, "local-cluster-adv", lambda one: one.status.score != "")
    left = shown.spec.resources
    assert (left.available.cpu, left.reserved.cpu) == ("8950m", "0")
    known = broker.ledger.clusters["fd32c7d2-7cc6-46e6-80aa-d3d5c835586c"].advertisement
    assert known.allocatable == known.capacity
    assert known.sent_at == shown.metadata.creation_timestamp
    await broker.apply_text((EXAMPLES / "reservation.yaml").read_text())
    await broker.reserved("my-workload")
    await shows(
        broker, "local-cluster-adv", lambda one: one.spec.resources.available.cpu == "6950m"
    )


async def test_stale_cluster_is_shown_until_its_next_advertisement(broker):
    await broker.advertise("lender")
    await shows(broker, "lender-adv", lambda one: one.status.active)
    broker.clock.pass_time(make.STALE_AFTER)
    stale = await shows(broker, "lender-adv", lambda one: one.status.phase == "Stale")
    assert not stale.status.active
    assert stale.status.message == "Stale: no advertisement since 2026-01-01T12:00:00Z"
    assert condition(stale, "Stale").status == "True"
    assert condition(stale, "Ready").reason == "ClusterStale"
    assert condition(stale, "Ready").last_transition_time == make.T0 + make.STALE_AFTER
    await broker.reserve("mine")
    assert "Stale" in (await broker.failed("mine")).status.message
    await broker.edit(
        ClusterAdvertisement, "lender-adv", {"spec": {"timestamp": "2026-01-01T12:10:00Z"}}
    )
    await shows(broker, "lender-adv", lambda one: one.status.phase == "Active")
    assert [reason for reason, _ in await events_of(broker, "lender-adv", 2)] == ["Stale", "Active"]


async def test_recreated_advertisement_keeps_its_reservations(broker):
    await broker.advertise("lender", "4")
    await broker.reserve("mine", "3")
    await broker.reserved("mine")
    await broker.delete(ClusterAdvertisement, "lender-adv")
    await broker.until(lambda: "lender" not in broker.ledger.clusters)
    await broker.reserve("nowhere", "1")
    assert (await broker.failed("nowhere")).status.message.startswith("no suitable cluster: no clu")
    await broker.advertise("lender", "4")
    await broker.available("lender", "1")
    await broker.reserve("too-much", "2")
    await broker.failed("too-much")
    assert (await broker.reserved("mine")).status.target_cluster_id == "lender"


async def test_edited_reserved_is_repaired(broker):
    await broker.advertise("lender", "4")
    await broker.reserve("mine", "3")
    await broker.available("lender", "1")
    forged = {"reserved": {"cpu": "0", "memory": "0"}, "available": {"cpu": "99", "memory": "1Ti"}}
    await broker.edit(ClusterAdvertisement, "lender-adv", {"spec": {"resources": forged}})
    shown = await broker.available("lender", "1")
    assert shown.spec.resources.reserved.cpu == "3"
    await broker.reserve("too-much", "2")
    await broker.failed("too-much")


async def test_edited_status_is_repaired(broker):
    await broker.advertise("lender", "4")
    right = await shows(broker, "lender-adv", lambda one: one.status.score == "100.00")
    change = {"phase": "Stale", "active": False, "score": "1.00", "record": None}
    await broker.edit(ClusterAdvertisement, "lender-adv", {"status": change}, "status")
    data = right.status.record.data
    await shows(
        broker, "lender-adv", lambda one: one.status.record and one.status.record.data == data
    )
    again = await shows(broker, "lender-adv", lambda one: one.status.score == "100.00")
    assert (again.status.phase, again.status.active) == ("Active", True)
    broker.clock.pass_time(make.STALE_AFTER)
    found = await events_of(broker, "lender-adv", 1)
    assert [reason for reason, _ in found] == ["Stale"], "none of the edits"


async def test_object_of_a_cluster_that_uses_rest_shows_its_advertisement(broker):
    await broker.service.advertise(make.advertisement("lender", "cpu=4,memory=8Gi"))
    await shows(broker, "lender-adv", lambda one: one.status.score == "100.00")
    await broker.edit(
        ClusterAdvertisement,
        "lender-adv",
        {"spec": {"resources": {"capacity": {"cpu": "99"}, "allocatable": {"cpu": "99"}}}},
    )
    await shows(broker, "lender-adv", lambda one: one.spec.resources.allocatable.cpu == "4")
    assert broker.ledger.clusters["lender"].advertisement.allocatable.cpu == 4000
    await broker.delete(ClusterAdvertisement, "lender-adv")
    await broker.until(lambda: "lender" not in broker.ledger.clusters)
    await broker.service.advertise(make.advertisement("lender", "cpu=5,memory=8Gi"))
    await shows(broker, "lender-adv", lambda one: one.spec.resources.allocatable.cpu == "5")


async def test_latest_advertisement_counts_by_object_or_rest(broker):
    """The latest advertisement counts, until the other source sends a newer one."""
    await broker.advertise("lender", "4")
    await broker.available("lender", "4")
    await broker.service.advertise(make.advertisement("lender", "cpu=9,memory=16Gi"))
    await broker.available("lender", "9")
    await quiet(broker)
    assert broker.ledger.clusters["lender"].advertisement.allocatable.cpu == 9000
    spec = {"timestamp": "2026-01-01T13:00:00Z"}
    await broker.edit(ClusterAdvertisement, "lender-adv", {"spec": spec})
    await broker.available("lender", "4")


async def test_reserved_amounts_are_written_once_a_second_while_they_change(broker):
    await broker.advertise("lender", "40", "40Gi")
    await quiet(broker)
    began, versions = time.monotonic(), set()
    for number in range(40):
        await broker.service.reserve(make.request("cpu=1,memory=1Gi", requester=f"r{number}"))
        found = await broker.find(ClusterAdvertisement, "lender-adv")
        versions.add(found.metadata.resource_version)
    seconds = time.monotonic() - began
    assert len(versions) <= 1 + 2 * (1 + seconds)
    await broker.available("lender", "0")


# -- for whom an account writes

DOCS = Path(__file__).parents[2] / "docs" / "kubernetes.md"


@pytest.mark.parametrize("via", ["object", "rest"])
async def test_administrator_cordons_drains_and_uncordons_by_annotations(broker, via):
    """Also on an object that the broker manages."""
    if via == "object":
        await broker.advertise("lender")
    else:
        await broker.service.advertise(make.advertisement("lender"))
    await broker.reserve("mine")
    await broker.reserved("mine")

    async def annotate(request, reason):
        change = {"metadata": {"annotations": {f"broker.fluidos.eu/{request}": reason}}}
        await broker.edit(ClusterAdvertisement, "lender-adv", change)
        await shows(broker, "lender-adv", lambda one: not one.metadata.annotations)

    async def is_cordoned(reason):  # the objects follow the commit
        await shows(broker, "lender-adv", lambda one: one.status.cordon_reason == reason)

    await annotate("cordon", "new switch")
    await is_cordoned("new switch")
    assert broker.ledger.clusters["lender"].cordon == "new switch"
    assert broker.ledger.reservations["mine"].finished_at is None
    await annotate("drain", "")
    await is_cordoned("by an administrator")
    await broker.shows(Reservation, "mine", lambda one: one.status.phase == "Released")
    await annotate("uncordon", "")
    assert broker.ledger.clusters["lender"].cordon is None
    events = await events_of(broker, "lender-adv", 3)
    assert [one for one in events if "rained" in one[0] or "ordoned" in one[0]] == [
        ("Cordoned", "new switch"),
        ("Drained", "Reservations moved or released: 1; by an administrator"),
        ("Uncordoned", "Open to new reservations"),
    ]


async def test_documented_commands_cordon_drain_and_uncordon(broker, kube):
    await broker.advertise("rome")
    commands = re.findall(r"^kubectl (annotate .*?)(?:  +#.*)?$", DOCS.read_text(), re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        words = [*shlex.split(command), f"--namespace={broker.namespace}"]
        await asyncio.to_thread(kube.kubectl, *words)
        await shows(broker, "rome-adv", lambda one: not one.metadata.annotations)
    assert [one for one, _ in await events_of(broker, "rome-adv", 3)] == [
        *("Cordoned", "Drained", "Uncordoned")
    ]


@pytest.fixture
async def bound(broker, kube, helm):
    """The account of the documentation, which is bound to rome, where identities are checked."""
    values = {"checkIdentities": True, "store": {"kind": "kubernetes"}}
    found = charts.render(helm, "broker", values, f"--namespace={broker.namespace}")
    policies = charts.of_kind(
        found, "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"
    )
    [text] = re.findall(r"```yaml\n(apiVersion: rbac.*?)```", DOCS.read_text(), re.DOTALL)
    text = text.replace("namespace: kubelend", f"namespace: {broker.namespace}")
    place = f"--namespace={broker.namespace}"
    await asyncio.to_thread(kube.kubectl, "create", "serviceaccount", "rome", place)
    shipped.apply(kube, [*charts.load(text), *policies])
    async with Client.open(
        config.config_from_kubeconfig(kube.kubeconfig_of_account("rome", broker.namespace))
    ) as client:
        yield Objects(client, broker.namespace)
    for one in policies:
        kube.kubectl("delete", one["kind"], one["metadata"]["name"])


async def test_account_writes_only_for_the_cluster_that_it_is_bound_to(broker, bound):
    numbers = itertools.count()

    async def is_checked():
        """The API server takes a moment to apply a new policy."""
        try:
            await bound.reserve(f"early-{next(numbers)}", requesterID="paris")
        except Forbidden:
            return True
        return False

    await until(is_checked)
    await broker.advertise("bonn")
    await bound.advertise("rome")
    await shows(broker, "rome-adv", lambda one: one.status.active)
    await bound.reserve("mine", requesterID="rome")
    assert (await broker.reserved("mine")).status.target_cluster_id == "bonn"
    message = "is not bound to cluster bonn: it needs the verb use on clusters.broker.fluidos.eu"
    with pytest.raises(Forbidden, match=message):
        await bound.advertise("bonn", name="another")
    with pytest.raises(Forbidden, match=message):
        await bound.reserve("theirs", requesterID="bonn")
    with pytest.raises(Forbidden, match=f"cluster {broker.namespace}"):
        await bound.reserve("of-nobody", requesterID="")
    with pytest.raises(Forbidden, match=message):
        await bound.edit(ClusterAdvertisement, "bonn-adv", {"spec": {"region": "mars"}})
    cordon = {"metadata": {"annotations": {"broker.fluidos.eu/uncordon": ""}}}
    with pytest.raises(Forbidden, match="needs the verb cordon on clusters"):
        await bound.edit(ClusterAdvertisement, "rome-adv", cordon)
