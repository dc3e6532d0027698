"""Both sides of a peering find out what has been lost, from the objects and from each other."""

import asyncio
import contextlib
from collections import defaultdict
from typing import Any

import msgspec
import pytest

import make
from kubelend.agent.ports import Peer, Readiness
from kubelend.apps import agent_peering
from kubelend.core.errors import NotFound
from kubelend.kube.codec import Listing, WatchEvent
from kubelend.peerings.liqo import DECISION_TIMEOUT, KEEP_UNUSED, LiqoPeering
from kubelend.peerings.liqo_api import LiqoApi
from kubelend.peerings.liqo_objects import (
    FOREIGN_CLUSTERS,
    GRANT_ANNOTATION,
    IDENTITIES,
    NAMESPACE_MAPS,
    NAMESPACES,
    NODES,
    OFFLOADINGS,
    SECRETS,
    SLICES,
    TENANTS,
    LiqoResource,
)
from kubelend.peerings.liqo_provider import (
    UNUSED_DELAY,
    GrantVerifier,
    LiqoProvider,
    ProviderOptions,
)
from kubelend.peerings.liqo_removal import RemovalLimits
from kubelend.peerings.slice_decision import LentReservation
from kubelend.wire import bodies
from virtual_time import in_virtual_time, now, stopped

AMOUNTS = make.resources("cpu=500m,memory=1Gi")
RESERVATION = "rsv-1"
PEER = Peer(RESERVATION, "berlin", AMOUNTS)


class Cluster:
    """A client of a cluster in memory, whose Liqo completes objects at once."""

    def __init__(self):
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}

    def put(self, kind, manifest):
        """Creates or changes an object; None removes a field."""
        metadata = manifest["metadata"]
        key = _key(kind, metadata["name"], metadata.get("namespace", ""))
        known = self.objects.setdefault(key, {"metadata": {"uid": "-".join(key)}})
        _merge(known, manifest)
        _complete(kind, known)
        return self._decode(known)

    def names(self, kind):
        return [name for plural, _, name in self.objects if plural == kind.plural]

    def remove(self, kind):
        """Removes all of a kind."""
        self.objects = {key: one for key, one in self.objects.items() if key[0] != kind.plural}

    def _decode(self, document):
        return msgspec.convert(document, LiqoResource)

    async def find(self, kind, name, namespace=""):
        found = self.objects.get(_key(kind, name, namespace))
        return None if found is None else self._decode(found)

    async def list(self, kind, namespace="", *, labels="", fields=""):
        found = [
            one
            for (plural, place, _), one in self.objects.items()
            if plural == kind.plural and namespace in ("", place) and _is_selected(one, labels)
        ]
        return Listing([self._decode(one) for one in found], [], "1")

    async def watch(self, *_, since, **__):
        yield WatchEvent("BOOKMARK", None, since)
        await asyncio.Event().wait()

    async def patch(self, kind, name, namespace, change, **_):
        if _key(kind, name, namespace) not in self.objects:
            raise NotFound(name)
        metadata = {**change.get("metadata", {}), "name": name, "namespace": namespace}
        return self.put(kind, {**change, "metadata": metadata})

    async def delete(self, kind, name, namespace="", **_):
        self.objects.pop(_key(kind, name, namespace), None)

    async def raw(self, _, __, body):
        kind = next(one for one in KINDS if one.kind == body["kind"])
        return msgspec.json.encode(self.put(kind, {**body}))


KINDS = (IDENTITIES, NAMESPACES, SECRETS, SLICES, TENANTS, FOREIGN_CLUSTERS, OFFLOADINGS)


def _key(kind, name, namespace):
    return kind.plural, namespace if kind.namespaced else "", name


def _merge(known, change):
    for name, value in change.items():
        if value is None:
            known.pop(name, None)
        elif isinstance(value, dict) and isinstance(known.get(name), dict):
            _merge(known[name], value)
        else:
            known[name] = value


def _is_selected(found, labels):
    own = found["metadata"].get("labels", {})
    wanted = (each.partition("=") for each in labels.split(",") if each and "!" not in each)
    return all(own.get(name) == value if value else name in own for name, _, value in wanted)


def _complete(kind, found):
    if kind is TENANTS:
        issued = {"ca": "Y2E=", "signedCRT": "Y3J0", "apiServer": "https://berlin"}
        found["status"] = {"authParams": issued, "tenantNamespace": "liqo-tenant-paris"}
    elif found["metadata"]["name"] == "liqo-nonce":
        found["data"] = {"nonce": "bm9uY2U="}
    elif found["metadata"]["name"] == "liqo-signed-nonce":
        found["data"]["signedNonce"] = "c2lnbmVk"


class Broker:
    """Relays handshakes in memory, and may forget them."""

    def __init__(self):
        self.parts = dict[str, bodies.Handshake]()
        self.grant = "first"
        self.calls = defaultdict[str, list[bodies.Handshake]](list)

    def of(self, own, other):
        relay = self

        class Exchange:
            async def exchange_handshake(self, _, handshake):
                relay.parts[own] = handshake
                relay.calls[own].append(handshake)
                return bodies.HandshakeResult(relay.parts.get(other), relay.grant)

            async def grant_keys(self):
                return []

        return Exchange()


class Provider:
    def __init__(self, cluster, broker):
        self.lent = {RESERVATION: LentReservation("paris", AMOUNTS)}
        exchange = broker.of("berlin", "paris")
        verifier = GrantVerifier(exchange.grant_keys, agent_peering.verify_grant)
        options = ProviderOptions("berlin", make.HOUR)
        api = LiqoApi(cluster)
        self.side = LiqoProvider(options, api, exchange, verifier, lambda: self.lent, now)

    @contextlib.asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.side.run())
        yield self
        await stopped(task)


@pytest.fixture
def broker():
    return Broker()


@pytest.fixture
def cluster():
    cluster = Cluster()
    labels = {"app.kubernetes.io/name": "clusterid-configmap"}
    cluster.objects["configmaps", "liqo", "clusterid"] = {
        "metadata": {"name": "clusterid", "namespace": "liqo", "labels": labels},
        "data": {"CLUSTER_ID": "berlin"},
    }
    return cluster


UNUSED_SECONDS = UNUSED_DELAY.total_seconds()
SIGNED = bodies.Handshake("paris", signed_nonce="c2lnbmVk", public_key="a2V5", csr="Y3Ny")


@in_virtual_time
async def test_provider_answers_again_what_the_broker_has_forgotten(cluster, broker):
    broker.parts["paris"] = SIGNED
    async with Provider(cluster, broker).running() as provider:
        provider.side.on_change(RESERVATION)
        await asyncio.sleep(1)
        assert broker.parts["berlin"].certificate == "Y3J0"
        broker.parts = {"paris": SIGNED}
        provider.side.on_handshake(RESERVATION)
        await asyncio.sleep(1)
        assert broker.parts["berlin"].certificate == "Y3J0"


@in_virtual_time
async def test_provider_admits_again_a_requester_whose_tenant_is_gone(cluster, broker):
    broker.parts["paris"] = SIGNED
    async with Provider(cluster, broker).running() as provider:
        provider.side.on_change(RESERVATION)
        await asyncio.sleep(1)
        del cluster.objects["tenants", "liqo-tenant-paris", "paris"]
        provider.side.on_handshake(RESERVATION)
        await asyncio.sleep(1)
        assert cluster.names(TENANTS) == ["paris"]


@pytest.mark.parametrize("part", [bodies.Handshake("paris"), SIGNED], ids=["nonce", "tenant"])
@pytest.mark.parametrize("is_killed", [False, True])
@in_virtual_time
async def test_provider_removes_what_is_left_of_any_handshake(cluster, broker, part, is_killed):
    """Also after a restart, and also if it has not come as far as a Tenant."""
    broker.parts["paris"] = part
    async with Provider(cluster, broker).running() as provider:
        provider.side.on_change(RESERVATION)
        await asyncio.sleep(10)
        assert cluster.names(NAMESPACES) == ["liqo-tenant-paris"]
        if not is_killed:
            provider.lent.clear()
            provider.side.on_change(RESERVATION)
            await asyncio.sleep(UNUSED_SECONDS - 1)
            assert cluster.names(NAMESPACES), "the requester's side goes first"
            await asyncio.sleep(5)
            assert not cluster.names(NAMESPACES)
    if is_killed:
        provider = Provider(cluster, broker)
        provider.lent.clear()
        async with provider.running():
            await asyncio.sleep(UNUSED_SECONDS + 10)
    assert not cluster.names(TENANTS)
    assert not cluster.names(NAMESPACES)


@pytest.mark.parametrize("is_dead", [False, True])
@in_virtual_time
async def test_requester_stays_admitted_until_copies_of_its_namespaces_are_gone(
    cluster, broker, is_dead
):
    """Liqo deletes them for its identity. A dead requester is waited for as long as for its slices."""
    broker.parts["paris"] = SIGNED
    async with Provider(cluster, broker).running() as provider:
        provider.side.on_change(RESERVATION)
        await asyncio.sleep(10)
        cluster.put(NAMESPACE_MAPS, copies("paris", "replicated"))
        provider.lent.clear()
        provider.side.on_change(RESERVATION)
        await asyncio.sleep(UNUSED_SECONDS + make.HOUR.total_seconds() - 1)
        assert cluster.names(TENANTS) == ["paris"]
        if not is_dead:
            cluster.remove(NAMESPACE_MAPS)
        await asyncio.sleep(10)
        assert not cluster.names(TENANTS)
        assert not cluster.names(NAMESPACES)


def copies(other, how):
    """Liqo's record of them."""
    labels = {f"liqo.io/{how}": "true"}
    namespace = f"liqo-tenant-{other}"
    return {"metadata": {"name": other, "namespace": namespace, "labels": labels}}


@in_virtual_time
async def test_requester_that_borrows_again_soon_stays_admitted(cluster, broker):
    broker.parts["paris"] = SIGNED
    async with Provider(cluster, broker).running() as provider:
        provider.side.on_change(RESERVATION)
        await asyncio.sleep(10)
        lent = dict(provider.lent)
        for _ in range(3):
            provider.lent.clear()
            provider.side.on_change(RESERVATION)
            await asyncio.sleep(UNUSED_SECONDS - 1)
            provider.lent.update(lent)
            provider.side.on_change(RESERVATION)
            await asyncio.sleep(UNUSED_SECONDS - 1)
            assert cluster.names(TENANTS) == ["paris"]


@in_virtual_time
async def test_provider_keeps_what_a_live_reservation_uses_after_a_restart(cluster, broker):
    broker.parts["paris"] = SIGNED
    for _ in range(2):
        async with Provider(cluster, broker).running() as provider:
            provider.side.on_change(RESERVATION)
            await asyncio.sleep(10)
    assert cluster.names(TENANTS) == ["paris"]


# -- the requester


@pytest.fixture
def requester(cluster, broker):
    async def sign(*_):
        return "Y3Ny"

    keys = {"privateKey": "a2V5", "publicKey": "a2V5"}
    metadata = {"name": "authentication-keys", "namespace": "liqo"}
    cluster.put(SECRETS, {"metadata": metadata, "data": keys})
    broker.parts["berlin"] = bodies.Handshake(
        "berlin",
        nonce="bm9uY2U=",
        certificate="Y3J0",
        ca="Y2E=",
        api_server="https://berlin",
        tenant_namespace="liqo-tenant-paris",
    )
    limits = RemovalLimits(make.HOUR, make.HOUR)
    return LiqoPeering(LiqoApi(cluster), broker.of("paris", "berlin"), sign, limits, now)


async def establish(requester):
    for step in (requester.connect, requester.size, requester.ready):
        await step(PEER)


def slice_of(cluster):
    [found] = [one for (plural, *_), one in cluster.objects.items() if plural == SLICES.plural]
    return found


@pytest.mark.parametrize("is_watched", [False, True])
@in_virtual_time
async def test_node_is_ready_by_what_is_read_and_by_what_the_watch_has_shown(
    cluster, requester, is_watched
):
    await establish(requester)
    amounts = {"cpu": "500m", "memory": "1Gi"}
    accepted = [{"type": name, "status": "Accepted"} for name in ("Authentication", "Resources")]
    slice_of(cluster)["status"] = {"conditions": accepted, "resources": amounts}
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": amounts}
    labels = {"liqo.io/type": "virtual-node"}
    cluster.put(NODES, {"metadata": {"name": RESERVATION, "labels": labels}, "status": ready})
    module = {"conditions": [{"type": "AuthIdentityControlPlaneStatus", "status": "Ready"}]}
    status = {
        "role": "Provider",
        "modules": {"authentication": module},
        "conditions": [{"type": "APIServerStatus", "status": "Established"}],
    }
    cluster.put(FOREIGN_CLUSTERS, {"metadata": {"name": "berlin"}, "status": status})
    watching = asyncio.create_task(requester.watch(lambda _: None))
    if is_watched:
        await asyncio.sleep(1)
    assert await requester.ready(PEER) == Readiness(
        is_ready=True, reason=f"node {RESERVATION} offers {AMOUNTS.describe()}", node=RESERVATION
    )
    await stopped(watching)


@in_virtual_time
async def test_denied_slice_is_replaced_when_there_is_another_grant(cluster, broker, requester):
    """Such as after the restart of a broker that signs with another key."""
    await establish(requester)
    slice_of(cluster)["status"] = {"conditions": [{"type": "Resources", "status": "Denied"}]}
    await establish(requester)
    assert slice_of(cluster)["metadata"]["annotations"][GRANT_ANNOTATION] == "first"
    broker.grant = "second"
    await establish(requester)
    assert not cluster.names(SLICES)
    await establish(requester)
    assert slice_of(cluster)["metadata"]["annotations"][GRANT_ANNOTATION] == "second"


@in_virtual_time
async def test_handshake_is_repeated_for_a_slice_without_a_decision(cluster, broker, requester):
    """The provider has removed its Tenant, and our Identity opens nothing any more."""
    await establish(requester)
    broker.calls.clear()
    await establish(requester)
    assert not broker.calls
    await asyncio.sleep(DECISION_TIMEOUT + 1)
    await establish(requester)
    assert broker.calls["paris"][-1].signed_nonce
    broker.calls.clear()
    accepted = [{"type": "Authentication", "status": "Accepted"}]
    slice_of(cluster)["status"] = {"conditions": accepted}
    await establish(requester)
    await asyncio.sleep(DECISION_TIMEOUT + 1)
    await establish(requester)
    assert not broker.calls


OTHER = PEER._replace(reservation="rsv-2")


async def disconnect(cluster, requester, peer=PEER):
    """Without its slice, which Liqo has removed."""
    cluster.remove(SLICES)
    return await requester.disconnect(peer)


@in_virtual_time
async def test_unused_peering_is_kept_for_a_while_and_used_by_the_next_reservation(
    cluster, broker, requester
):
    await establish(requester)
    assert not (await disconnect(cluster, requester)).is_ready
    await asyncio.sleep(KEEP_UNUSED - 1)
    assert not (await requester.disconnect(PEER)).is_ready
    assert cluster.names(IDENTITIES)
    broker.calls.clear()
    await requester.connect(OTHER)
    assert not broker.calls
    assert (await requester.disconnect(PEER)).is_ready
    assert not (await requester.disconnect(OTHER)).is_ready
    await asyncio.sleep(KEEP_UNUSED + 1)
    steps = [await requester.disconnect(OTHER) for _ in range(4)]
    assert steps[-1].is_ready
    assert not cluster.names(IDENTITIES)
    assert not cluster.names(NAMESPACES)


@in_virtual_time
async def test_identity_stays_until_copies_of_namespaces_are_gone(cluster, requester):
    """Liqo has left their record, as when several nodes go at the same time."""
    await establish(requester)
    cluster.put(NAMESPACE_MAPS, copies("berlin", "replication"))
    await disconnect(cluster, requester)
    await asyncio.sleep(KEEP_UNUSED + 1)
    assert "copies of namespaces" in (await requester.disconnect(PEER)).reason
    assert cluster.names(IDENTITIES)
    assert not cluster.names(NAMESPACE_MAPS)
    steps = [await requester.disconnect(PEER) for _ in range(4)]
    assert steps[-1].is_ready
    assert not cluster.names(IDENTITIES)


@in_virtual_time
async def test_identity_is_not_removed_while_another_reservation_connects(cluster, requester):
    """It has no slice yet. The end of the one before had been found before the handshake began."""
    await establish(requester)
    await disconnect(cluster, requester)
    await asyncio.sleep(KEEP_UNUSED + 1)
    results = await asyncio.gather(requester.connect(OTHER), requester.disconnect(PEER))
    assert all(one.is_ready for one in results)
    [identity] = [one for key, one in cluster.objects.items() if key[0] == IDENTITIES.plural]
    assert "deletionTimestamp" not in identity["metadata"]


@in_virtual_time
async def test_namespace_stays_offloaded_for_a_reservation_that_comes_meanwhile(cluster, requester):
    """Its slice is created when those of others were listed already, for the end of the one before."""
    await establish(requester)
    other, listed = OTHER._replace(namespaces=("team",)), cluster.list

    async def list_before_it_comes(kind, *arguments, **options):
        found = await listed(kind, *arguments, **options)
        if kind is SLICES and not cluster.names(OFFLOADINGS):
            cluster.list = listed
            await requester.connect(other)
            await requester.size(other)
        return found

    cluster.list = list_before_it_comes
    await disconnect(cluster, requester)
    assert cluster.names(OFFLOADINGS) == ["offloading"]
