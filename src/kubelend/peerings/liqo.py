"""Peering by Liqo's custom resources alone: no liqoctl, and no kubeconfig of the other cluster.

    connect     handshake with the provider's agent through the broker, ends in an Identity
    size        one ResourceSlice of class `kubelend` for each reservation
    ready       granted in full, and a Node that is Ready with these amounts
    disconnect  drains the node, deletes the slice, and removes the peering after the last one: `liqo_removal`

Every call starts from the objects as they are, so that an agent may be killed between any two of them. The
private key with which Liqo authenticates this cluster never leaves it: `sign` uses it in a child process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import Final, NamedTuple

from msgspec.structs import replace

from kubelend.agent.ports import DONE, Clock, HandshakeExchange, Peer, Readiness
from kubelend.core.errors import KubelendError, Unavailable
from kubelend.kits import tasks
from kubelend.kube import informer
from kubelend.kube.informer import Deleted, Listed
from kubelend.peerings import liqo_objects, liqo_removal
from kubelend.peerings.liqo_api import LiqoApi
from kubelend.peerings.liqo_objects import (
    FOREIGN_CLUSTERS,
    GRANT_ANNOTATION,
    IDENTITIES,
    LEASES,
    MANAGED_LABEL,
    MANAGER,
    NAMESPACE_MAPS,
    NAMESPACES,
    NODES,
    OFFLOADING_NAME,
    OFFLOADINGS,
    OWN_SLICES,
    PODS,
    REMOTE_LABEL,
    RESERVATION_LABEL,
    SECRETS,
    SLICES,
    TENANTS,
    VIRTUAL_NODES,
    LiqoKind,
    LiqoResource,
)
from kubelend.peerings.liqo_removal import (
    Delete,
    ObservedNode,
    ObservedPeering,
    RemovalAction,
    RemovalLimits,
    RemovalStep,
)
from kubelend.wire import bodies

KEYS_SECRET: Final = "authentication-keys"  # noqa: S105 - its name
"""Liqo's key pair of this cluster."""

_MANAGED: Final = f"{MANAGED_LABEL}={MANAGER}"

DECISION_TIMEOUT: Final = 10.0
"""Seconds after which a slice without a decision makes the handshake be repeated."""
KEEP_UNUSED: Final = 10.0
"""Seconds for which a peering is kept after its last reservation, so that the next one finds it as it was.
The provider keeps its side for longer (`liqo_provider.UNUSED_DELAY`): Liqo needs that to remove ours."""

SignRequest = Callable[[str, str], Awaitable[str]]
"""Makes a certificate signing request: Liqo's private key and cluster ID to base64 of the PEM text."""


class _OwnIdentity(NamedTuple):
    """This cluster as Liqo knows it."""

    cluster_id: str
    public_key: str
    csr: str


class LiqoPeering:
    """The requester's side. Use `watch` as a task."""

    def __init__(
        self,
        api: LiqoApi,
        exchange: HandshakeExchange,
        sign: SignRequest,
        limits: RemovalLimits,
        clock: Clock,
        grant_of: Callable[[str], str] = lambda _: "",
    ) -> None:
        """`grant_of` returns the grant that the broker has sent with a reservation; empty if none yet."""
        self._api = api
        self._cache = _WatchedObjects(api)
        self._grant_of = grant_of
        self._exchange = exchange
        self._sign = sign
        self._limits = limits
        self._clock = clock
        self._identity: _OwnIdentity | None = None
        self._clusters: dict[str, str] = {}
        """The broker's ID of each provider, by Liqo's: whom a changed ForeignCluster is about."""
        self._answers: dict[str, tuple[str, bodies.Handshake]] = {}
        """The nonce that was signed for a handshake, and the part that answers it, by reservation."""
        self._undecided: dict[str, float] = {}
        """Since when a slice has no decision of its provider, by reservation, in the event loop's time."""
        self._remotes: dict[str, str] = {}
        """Liqo's ID of each provider that this cluster had an identity for when it was last connected."""
        self._wanted: dict[str, str] = {}
        """The provider of each reservation that is connected, also before it has a slice."""
        self._kept_until: dict[tuple[str, str], float] = {}
        """When the unused peering of a disconnected reservation is removed, in the event loop's time; by
        reservation and provider."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By provider: an Identity that a reservation has found is not removed for the end of another."""
        self._offload_lock = asyncio.Lock()
        """The same for NamespaceOffloadings."""

    async def watch(self, on_change: Callable[[str], None]) -> None:
        """Calls `on_change` with the ID of a reservation or of a provider whose peering has changed."""
        with contextlib.suppress(KubelendError):
            await self._own_identity()  # a signature takes a child process: not during a handshake

        async def follow(
            kind: LiqoKind, labels: str, name_of: Callable[[LiqoResource], str]
        ) -> None:
            async for change in informer.list_and_watch(self._api.client, kind, labels=labels):
                for each in self._cache.handle(kind, change):
                    if name := name_of(each):
                        on_change(name)

        await tasks.run_all(
            {
                "slices": follow(SLICES, OWN_SLICES, liqo_objects.reservation_of),
                "nodes": follow(NODES, VIRTUAL_NODES, liqo_objects.reservation_of),
                "identities": follow(IDENTITIES, "", liqo_objects.kubelend_cluster),
                "foreign clusters": follow(FOREIGN_CLUSTERS, "", self._cluster_of),
            }
        )

    def _cluster_of(self, foreign: LiqoResource) -> str:
        return self._clusters.get(foreign.metadata.name, "")

    # -- connecting

    async def connect(self, peer: Peer) -> Readiness:
        """Also repeats the handshake if the provider does not know our identity any more.

        It removes its Tenant with the last reservation, of which it learns earlier than of the next one.
        """
        self._wanted[peer.reservation] = peer.cluster
        self._kept_until.pop((peer.reservation, peer.cluster), None)
        async with self._locks[peer.cluster]:
            found = await self._find_identity(peer.cluster)
            if found is None or found.is_being_deleted:
                self._remotes.pop(peer.cluster, None)
                return await self._handshake(peer)
            self._remotes[peer.cluster] = found.spec["clusterID"]
            now = asyncio.get_running_loop().time()
            is_overdue = now - self._undecided.get(peer.reservation, now) > DECISION_TIMEOUT
            return await self._handshake(peer) if is_overdue else DONE

    async def _find_identity(self, cluster: str) -> LiqoResource | None:
        found = await self._cache.list(IDENTITIES)
        for one in found:
            if known := liqo_objects.kubelend_cluster(one):
                self._clusters[one.spec["clusterID"]] = known
        own = (one for one in found if liqo_objects.kubelend_cluster(one) == cluster)
        return next(own, None)

    async def _handshake(self, peer: Peer) -> Readiness:
        """Takes the handshake as far as possible."""
        own = await self._own_identity()
        start = "", bodies.Handshake(own.cluster_id)
        answered, part = self._answers.get(peer.reservation, start)
        provider = await self._send(peer, part)
        if provider is None or not provider.nonce:
            return _handshaking(f"{peer.cluster} to send a nonce")
        if provider.nonce != answered:
            signed = await self._signed_nonce(peer.cluster, provider)
            if not signed:
                return _handshaking("Liqo to sign the nonce")
            answer = bodies.Handshake(
                own.cluster_id, signed_nonce=signed, public_key=own.public_key, csr=own.csr
            )
            self._answers[peer.reservation] = provider.nonce, answer
            provider = await self._send(peer, answer)
        if provider is None or not provider.certificate:
            return _handshaking(f"{peer.cluster} to issue a certificate")
        wanted = liqo_objects.identity_manifest(peer.cluster, provider)
        self._cache.put(IDENTITIES, await self._api.ensure(IDENTITIES, wanted))
        self._answers.pop(peer.reservation, None)
        self._remotes[peer.cluster] = provider.cluster_id
        self._undecided.pop(peer.reservation, None)
        return DONE

    async def _send(self, peer: Peer, part: bodies.Handshake) -> bodies.Handshake | None:
        provider = (await self._exchange.exchange_handshake(peer.reservation, part)).peer
        if provider is not None and provider.error:
            raise Unavailable(f"{peer.cluster}: {provider.error}")
        return provider

    async def _signed_nonce(self, cluster: str, provider: bodies.Handshake) -> str:
        remote = provider.cluster_id
        namespace = liqo_objects.namespace_manifest(remote, provider=cluster)
        await self._api.ensure(NAMESPACES, namespace)
        wanted = liqo_objects.signed_nonce_manifest(remote, provider.nonce)
        await self._api.ensure(SECRETS, wanted)
        name, namespace = wanted["metadata"]["name"], wanted["metadata"]["namespace"]
        signed = await self._api.complete(
            SECRETS, name, namespace, lambda found: found.data.get("signedNonce")
        )
        return signed or ""

    async def _own_identity(self) -> _OwnIdentity:
        if self._identity is None:
            keys = await self._api.find(SECRETS, KEYS_SECRET, self._api.namespace)
            if keys is None:
                raise Unavailable(f"Secret {KEYS_SECRET} of Liqo not found")
            own = await self._api.cluster_id()
            csr = await self._sign(keys.data["privateKey"], own)
            self._identity = _OwnIdentity(own, keys.data["publicKey"], csr)
        return self._identity

    # -- sizing

    async def size(self, peer: Peer) -> Readiness:
        remote = self._remotes.get(peer.cluster, "")
        slices = await self._cache.list(SLICES, OWN_SLICES)
        if not remote:
            return _handshaking(f"a peering with {peer.cluster}")
        found = _slice_of(peer.reservation, remote, slices)
        if found is None:
            name, grant = await asyncio.gather(self._free_name(peer, slices), self._grant(peer))
            wanted = liqo_objects.slice_manifest(peer, remote, grant, name)
            self._cache.put(SLICES, await self._api.create(SLICES, wanted))
        elif not liqo_objects.is_requested(found, peer):
            name, grant = found.metadata.name, await self._grant(peer)
            await self._api.apply(SLICES, liqo_objects.slice_manifest(peer, remote, grant, name))
        elif liqo_objects.is_denied(found):
            await self._replace_grant(peer, found)
        for namespace in peer.namespaces:
            await self._offload(namespace)
        return DONE

    async def _grant(self, peer: Peer) -> str:
        return self._grant_of(peer.reservation) or await self._current_grant(peer)

    async def _current_grant(self, peer: Peer) -> str:
        started = bodies.Handshake((await self._own_identity()).cluster_id)
        return (await self._exchange.exchange_handshake(peer.reservation, started)).grant

    async def _replace_grant(self, peer: Peer, found: LiqoResource) -> None:
        """Deletes a slice whose grant is outdated, such as after a change of the broker's key.

        Liqo carries annotations to the provider only when a slice is created.
        """
        if found.metadata.annotations.get(GRANT_ANNOTATION) != await self._current_grant(peer):
            await self._api.delete(SLICES, found)

    async def _offload(self, namespace: str) -> None:
        """After the slice was created. One of a user stays as it is."""
        async with self._offload_lock:
            found = await self._api.find(OFFLOADINGS, OFFLOADING_NAME, namespace)
            if found is None or found.is_being_deleted:
                await self._api.apply(OFFLOADINGS, liqo_objects.offloading_manifest(namespace))

    async def _remove_unused_offloadings(self) -> None:
        """Those of ours that no slice names any more. Several reservations may share one.

        Slices are listed after them, so that one that was created for a new slice is not taken for unused.
        """
        async with self._offload_lock:
            if not (found := await self._api.list(OFFLOADINGS, labels=_MANAGED)):
                return
            slices = await self._cache.list(SLICES, OWN_SLICES)
            used = {name for one in slices for name in liqo_objects.offloaded_namespaces(one)}
            for one in found:
                if one.metadata.namespace not in used and not one.is_being_deleted:
                    await self._api.delete(OFFLOADINGS, one)

    async def _free_name(self, peer: Peer, slices: list[LiqoResource]) -> str:
        nodes = await self._cache.list(NODES, VIRTUAL_NODES)
        taken = {one.metadata.name for one in (*slices, *nodes)}
        return liqo_objects.slice_name(peer.reservation, taken)

    async def ready(self, peer: Peer) -> Readiness:
        remote = self._remotes.get(peer.cluster, "")
        slices = await self._cache.list(SLICES, OWN_SLICES)
        if not remote:
            return _handshaking(f"a peering with {peer.cluster}")
        found = _slice_of(peer.reservation, remote, slices)
        name = peer.reservation if found is None else found.metadata.name
        node, foreign = await asyncio.gather(
            self._cache.find(NODES, name), self._cache.find(FOREIGN_CLUSTERS, remote)
        )
        self._note_decision(peer.reservation, found)
        readiness = liqo_objects.readiness(found, node, peer)
        problem = liqo_objects.peering_problem(foreign)
        if readiness.is_ready and problem:
            # It tells of an unreachable provider long before the node does.
            reason = f"peering with {peer.cluster}: {problem}"
            return Readiness(is_ready=False, reason=reason, node=readiness.node)
        if not problem:
            await self._perform(liqo_removal.plan_withdrawal(foreign))
        return readiness

    def _note_decision(self, reservation: str, found: LiqoResource | None) -> None:
        if found is None or found.status.get("conditions"):
            self._undecided.pop(reservation, None)
        else:
            self._undecided.setdefault(reservation, asyncio.get_running_loop().time())

    # -- disconnecting

    async def disconnect(self, peer: Peer) -> Readiness:
        self._undecided.pop(peer.reservation, None)
        self._answers.pop(peer.reservation, None)
        if self._wanted.get(peer.reservation) == peer.cluster:
            del self._wanted[peer.reservation]
        if self._is_kept(peer):
            return _KEPT
        remote = await self._known_remote_id(peer.cluster)
        if not remote:
            return DONE
        slices = await self._cache.list(SLICES, OWN_SLICES)
        seen = await self._observe_node(peer, remote, slices)
        step = liqo_removal.plan_node_removal(seen, self._limits, self._clock())
        if not step.waits_for:
            await self._delete_leases(peer, remote)
            await self._remove_unused_offloadings()
            nodes = await self._cache.list(NODES, VIRTUAL_NODES)
            used = {one.spec.get("providerClusterID") for one in slices}
            used |= {one.metadata.labels.get(REMOTE_LABEL) for one in nodes}
            return await self._remove_peering(peer, remote, is_used=remote in used)
        return await self._execute(step)

    async def _remove_peering(self, peer: Peer, remote: str, *, is_used: bool) -> Readiness:
        """Unless another reservation uses it, or may do so soon, if this process has connected it."""
        if not is_used and peer.cluster in self._remotes:
            until = asyncio.get_running_loop().time() + KEEP_UNUSED
            self._kept_until.setdefault((peer.reservation, peer.cluster), until)
        if self._is_kept(peer):
            return _KEPT
        async with self._locks[peer.cluster]:
            is_used = is_used or peer.cluster in self._wanted.values()
            peering = await self._observe_peering(peer, remote, is_used=is_used)
            step = liqo_removal.plan_peering_removal(peering, self._limits, self._clock())
            left = await self._execute(step)
        if left.is_ready:
            self._kept_until.pop((peer.reservation, peer.cluster), None)
        return left

    def _is_kept(self, peer: Peer) -> bool:
        until = self._kept_until.get((peer.reservation, peer.cluster), 0.0)
        is_used = peer.cluster in self._wanted.values()
        return not is_used and asyncio.get_running_loop().time() < until

    async def _known_remote_id(self, cluster: str) -> str:
        """Liqo's ID of a provider, also after its Identity is gone; empty if nothing of it is left."""
        identity = await self._find_identity(cluster)
        if identity is not None:
            return str(identity.spec["clusterID"])
        managed = await self._api.list(NAMESPACES, labels=_MANAGED)
        own = (one for one in managed if liqo_objects.kubelend_cluster(one) == cluster)
        return next((one.metadata.labels[REMOTE_LABEL] for one in own), "")

    async def _observe_node(
        self, peer: Peer, remote: str, slices: list[LiqoResource]
    ) -> ObservedNode:
        nodes, foreign = await asyncio.gather(
            self._cache.list(NODES, VIRTUAL_NODES), self._cache.find(FOREIGN_CLUSTERS, remote)
        )
        own = (
            one
            for one in nodes
            if liqo_objects.reservation_of(one) == peer.reservation
            and one.metadata.labels.get(REMOTE_LABEL) == remote
        )
        node = next(own, None)
        pods: list[LiqoResource] = []
        if node is not None:
            pods = await self._api.list(PODS, fields=f"spec.nodeName={node.metadata.name}")
        found = _slice_of(peer.reservation, remote, slices)
        return ObservedNode(peer.cluster, found, node, pods, foreign)

    async def _observe_peering(self, peer: Peer, remote: str, *, is_used: bool) -> ObservedPeering:
        namespace = liqo_objects.tenant_namespace(remote)
        identity, found, foreign, tenants, maps = await asyncio.gather(
            self._find_identity(peer.cluster),
            self._api.find(NAMESPACES, namespace),
            self._cache.find(FOREIGN_CLUSTERS, remote),
            self._api.list(TENANTS, namespace),
            self._api.list(NAMESPACE_MAPS, namespace, labels=OWN_SLICES),
        )
        tenant = next(iter(tenants), None)
        return ObservedPeering(peer.cluster, identity, found, foreign, is_used, tenant, maps)

    async def _delete_leases(self, peer: Peer, remote: str) -> None:
        """Of the virtual kubelet, which Liqo leaves behind."""
        for one in await self._api.list(LEASES, liqo_objects.tenant_namespace(remote)):
            if liqo_objects.reservation_of(one) == peer.reservation:
                await self._api.delete(LEASES, one)

    async def _execute(self, step: RemovalStep) -> Readiness:
        await self._perform(step.actions)
        if not step.waits_for:
            return DONE
        return Readiness(is_ready=False, reason=f"waiting for {step.waits_for}", step=step.reason)

    async def _perform(self, actions: Iterable[RemovalAction]) -> None:
        for action in actions:
            await self._api.perform(action)
            if isinstance(action, Delete):
                self._cache.mark_deleted(action.kind, action.found)


class _WatchedObjects:
    """The latest state of the kinds that are watched. Before their first list, the API server is asked.

    Own writes are put at once, so that no decision is made from what was true before them.
    """

    def __init__(self, api: LiqoApi) -> None:
        self._api = api
        self._known: dict[str, dict[tuple[str, str], LiqoResource]] = {}
        """By plural; then by namespace and name."""

    def handle(self, kind: LiqoKind, change: object) -> list[LiqoResource]:
        """Returns the objects that a change is about."""
        match change:
            case Listed(objects):
                self._known[kind.plural] = {_key(kind, one): one for one in objects}
                return list(objects)
            case Deleted(found):
                self._known[kind.plural].pop(_key(kind, found), None)
                return [found]
            case LiqoResource():
                self.put(kind, change)
                return [change]
        return []

    def put(self, kind: LiqoKind, found: LiqoResource) -> None:
        if (known := self._known.get(kind.plural)) is not None:
            known[_key(kind, found)] = found

    def mark_deleted(self, kind: LiqoKind, found: LiqoResource) -> None:
        """It goes when the watch shows that Liqo has removed its finalizers."""
        if _key(kind, found) in self._known.get(kind.plural, ()):
            metadata = replace(found.metadata, deletion_timestamp=datetime.now(UTC))
            self.put(kind, replace(found, metadata=metadata))

    async def list(self, kind: LiqoKind, labels: str = "") -> list[LiqoResource]:
        """`labels` are those of its watch."""
        known = self._known.get(kind.plural)
        return await self._api.list(kind, labels=labels) if known is None else [*known.values()]

    async def find(self, kind: LiqoKind, name: str) -> LiqoResource | None:
        """Of a kind without namespaces."""
        known = self._known.get(kind.plural)
        return await self._api.find(kind, name) if known is None else known.get(("", name))


def _key(kind: LiqoKind, found: LiqoResource) -> tuple[str, str]:
    return found.metadata.namespace if kind.namespaced else "", found.metadata.name


def _slice_of(reservation: str, remote: str, slices: list[LiqoResource]) -> LiqoResource | None:
    """The slice of a reservation with one provider. While it moves, there is one with each."""
    namespace = liqo_objects.tenant_namespace(remote)
    own = (
        one
        for one in slices
        if one.metadata.labels.get(RESERVATION_LABEL) == reservation
        and one.metadata.namespace == namespace
        and one.is_managed
    )
    return next(own, None)


def _handshaking(what: str) -> Readiness:
    return Readiness(is_ready=False, reason=f"waiting for {what}", is_peered=False)


_KEPT: Final = Readiness(
    is_ready=False,
    reason=f"keeping the peering for {KEEP_UNUSED:g} s, for other reservations",
    step=liqo_removal.DISCONNECTING,
)
