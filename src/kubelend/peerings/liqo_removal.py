"""Plans the removal of a reservation's virtual node, and of a peering after its last one. Pure.

    the node       cordon, evict its pods until the deadline, delete the slice, wait until Liqo removed it
    the peering    NamespaceMap, Identity, ForeignCluster, tenant namespace, in this order, if they are ours
    the requester  in the provider: Tenant, ForeignCluster, tenant namespace

Each step is planned from the objects as they are, so that an agent may be killed between any two of them. The
tenant namespace goes last, because it records whose Liqo cluster ID this is.

A provider that does not respond would block it: Liqo's replicator waits for the provider's copy of the slice,
and its drain, of which there is one for all nodes, for pods that only the provider can end. After a time the
ForeignCluster is declared permanently unreachable, as `liqoctl force unpeer` does. Liqo then removes our side
alone. The declaration has no effect while the provider responds, and is withdrawn when it is used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import msgspec

from kubelend.peerings import liqo_objects
from kubelend.peerings.liqo_objects import (
    FOREIGN_CLUSTERS,
    IDENTITIES,
    NAMESPACE_MAPS,
    NAMESPACES,
    NODES,
    PODS,
    REQUESTER_ANNOTATION,
    SLICES,
    TENANTS,
    LiqoKind,
    LiqoResource,
    Manifest,
)

DRAINING, PROVIDER_UNREACHABLE, FORCED = "Draining", "ProviderUnreachable", "ForceUnpeering"
DISCONNECTING: Final = "Disconnecting"
"""Reasons of the steps, in conditions and Events."""

DRAIN_ANNOTATION: Final = "kubelend.io/draining-since"
"""Of a slice: when its node was cordoned. Recorded there, so that a restarted agent keeps the deadline."""
FORCED_ANNOTATION: Final = "kubelend.io/removed-by-force"
"""Of a ForeignCluster: that we have declared it unreachable. Of a slice or NamespaceMap: the change makes
Liqo's replicator try again at once, and not after its backoff."""
UNREACHABLE_ANNOTATION: Final = "liqo.io/foreign-cluster-permanently-unreachable"
DEADLINE_GRACE_SECONDS: Final = 30
"""For pods that are left at the deadline."""


class RemovalLimits(NamedTuple):
    """How long a removal may wait for others."""

    drain_timeout: timedelta
    """For pods to be evicted, which PodDisruptionBudgets may delay."""
    force_after: timedelta
    """For an unreachable provider, from when it stopped responding."""


class Delete(NamedTuple):
    """Deletes an object; `grace_seconds` is for pods, None for their own."""

    kind: LiqoKind
    found: LiqoResource
    grace_seconds: int | None = None


class Patch(NamedTuple):
    kind: LiqoKind
    found: LiqoResource
    change: Manifest


class Evict(NamedTuple):
    """Deletes a pod unless a PodDisruptionBudget forbids it now."""

    pod: LiqoResource


RemovalAction = Delete | Patch | Evict


class RemovalStep(NamedTuple):
    """What to do now, and what to wait for then."""

    actions: tuple[RemovalAction, ...] = ()
    waits_for: str = ""
    """Empty if nothing is left."""
    reason: str = DISCONNECTING


NOTHING_LEFT: Final = RemovalStep()


class ObservedNode(NamedTuple):
    """What is left of a reservation's virtual node."""

    cluster: str
    """The provider's ID at the broker."""
    slice: LiqoResource | None
    node: LiqoResource | None
    pods: Sequence[LiqoResource]
    """On the node."""
    foreign: LiqoResource | None


def plan_node_removal(seen: ObservedNode, limits: RemovalLimits, now: datetime) -> RemovalStep:
    if seen.slice is None and seen.node is None:
        return NOTHING_LEFT
    since = liqo_objects.unreachable_since(seen.foreign)
    if since is not None:
        if now < (at := since + limits.force_after):
            return _wait_for_provider(seen.cluster, at, *_cordon(seen.node))
        return _force_node(seen)
    if seen.slice is not None and not seen.slice.is_being_deleted:
        return _drain(seen, seen.slice, limits, now)
    left = _deletions([one for one in seen.pods if not one.is_being_deleted])
    return RemovalStep((*left, *(_delete_orphan(seen) or _cordon(seen.node))), _node_text(seen))


def _delete_orphan(seen: ObservedNode) -> tuple[RemovalAction, ...]:
    """A node without slice and kubelet: Liqo leaves one that it had not seen when its slice was deleted."""
    node = seen.node
    if seen.slice is not None or node is None or node.is_being_deleted:
        return ()
    return (Delete(NODES, node),) if liqo_objects.has_lost_kubelet(node) else ()


def _wait_for_provider(cluster: str, at: datetime, *actions: RemovalAction) -> RemovalStep:
    waits_for = f"{cluster}, which is unreachable; removal by force at {at:%Y-%m-%dT%H:%M:%SZ}"
    return RemovalStep(actions, waits_for, PROVIDER_UNREACHABLE)


def _force_node(seen: ObservedNode) -> RemovalStep:
    """Everything that needs the provider is done without it. Liqo has to know that first."""
    waits_for = f"{_node_text(seen)} without {seen.cluster}, which is unreachable"
    if declaration := _declare_unreachable(seen.foreign):
        return RemovalStep((*_cordon(seen.node), *declaration), waits_for, FORCED)
    pods = tuple(Delete(PODS, pod, grace_seconds=0) for pod in seen.pods)
    forced = _delete_orphan(seen)
    if seen.slice is not None:
        forced = _force_deletion(SLICES, seen.slice)
    return RemovalStep((*pods, *forced), waits_for, FORCED)


def _declare_unreachable(foreign: LiqoResource | None) -> tuple[RemovalAction, ...]:
    """Nothing if it is declared."""
    if foreign is None or _annotations(foreign).get(UNREACHABLE_ANNOTATION) == "true":
        return ()
    return (Patch(FOREIGN_CLUSTERS, foreign, _declaration("true")),)


def _force_deletion(kind: LiqoKind, found: LiqoResource) -> tuple[RemovalAction, ...]:
    if not found.is_being_deleted:
        return (Delete(kind, found),)
    if FORCED_ANNOTATION in _annotations(found):
        return ()
    return (Patch(kind, found, _annotate(FORCED_ANNOTATION, "true")),)


def _drain(
    seen: ObservedNode, found: LiqoResource, limits: RemovalLimits, now: datetime
) -> RemovalStep:
    evictable = [pod for pod in seen.pods if not pod.is_of_daemon_set]
    since = _parse_time(_annotations(found).get(DRAIN_ANNOTATION, ""))
    deadline = (since or now) + limits.drain_timeout
    if not evictable or now >= deadline:
        actions = (*_cordon(seen.node), *_deletions(evictable), Delete(SLICES, found))
        return RemovalStep(actions, _node_text(seen))
    start = () if since else (Patch(SLICES, found, _annotate(DRAIN_ANNOTATION, now.isoformat())),)
    evictions = tuple(Evict(pod) for pod in evictable if not pod.is_being_deleted)
    waits_for = f"{len(evictable)} pods on node {found.metadata.name} to be evicted"
    waits_for += f", at most until {deadline:%Y-%m-%dT%H:%M:%SZ}"
    return RemovalStep((*start, *_cordon(seen.node), *evictions), waits_for, DRAINING)


def _deletions(pods: Sequence[LiqoResource]) -> tuple[RemovalAction, ...]:
    return tuple(Delete(PODS, pod, DEADLINE_GRACE_SECONDS) for pod in pods)


def _cordon(node: LiqoResource | None) -> tuple[RemovalAction, ...]:
    if node is None or node.spec.get("unschedulable") or node.is_being_deleted:
        return ()
    return (Patch(NODES, node, {"spec": {"unschedulable": True}}),)


def _node_text(seen: ObservedNode) -> str:
    if seen.slice is not None:
        return f"ResourceSlice {seen.slice.metadata.name} to be deleted"
    name = "" if seen.node is None else seen.node.metadata.name
    return f"virtual node {name} to be deleted"


def plan_withdrawal(foreign: LiqoResource | None) -> tuple[RemovalAction, ...]:
    """For a provider that is used again: withdraws our declaration, and not that of others."""
    if foreign is None or FORCED_ANNOTATION not in _annotations(foreign):
        return ()
    return (Patch(FOREIGN_CLUSTERS, foreign, _declaration(None)),)


class ObservedPeering(NamedTuple):
    """What is left of the peering with a provider."""

    cluster: str
    identity: LiqoResource | None
    namespace: LiqoResource | None
    foreign: LiqoResource | None
    is_used: bool
    """Whether there are slices or nodes of this provider, of other reservations or of others."""
    tenant: LiqoResource | None = None
    """If this cluster lends to the same one. It is in the same namespace."""
    maps: Sequence[LiqoResource] = ()
    """The NamespaceMaps. Liqo removes the copies of namespaces in the provider only with an Identity."""


def plan_peering_removal(
    seen: ObservedPeering, limits: RemovalLimits, now: datetime
) -> RemovalStep:
    """What our handshake has created, and nothing that others have."""
    if seen.identity is not None:
        if seen.is_used or not seen.identity.is_managed:
            return NOTHING_LEFT
        left = _delete(IDENTITIES, seen.identity, f"the Identity for {seen.cluster}")
        return _delete_maps(seen, limits, now) if seen.maps else left
    if seen.namespace is None or not seen.namespace.is_managed or seen.is_used:
        return NOTHING_LEFT
    if seen.tenant is not None:
        left = RemovalStep((), f"the Tenant of {seen.cluster} to be deleted")
        return left if seen.tenant.is_being_deleted else NOTHING_LEFT
    # Liqo leaves it, and creates it again as long as the Identity is there.
    if seen.foreign is not None and seen.foreign.status.get("role") in _UNUSED_ROLES:
        return _delete(FOREIGN_CLUSTERS, seen.foreign, f"the ForeignCluster of {seen.cluster}")
    return _delete(NAMESPACES, seen.namespace, f"namespace {seen.namespace.metadata.name}")


def _delete_maps(seen: ObservedPeering, limits: RemovalLimits, now: datetime) -> RemovalStep:
    """Liqo deletes them with the last node, but may leave one if several nodes go at the same time."""
    waits_for = f"copies of namespaces in {seen.cluster} to be deleted"
    since = liqo_objects.unreachable_since(seen.foreign)
    if since is None:
        left = tuple(Delete(NAMESPACE_MAPS, one) for one in seen.maps if not one.is_being_deleted)
        return RemovalStep(left, waits_for)
    if now < (at := since + limits.force_after):
        return _wait_for_provider(seen.cluster, at)
    forced = (each for one in seen.maps for each in _force_deletion(NAMESPACE_MAPS, one))
    actions = _declare_unreachable(seen.foreign) or tuple(forced)
    return RemovalStep(actions, f"{waits_for} without it", FORCED)


_UNUSED_ROLES: Final = (None, "", "Unknown", "Provider")
"""Of a ForeignCluster without an Identity. One with another role belongs to another peering."""


class ObservedRequester(NamedTuple):
    """What is left in a provider of a requester to which it lends nothing any more."""

    cluster: str
    """Its ID at the broker."""
    namespace: LiqoResource
    tenant: LiqoResource | None
    foreign: LiqoResource | None
    has_identity: bool
    """Whether this cluster borrows from the same one. Its Identity is in the same namespace."""


def plan_requester_removal(seen: ObservedRequester) -> RemovalStep:
    """What our handshake has created: Tenant, ForeignCluster, tenant namespace, in this order."""
    if seen.tenant is not None and seen.tenant.is_managed:
        return _delete(TENANTS, seen.tenant, f"the Tenant of {seen.cluster}")
    if seen.tenant is not None or seen.has_identity or not seen.namespace.is_managed:
        forget = Patch(NAMESPACES, seen.namespace, _annotate(REQUESTER_ANNOTATION, None))
        return RemovalStep((forget,))
    if seen.foreign is not None and seen.foreign.status.get("role") in _UNUSED_CONSUMER_ROLES:
        return _delete(FOREIGN_CLUSTERS, seen.foreign, f"the ForeignCluster of {seen.cluster}")
    return _delete(NAMESPACES, seen.namespace, f"namespace {seen.namespace.metadata.name}")


_UNUSED_CONSUMER_ROLES: Final = (None, "", "Unknown", "Consumer")
"""Of a ForeignCluster without a Tenant."""


def _delete(kind: LiqoKind, found: LiqoResource, name: str) -> RemovalStep:
    actions = () if found.is_being_deleted else (Delete(kind, found),)
    return RemovalStep(actions, f"{name} to be deleted")


def _annotate(name: str, value: str | None) -> Manifest:
    return {"metadata": {"annotations": {name: value}}}


def _declaration(value: str | None) -> Manifest:
    names = (UNREACHABLE_ANNOTATION, FORCED_ANNOTATION)
    return {"metadata": {"annotations": dict.fromkeys(names, value)}}


def _annotations(found: LiqoResource | None) -> dict[str, str]:
    return {} if found is None else found.metadata.annotations


def _parse_time(text: str) -> datetime | None:
    """None if it is not a time; then the drain starts again."""
    try:
        found = msgspec.convert(text, datetime)
    except msgspec.ValidationError:
        return None
    return found if found.tzinfo is not None else None
