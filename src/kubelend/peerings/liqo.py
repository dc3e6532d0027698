"""Peering by Liqo's custom resources alone: no liqoctl, and no kubeconfig of the other cluster.

    connect     handshake with the provider's agent through the broker, ends in an Identity
    size        one ResourceSlice of class `kubelend` for each reservation
    ready       granted in full, and a Node that is Ready with these amounts
    disconnect  deletes the slice, waits for the node, and removes the peering after the last slice

Every call starts from the objects as they are, so that an agent may be killed between any two of them. The
private key with which Liqo authenticates this cluster never leaves it: `sign` uses it in a child process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import structlog

from kubelend.agent.ports import DONE, HandshakeExchange, Peer, Readiness
from kubelend.core.errors import Unavailable
from kubelend.kits import tasks
from kubelend.kube import informer
from kubelend.kube.informer import Deleted, Listed
from kubelend.peerings import liqo_objects
from kubelend.peerings.liqo_api import LiqoApi
from kubelend.peerings.liqo_objects import (
    FOREIGN_CLUSTERS,
    IDENTITIES,
    NAMESPACES,
    NODES,
    RESERVATION_LABEL,
    SECRETS,
    SLICES,
    LiqoKind,
    LiqoResource,
)
from kubelend.wire import bodies

KEYS_SECRET: Final = "authentication-keys"  # noqa: S105 - its name
"""Liqo's key pair of this cluster."""

log = structlog.get_logger("kubelend.agent")

SignRequest = Callable[[str, str], Awaitable[str]]
"""Makes a certificate signing request: Liqo's private key and cluster ID to base64 of the PEM text."""


class _OwnIdentity(NamedTuple):
    """This cluster as Liqo knows it."""

    cluster_id: str
    public_key: str
    csr: str


class LiqoPeering:
    """The requester's side. Use `watch` as a task."""

    def __init__(self, api: LiqoApi, exchange: HandshakeExchange, sign: SignRequest) -> None:
        self._api = api
        self._exchange = exchange
        self._sign = sign
        self._identity: _OwnIdentity | None = None
        self._clusters: dict[str, str] = {}
        """The broker's ID of each provider, by Liqo's."""

    async def watch(self, on_change: Callable[[str], None]) -> None:
        """Calls `on_change` with the ID of a reservation or of a provider whose peering has changed."""

        async def follow(
            kind: LiqoKind, labels: str, name_of: Callable[[LiqoResource], str]
        ) -> None:
            async for change in informer.list_and_watch(self._api.client, kind, labels=labels):
                found = change.found if isinstance(change, Deleted) else change
                for each in found.objects if isinstance(found, Listed) else [found]:
                    if isinstance(each, LiqoResource) and (name := name_of(each)):
                        on_change(name)

        await tasks.run_all(
            {
                "slices": follow(SLICES, RESERVATION_LABEL, _name),
                "nodes": follow(NODES, "liqo.io/type=virtual-node", _name),
                "identities": follow(IDENTITIES, "", liqo_objects.kubelend_cluster),
                "foreign clusters": follow(FOREIGN_CLUSTERS, "", self._cluster_of),
            }
        )

    def _cluster_of(self, foreign: LiqoResource) -> str:
        return self._clusters.get(foreign.metadata.name, "")

    # -- connecting

    async def connect(self, peer: Peer) -> Readiness:
        if not await self._remote_id(peer):
            return await self._handshake(peer)
        return DONE

    async def _remote_id(self, peer: Peer) -> str:
        """Liqo's ID of a provider that this cluster has an identity for; empty if it has none."""
        found = await self._find_identity(peer.cluster)
        return "" if found is None or found.is_being_deleted else found.spec["clusterID"]

    async def _find_identity(self, cluster: str) -> LiqoResource | None:
        found = await self._api.list(IDENTITIES)
        for one in found:
            if known := liqo_objects.kubelend_cluster(one):
                self._clusters[one.spec["clusterID"]] = known
        own = (one for one in found if liqo_objects.kubelend_cluster(one) == cluster)
        return next(own, None)

    async def _handshake(self, peer: Peer) -> Readiness:
        """Takes the handshake as far as possible."""
        own = await self._own_identity()
        provider = await self._send(peer, bodies.Handshake(own.cluster_id))
        if provider is None or not provider.nonce:
            return _handshaking(f"{peer.cluster} to send a nonce")
        signed = await self._signed_nonce(provider)
        if not signed:
            return _handshaking("Liqo to sign the nonce")
        answer = bodies.Handshake(
            own.cluster_id, signed_nonce=signed, public_key=own.public_key, csr=own.csr
        )
        provider = await self._send(peer, answer)
        if provider is None or not provider.certificate:
            return _handshaking(f"{peer.cluster} to issue a certificate")
        await self._api.apply(IDENTITIES, liqo_objects.identity_manifest(peer.cluster, provider))
        return DONE

    async def _send(self, peer: Peer, part: bodies.Handshake) -> bodies.Handshake | None:
        provider = (await self._exchange.exchange_handshake(peer.reservation, part)).peer
        if provider is not None and provider.error:
            raise Unavailable(f"{peer.cluster}: {provider.error}")
        return provider

    async def _signed_nonce(self, provider: bodies.Handshake) -> str:
        remote = provider.cluster_id
        await self._api.apply(NAMESPACES, liqo_objects.namespace_manifest(remote))
        wanted = liqo_objects.signed_nonce_manifest(remote, provider.nonce)
        await self._api.apply(SECRETS, wanted)
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
        remote = await self._remote_id(peer)
        own = await self._own_identity()
        namespace = liqo_objects.tenant_namespace(remote)
        found = await self._api.find(SLICES, peer.reservation, namespace)
        if found is None or found.spec["resources"] != liqo_objects.slice_amounts(peer.resources):
            started = bodies.Handshake(own.cluster_id)
            grant = (await self._exchange.exchange_handshake(peer.reservation, started)).grant
            await self._api.apply(SLICES, liqo_objects.slice_manifest(peer, remote, grant))
        return DONE

    async def ready(self, peer: Peer) -> Readiness:
        remote = await self._remote_id(peer)
        namespace = liqo_objects.tenant_namespace(remote)
        found, node, foreign = await asyncio.gather(
            self._api.find(SLICES, peer.reservation, namespace),
            self._api.find(NODES, peer.reservation),
            self._api.find(FOREIGN_CLUSTERS, remote),
        )
        readiness = liqo_objects.readiness(found, node, peer)
        problem = liqo_objects.peering_problem(foreign)
        if readiness.is_ready and problem:
            # It tells of an unreachable provider long before the node does.
            return Readiness(is_ready=False, reason=f"peering with {peer.cluster}: {problem}")
        return readiness

    # -- disconnecting

    async def disconnect(self, peer: Peer) -> Readiness:
        slices = await self._api.list(SLICES, labels=RESERVATION_LABEL)
        own = [one for one in slices if one.metadata.name == peer.reservation]
        for found in own:
            if not found.is_being_deleted:
                await self._api.delete(SLICES, found)
        if own:
            return _waiting(f"ResourceSlice {peer.reservation} to be deleted")
        if await self._api.find(NODES, peer.reservation) is not None:
            return _waiting(f"virtual node {peer.reservation} to be deleted")
        return await self._remove_unused_peering(peer.cluster, slices)

    async def _remove_unused_peering(self, cluster: str, slices: list[LiqoResource]) -> Readiness:
        """After the last slice: what the handshake has created, and nothing that others have."""
        identity = await self._find_identity(cluster)
        if identity is None:
            return await self._remove_foreign_cluster(cluster)
        remote = identity.spec["clusterID"]
        is_used = any(one.spec.get("providerClusterID") == remote for one in slices)
        if is_used or not identity.is_managed:
            return DONE
        if not identity.is_being_deleted:
            await self._api.delete(IDENTITIES, identity)
            await self._api.delete_managed(NAMESPACES, liqo_objects.tenant_namespace(remote))
            log.info("Peering removed", cluster=cluster)
        return _waiting(f"the Identity for {cluster} to be deleted")

    async def _remove_foreign_cluster(self, cluster: str) -> Readiness:
        """Liqo leaves it, and creates it again as long as the Identity is there."""
        for remote in [each for each, known in self._clusters.items() if known == cluster]:
            if await self._api.delete_unused_foreign_cluster(remote):
                return _waiting(f"the ForeignCluster of {cluster} to be deleted")
            del self._clusters[remote]
        return DONE


def _name(found: LiqoResource) -> str:
    return found.metadata.name


def _handshaking(what: str) -> Readiness:
    return Readiness(is_ready=False, reason=f"waiting for {what}", is_peered=False)


def _waiting(what: str) -> Readiness:
    return Readiness(is_ready=False, reason=f"waiting for {what}")
