"""Liqo's objects: kinds, names, and what their states mean for a reservation. Pure.

A ResourceSlice is one reservation's share of a provider, and its virtual node has the same name: the ID of
the reservation. Neither an exit code of liqoctl nor the condition of a slice alone says that something can
be used; the granted amounts and the node do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from kubelend.agent.ports import Peer, Readiness
from kubelend.core import resources
from kubelend.core.errors import InvalidInput, UnexpectedResponse
from kubelend.core.resources import Resources
from kubelend.kube.resources import Resource
from kubelend.wire import bodies
from kubelend.wire.objects import Metadata, ObjectStruct

SLICE_RESOURCE = "resourceslices.authentication.liqo.io"
IDENTITY_RESOURCE = "identities.authentication.liqo.io"

LIQO_NAMES = {"gpu": "nvidia.com/gpu", "storage": "ephemeral-storage"}
"""Kubernetes' names of the resources that Kubelend names differently."""


class LiqoCondition(msgspec.Struct, frozen=True):
    """Of a slice or a node."""

    type: str
    status: str
    reason: str = ""
    message: str = ""


class LiqoMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """The fields that are read here."""

    name: str = ""
    deletion_timestamp: str | None = None


class LiqoStatus(msgspec.Struct, frozen=True):
    """Of a slice or a node."""

    conditions: list[LiqoCondition] = []
    resources: dict[str, str] = {}
    """Of a slice: what was granted."""
    allocatable: dict[str, str] = {}
    """Of a node."""


class LiqoObject(msgspec.Struct, frozen=True):
    """A slice, a node, or a list of them."""

    kind: str = ""
    metadata: LiqoMetadata = LiqoMetadata()
    status: LiqoStatus = LiqoStatus()
    items: Sequence[LiqoObject] = ()


def parse_objects(output: bytes) -> Sequence[LiqoObject]:
    """The output of `kubectl get -o json`: nothing, one object or a list."""
    if not output.strip():
        return ()
    try:
        found = msgspec.json.decode(output, type=LiqoObject)
    except msgspec.MsgspecError as error:
        raise UnexpectedResponse(f"cannot decode the output of kubectl: {error}") from None
    return found.items if found.kind.endswith("List") else (found,)


def existing_names(found: Iterable[LiqoObject]) -> set[str]:
    """The names of objects that are not being deleted."""
    return {one.metadata.name for one in found if one.metadata.deletion_timestamp is None}


def liqo_quantities(wanted: Resources) -> dict[str, str]:
    """Quantities by Kubernetes' resource names."""
    return {LIQO_NAMES.get(name, name): text for name, text in wanted.quantities().items()}


def slice_readiness(found: Iterable[LiqoObject], peer: Peer) -> Readiness:
    """Whether all of the reserved resources can be used."""
    known = {one.kind: one for one in found}
    granted, node = known.get("ResourceSlice"), known.get("Node")
    problem = _not_granted(granted, peer) or _not_usable(node, peer)
    name = "" if node is None else node.metadata.name
    offered = f"node {name} offers {peer.resources.describe()}"
    return Readiness(is_ready=not problem, reason=problem or offered, node=name)


def _not_granted(found: LiqoObject | None, peer: Peer) -> str:
    if found is None:
        return f"ResourceSlice {peer.reservation} not found yet"
    if found.metadata.deletion_timestamp is not None:
        return f"ResourceSlice {peer.reservation} is being deleted"
    for kind in ("Authentication", "Resources"):
        condition = _find_condition(found, kind)
        if condition is None:
            who = f"ResourceSlice {peer.reservation}: {peer.cluster}"
            return f"{who} has not set condition {kind} yet"
        if condition.status != "Accepted":
            return f"ResourceSlice {peer.reservation}: {kind} not accepted: {_condition_text(condition)}"
    return _shortfall_message("granted", found.status.resources, peer)


def _not_usable(node: LiqoObject | None, peer: Peer) -> str:
    if node is None:
        return f"virtual node {peer.reservation} not found yet"
    condition = _find_condition(node, "Ready")
    if condition is None or condition.status != "True":
        reason = "it has no condition Ready" if condition is None else _condition_text(condition)
        return f"virtual node {peer.reservation} not ready: {reason}"
    return _shortfall_message("offered by the virtual node", node.status.allocatable, peer)


def _shortfall_message(how: str, texts: dict[str, str], peer: Peer) -> str:
    """What is missing of the reserved resources; empty if nothing is."""
    try:
        there = resources.parse_offered(
            {_KUBELEND_NAMES.get(name, name): text for name, text in texts.items()}
        )
    except InvalidInput as error:
        return f"invalid quantity in what is {how}: {error.message}"
    missing = peer.resources.shortfall(there)
    return f"{missing.describe()} less is {how} than reserved" if missing else ""


_KUBELEND_NAMES = {liqo: ours for ours, liqo in LIQO_NAMES.items()}


def _find_condition(found: LiqoObject, kind: str) -> LiqoCondition | None:
    # Liqo may list several conditions of one type; the last is the latest.
    return next((one for one in reversed(found.status.conditions) if one.type == kind), None)


def _condition_text(condition: LiqoCondition) -> str:
    return condition.message or condition.reason or condition.status


# -- custom resources, without liqoctl

SLICE_CLASS: Final = "kubelend"
"""Class of our slices. Liqo leaves classes that it does not know to other controllers: to the provider's
agent."""
MAX_PODS: Final = "110"
"""Number of pods on a virtual node, which is not a reserved amount: the default of a kubelet."""

MANAGED_LABEL: Final = "app.kubernetes.io/managed-by"
MANAGER: Final = "kubelend-agent"
CLUSTER_ANNOTATION: Final = "kubelend.io/cluster"
"""The other cluster's ID at the broker, on Identities, Tenants, and tenant namespaces in a requester."""
TENANT_NAMESPACES: Final = "liqo.io/tenant-namespace=true"
REQUESTER_ANNOTATION: Final = "kubelend.io/requester"
"""Of a tenant namespace in a provider: the ID at the broker of the cluster that has been admitted."""
RESERVATION_LABEL: Final = "kubelend.io/reservation"
GRANT_ANNOTATION: Final = "kubelend.io/grant"
NAMESPACES_ANNOTATION: Final = "kubelend.io/namespaces"
"""Of a slice: the namespaces that are offloaded for it, separated by commas."""
OFFLOADING_NAME: Final = "offloading"
"""The only name of a NamespaceOffloading that Liqo reads."""
REMOTE_LABEL: Final = "liqo.io/remote-cluster-id"
CORDON_ANNOTATION: Final = "liqo.io/cordon"
MAX_LABEL_LENGTH: Final = 63
ORIGIN_LABEL: Final = "offloading.liqo.io/origin"
CREATOR_LABEL: Final = "liqo.io/creator-user"
"""Of a ShadowPod: the identity that has created it. Set by Liqo's webhook, so that it can be relied on."""

Manifest = dict[str, Any]


class LiqoResource(msgspec.Struct, frozen=True):
    """An object of Liqo or of Kubernetes, with the parts that are read here."""

    metadata: Metadata
    spec: dict[str, Any] = {}
    status: dict[str, Any] = {}
    data: dict[str, str] = {}

    @property
    def is_managed(self) -> bool:
        """Whether it was created by an agent, and not by a person or another tool."""
        return self.metadata.labels.get(MANAGED_LABEL) == MANAGER

    @property
    def is_being_deleted(self) -> bool:
        return self.metadata.deletion_timestamp is not None

    @property
    def is_of_daemon_set(self) -> bool:
        return False


class OwnerReference(ObjectStruct, frozen=True):
    """The controller of an object."""

    kind: str = ""


class OwnedMetadata(Metadata, frozen=True):
    """Metadata with the owners."""

    owner_references: tuple[OwnerReference, ...] = ()


class BoundPod(LiqoResource, frozen=True):
    """A pod on a node."""

    metadata: OwnedMetadata

    @property
    def is_of_daemon_set(self) -> bool:
        """Whether it would be created again on the same node after an eviction."""
        return any(one.kind == "DaemonSet" for one in self.metadata.owner_references)


LiqoKind = Resource[LiqoResource]


def liqo_resource(group: str, kind: str, plural: str, *, is_namespaced: bool = True) -> LiqoKind:
    version = "v1beta1" if group.endswith("liqo.io") else "v1"
    return Resource(group, version, plural, kind, LiqoResource, is_namespaced)


def core_resource(kind: str, plural: str, *, is_namespaced: bool = True) -> LiqoKind:
    """A kind of Kubernetes itself that Liqo uses."""
    return liqo_resource("", kind, plural, is_namespaced=is_namespaced)


def decode(content: bytes) -> LiqoResource:
    return msgspec.json.decode(content, type=LiqoResource)


_AUTHENTICATION = "authentication.liqo.io"
TENANTS: Final = liqo_resource(_AUTHENTICATION, "Tenant", "tenants")
IDENTITIES: Final = liqo_resource(_AUTHENTICATION, "Identity", "identities")
SLICES: Final = liqo_resource(_AUTHENTICATION, "ResourceSlice", "resourceslices")
SHADOW_PODS: Final = liqo_resource("offloading.liqo.io", "ShadowPod", "shadowpods")
FOREIGN_CLUSTERS: Final = liqo_resource(
    "core.liqo.io", "ForeignCluster", "foreignclusters", is_namespaced=False
)
SECRETS: Final = core_resource("Secret", "secrets")
NAMESPACES: Final = core_resource("Namespace", "namespaces", is_namespaced=False)
NODES: Final = core_resource("Node", "nodes", is_namespaced=False)
PODS: Final[LiqoKind] = Resource("", "v1", "pods", "Pod", BoundPod)
LEASES: Final = liqo_resource("coordination.k8s.io", "Lease", "leases")
OFFLOADINGS: Final = liqo_resource(
    "offloading.liqo.io", "NamespaceOffloading", "namespaceoffloadings"
)

NAMESPACE_MAPS: Final = liqo_resource("offloading.liqo.io", "NamespaceMap", "namespacemaps")
"""Liqo's copies of namespaces in a provider. It goes when they are gone."""

OWN_SLICES: Final = "liqo.io/replication=true"
"""Selects the slices, or NamespaceMaps, with which this cluster borrows, and not those of other clusters."""
VIRTUAL_NODES: Final = "liqo.io/type=virtual-node"


def tenant_namespace(remote: str) -> str:
    """Liqo's namespace for the objects that concern another cluster, by that cluster's Liqo ID."""
    return f"liqo-tenant-{remote}"


def _metadata(name: str, remote: str, namespace: str = "", **labels: str) -> Manifest:
    both = {REMOTE_LABEL: remote, MANAGED_LABEL: MANAGER}
    both |= {f"liqo.io/{key.replace('_', '-')}": value for key, value in labels.items()}
    found: Manifest = {"name": name, "labels": both}
    return found | ({"namespace": namespace} if namespace else {})


def namespace_manifest(remote: str, *, provider: str = "", requester: str = "") -> Manifest:
    """Records whose Liqo cluster ID this is, and what for: also without an Identity or a Tenant."""
    metadata = _metadata(tenant_namespace(remote), remote, tenant_namespace="true")
    named = {CLUSTER_ANNOTATION: provider, REQUESTER_ANNOTATION: requester}
    return {"metadata": metadata | {"annotations": {key: one for key, one in named.items() if one}}}


def nonce_manifest(remote: str) -> Manifest:
    """Provider: Liqo fills in the nonce."""
    namespace = tenant_namespace(remote)
    return {"metadata": _metadata("liqo-nonce", remote, namespace, nonce="true")}


def signed_nonce_manifest(remote: str, nonce: str) -> Manifest:
    """Requester: Liqo adds the signature."""
    metadata = _metadata("liqo-signed-nonce", remote, tenant_namespace(remote), signed_nonce="true")
    return {"metadata": metadata, "data": {"nonce": nonce}}


def tenant_manifest(cluster: str, requester: bodies.Handshake) -> Manifest:
    """Provider: admits a requester. Liqo verifies the signed nonce and issues the certificate."""
    remote = requester.cluster_id
    metadata = _metadata(remote, remote, tenant_namespace(remote))
    return {
        "metadata": metadata | {"annotations": {CLUSTER_ANNOTATION: cluster}},
        "spec": {
            "clusterID": remote,
            "publicKey": requester.public_key,
            "csr": requester.csr,
            "signature": requester.signed_nonce,
        },
    }


def identity_manifest(cluster: str, provider: bodies.Handshake) -> Manifest:
    """Requester: its identity in the provider's cluster."""
    remote = provider.cluster_id
    metadata = _metadata(f"controlplane-{remote}", remote, tenant_namespace(remote))
    parameters = {
        "ca": provider.ca,
        "signedCRT": provider.certificate,
        "apiServer": provider.api_server,
    }
    if provider.proxy_url:
        parameters["proxyURL"] = provider.proxy_url
    return {
        "metadata": metadata | {"annotations": {CLUSTER_ANNOTATION: cluster}},
        "spec": {
            "clusterID": remote,
            "type": "ControlPlane",
            "authParams": parameters,
            "namespace": provider.tenant_namespace,
        },
    }


def slice_name(reservation: str, taken: Container[str]) -> str:
    """The reservation's ID, or with a number if that is taken: after a move by the previous provider's node.

    A label of at most 63 characters is made of it. If there is no room for a number, the previous one has to
    go first.
    """
    numbered = (f"{reservation}.{number}" for number in range(2, 100))
    free = (name for name in (reservation, *numbered) if name not in taken)
    name = next(free, reservation)
    return name if len(name) <= MAX_LABEL_LENGTH else reservation


def reservation_of(found: LiqoResource) -> str:
    """The reservation of a slice, a node or a lease, by its name."""
    return found.metadata.name.partition(".")[0]


def slice_manifest(peer: Peer, remote: str, grant: str, name: str = "") -> Manifest:
    """Requester: asks the provider for the reserved amounts, with the broker's grant as evidence."""
    name, namespace = name or peer.reservation, tenant_namespace(remote)
    metadata = _metadata(name, remote, namespace, replication="true", remoteID=remote)
    metadata["labels"][RESERVATION_LABEL] = peer.reservation
    annotations = {"liqo.io/create-virtual-node": "true", GRANT_ANNOTATION: grant}
    if peer.namespaces:
        annotations[NAMESPACES_ANNOTATION] = ",".join(peer.namespaces)
    return {
        "metadata": metadata | {"annotations": annotations},
        "spec": {
            "class": SLICE_CLASS,
            "providerClusterID": remote,
            "resources": slice_amounts(peer.resources),
        },
    }


def is_requested(found: LiqoResource, peer: Peer) -> bool:
    """Whether a slice asks for what is reserved, with the namespaces of its request."""
    is_sized: bool = found.spec["resources"] == slice_amounts(peer.resources)
    return is_sized and offloaded_namespaces(found) >= {*peer.namespaces}


def is_denied(found: LiqoResource) -> bool:
    """Whether the provider has denied a slice."""
    conditions = found.status.get("conditions") or []
    return any(
        (one.get("type"), one.get("status")) == ("Resources", "Denied") for one in conditions
    )


def offloaded_namespaces(found: LiqoResource) -> set[str]:
    """The namespaces that a slice of ours names."""
    return set(filter(None, found.metadata.annotations.get(NAMESPACES_ANNOTATION, "").split(",")))


def offloading_manifest(namespace: str) -> Manifest:
    """Lets pods of a namespace be scheduled onto nodes of our reservations, and onto local ones as before.

    A selector of single reservations would be narrower, but Liqo selects clusters by it, and would remove the
    namespace from a provider with another node that does not match.
    """
    term = {"matchExpressions": [{"key": RESERVATION_LABEL, "operator": "Exists"}]}
    labels = {MANAGED_LABEL: MANAGER}
    return {
        "metadata": {"name": OFFLOADING_NAME, "namespace": namespace, "labels": labels},
        "spec": {
            "namespaceMappingStrategy": "DefaultName",
            "podOffloadingStrategy": "LocalAndRemote",
            "clusterSelector": {"nodeSelectorTerms": [term]},
        },
    }


def slice_amounts(wanted: Resources) -> dict[str, str]:
    """The amounts of a slice. All of these keys are needed for a usable node."""
    return {"ephemeral-storage": "0", "pods": MAX_PODS, **liqo_quantities(wanted)}


def parse_amounts(texts: Mapping[str, Any]) -> Resources:
    """The amounts of a slice or a node; `InvalidInput` if one is not a quantity. Pods do not count."""
    named = {_KUBELEND_NAMES.get(name, name): str(text) for name, text in texts.items()}
    named.pop("pods", None)
    return resources.parse_offered(named)


def handshake_parameters(tenant: LiqoResource) -> bodies.Handshake | None:
    """Provider: what the requester needs for its identity; None until Liqo has issued it."""
    parameters = tenant.status.get("authParams") or {}
    if not parameters.get("signedCRT"):
        return None
    return bodies.Handshake(
        "",
        certificate=parameters["signedCRT"],
        ca=parameters.get("ca", ""),
        api_server=parameters["apiServer"],
        proxy_url=parameters.get("proxyURL", ""),
        tenant_namespace=tenant.status.get("tenantNamespace", tenant.metadata.namespace),
    )


def peering_problem(foreign: LiqoResource | None) -> str:
    """Why the provider cannot be used, from its ForeignCluster; empty if it can.

    It stays after a peering has been removed, so that its existence says nothing. Liqo asks the API server
    two seconds after the handshake for the first time: until then the node tells whether it responds.
    """
    if foreign is None:
        return "Liqo has not created a ForeignCluster yet"
    if foreign.status.get("role") not in ("Provider", "ConsumerAndProvider"):
        return "Liqo does not know the cluster as a provider yet"
    authentication = foreign.status.get("modules", {}).get("authentication", {})
    wanted: dict[str, Any] = {
        "AuthIdentityControlPlaneStatus": (("Ready",), authentication.get("conditions") or []),
        "APIServerStatus": (("Established", None), foreign.status.get("conditions") or []),
    }
    for kind, (expected, conditions) in wanted.items():
        found: Manifest = next((one for one in conditions if one.get("type") == kind), {})
        if found.get("status") not in expected:
            reason = found.get("message") or found.get("status") or "not reported yet"
            return f"{kind}: {reason}"
    return ""


def unreachable_since(foreign: LiqoResource | None) -> datetime | None:
    """When the provider's API server stopped responding; None if it responds, or that is not known."""
    conditions = [] if foreign is None else foreign.status.get("conditions") or []
    for one in conditions:
        if one.get("type") == "APIServerStatus" and one.get("status") == "Error":
            with contextlib.suppress(msgspec.ValidationError):
                return msgspec.convert(one.get("lastTransitionTime"), datetime)
    return None


def has_lost_kubelet(node: LiqoResource) -> bool:
    """Whether the node's heartbeats have ended: a kubelet that runs reports True or False."""
    conditions = node.status.get("conditions") or []
    return any(one.get("type") == "Ready" and one.get("status") == "Unknown" for one in conditions)


def is_pod_of_slice(shadow: LiqoResource, name: str) -> bool:
    """Whether the identity of this slice has created it: the slice's name and a hash of the consumer's ID."""
    return shadow.metadata.labels.get(CREATOR_LABEL, "").rpartition("-")[0] == name


def kubelend_cluster(found: LiqoResource) -> str:
    """The broker's ID of the cluster that an Identity or a Tenant is about; empty if it is not ours."""
    return found.metadata.annotations.get(CLUSTER_ANNOTATION, "")


def readiness(found: LiqoResource | None, node: LiqoResource | None, peer: Peer) -> Readiness:
    """Whether all of the reserved resources can be used."""
    return slice_readiness(
        [
            _as_object(kind, one)
            for kind, one in (("ResourceSlice", found), ("Node", node))
            if one is not None
        ],
        peer,
    )


def _as_object(kind: str, found: LiqoResource) -> LiqoObject:
    stamp = "now" if found.is_being_deleted else None
    status = msgspec.convert(found.status, LiqoStatus)
    return LiqoObject(kind, LiqoMetadata(found.metadata.name, stamp), status)
