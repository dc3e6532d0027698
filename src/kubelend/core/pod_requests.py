"""Projections of Node and Pod, and effective pod requests as kube-scheduler computes them.

The source of a real cluster decodes a Pod into `KubernetesPod`, which has only the fields needed
here, and caches the small `Pod` that `project_pod` makes of it.

The rules are those of Kubernetes 1.36. Where releases differ the larger amount is taken, because a
cluster must not offer what its own scheduler considers allocated: an allocation counts even before
the container's resources are reported, and a resize in progress counts at its largest per
container.

Amounts are summed in billionths, the precision of Kubernetes quantities, and rounded up once at the
end: ten containers of "100u" use one thousandth of a core and not ten.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from kubelend.core import errors, resources
from kubelend.core.quantities import MAX_AMOUNT, PARSE_CACHE_SIZE, Quantity
from kubelend.core.resources import NOTHING, Resources


class OffloadedFrom(NamedTuple):
    """The origin of a pod that another cluster offloaded here."""

    origin: str
    """Liqo's ID of the consumer's cluster (`offloading.liqo.io/origin`), which may differ from that at the
    broker. `BY_RESERVATION` if Liqo has authenticated that the pod belongs to the reservation.
    """
    virtual_node: str
    """The reservation, after which the consumer's virtual node is named: `offloading.liqo.io/nodename`."""


BY_RESERVATION: Final = "*"


class PodScheduling(NamedTuple):
    """What the scheduler and the agent know of a pod that holds lent resources or uses them."""

    namespace: str
    name: str
    is_gated: bool = False
    """Whether only our own gate keeps it from the scheduler."""
    is_deleting: bool = False
    is_unschedulable: bool = False
    """Whether the scheduler's last attempt failed."""
    nominated_node: str = ""
    """The node for which the scheduler reserves room for it."""
    required_node: str = ""
    """The only node that its affinity allows; empty for any."""


class Pod(msgspec.Struct, frozen=True, gc=False):
    """The projection of a Pod."""

    id: str
    """The UID: a recreated pod with the same name is another pod."""
    node: str = ""
    """Empty until it is scheduled."""
    requests: Resources = NOTHING
    """Effective requests by the scheduler's rules."""
    is_finished: bool = False
    offloaded_from: OffloadedFrom | None = None
    placeholder_for: str = ""
    """The reservation that a placeholder holds; empty for all other pods."""
    scheduling: PodScheduling | None = None
    """Only of placeholders and offloaded pods: other pods take no memory for it."""


class PartialObject(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Some fields of an object; unknown fields are ignored."""


QuantityTexts = dict[str, str]
"""Kubernetes quantities by resource name."""


class Requirements(PartialObject, frozen=True, gc=False):
    requests: QuantityTexts = {}


class Container(PartialObject, frozen=True, gc=False):
    name: str = ""
    restart_policy: str = ""
    """For an init container: "Always" makes it a sidecar."""
    resources: Requirements = Requirements()


class NodeSelectorField(PartialObject, frozen=True, gc=False):
    key: str = ""
    values: tuple[str, ...] = ()


class NodeSelectorTerm(PartialObject, frozen=True, gc=False):
    match_fields: tuple[NodeSelectorField, ...] = ()


class NodeSelector(PartialObject, frozen=True, gc=False):
    node_selector_terms: tuple[NodeSelectorTerm, ...] = ()


class NodeAffinity(PartialObject, frozen=True, gc=False):
    required: NodeSelector | None = msgspec.field(
        default=None, name="requiredDuringSchedulingIgnoredDuringExecution"
    )


class Affinity(PartialObject, frozen=True, gc=False):
    node_affinity: NodeAffinity | None = None


class SchedulingGate(PartialObject, frozen=True, gc=False):
    name: str = ""


class PodSpec(PartialObject, frozen=True, gc=False):
    node_name: str = ""
    priority_class_name: str = ""
    scheduling_gates: tuple[SchedulingGate, ...] = ()
    affinity: Affinity | None = None
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    overhead: QuantityTexts = {}
    resources: Requirements = Requirements()


class ContainerStatus(PartialObject, frozen=True, gc=False):
    name: str = ""
    resources: Requirements | None = None
    """Resources the container runs with; None if the node has not reported them."""
    allocated_resources: QuantityTexts = {}
    """Resources the node has allocated to the container."""


class PodCondition(PartialObject, frozen=True, gc=False):
    type: str = ""
    reason: str = ""


class PodStatus(PartialObject, frozen=True, gc=False):
    phase: str = ""
    nominated_node_name: str = ""
    resize: str = ""
    """Until 1.32; replaced by the condition `PodResizePending`."""
    conditions: tuple[PodCondition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    resources: Requirements | None = None
    """As in `ContainerStatus`, for the whole pod; likewise the next field."""
    allocated_resources: QuantityTexts = {}


class PodMetadata(PartialObject, frozen=True, gc=False):
    uid: str
    name: str
    namespace: str = ""
    labels: QuantityTexts = {}
    deletion_timestamp: str = ""


class KubernetesPod(PartialObject, frozen=True, gc=False):
    """The fields of a Kubernetes Pod that are decoded."""

    metadata: PodMetadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


def project_pod(found: KubernetesPod) -> Pod:
    """Projects a Pod; raises `InvalidInput` as `effective_requests`."""
    is_finished = found.status.phase in ("Succeeded", "Failed")
    offloaded_from = _offloaded_from(found.metadata.labels)
    placeholder_for = _placeholder_for(found)
    has_scheduling = offloaded_from is not None or bool(placeholder_for)
    return Pod(
        id=found.metadata.uid,
        node=sys.intern(found.spec.node_name),
        requests=NOTHING if is_finished else effective_requests(found),
        is_finished=is_finished,
        offloaded_from=offloaded_from,
        placeholder_for=placeholder_for,
        scheduling=_scheduling(found) if has_scheduling else None,
    )


HOLD_GATE: Final = "kubelend.io/held"
"""Scheduling gate of requesters' pods until held resources are handed over to them."""
RESERVATION_LABEL: Final = "kubelend.io/reservation"
HOLD_CLASS_PREFIX: Final = "kubelend-hold"
"""Priority classes of placeholders. Only the agent may use them, so a label alone hides no pod."""
NODE_NAME_FIELD: Final = "metadata.name"


def _placeholder_for(found: KubernetesPod) -> str:
    is_placeholder = found.spec.priority_class_name.startswith(HOLD_CLASS_PREFIX)
    return found.metadata.labels.get(RESERVATION_LABEL, "") if is_placeholder else ""


def _scheduling(found: KubernetesPod) -> PodScheduling:
    spec, status = found.spec, found.status
    return PodScheduling(
        namespace=found.metadata.namespace,
        name=found.metadata.name,
        is_gated=[gate.name for gate in spec.scheduling_gates] == [HOLD_GATE],
        is_deleting=bool(found.metadata.deletion_timestamp),
        is_unschedulable=any(
            one.type == "PodScheduled" and one.reason == "Unschedulable"
            for one in status.conditions
        ),
        nominated_node=status.nominated_node_name,
        required_node=_required_node(spec.affinity),
    )


def _required_node(affinity: Affinity | None) -> str:
    node_affinity = None if affinity is None else affinity.node_affinity
    if node_affinity is None or node_affinity.required is None:
        return ""
    terms = node_affinity.required.node_selector_terms
    fields = [field for term in terms for field in term.match_fields]
    names = [field.values for field in fields if field.key == NODE_NAME_FIELD]
    return names[0][0] if len(names) == 1 and len(names[0]) == 1 else ""


def effective_requests(found: KubernetesPod) -> Resources:
    """Effective requests of a pod, scheduled or not.

    `InvalidInput` names the pod and the resource whose quantity is invalid or out of range. The API
    server admits none of the former and no node fits the latter, so the pod can be skipped, but it
    should be logged.
    """
    try:
        total = _containers_requests(found)
        total.update(_pod_level_requests(found))
        _add_to(total, _parse_nanos(found.spec.overhead))
        return _cached_resources(
            tuple(sorted((name, _round_up(name, n)) for name, n in total.items() if n))
        )
    except errors.InvalidInput as error:
        whose = f"pod {found.metadata.namespace}/{found.metadata.name}"
        raise type(error)(f"{whose}: {error.message}", hint=error.hint) from None


Nanos = dict[str, int]
"""Billionths of a core, byte or device by resource name."""

_RESOURCE_NAMES: Final = {"ephemeral-storage": "storage"}
_MANAGED_BY, _SHADOW_POD = "liqo.io/managed-by", "shadowpod"
_ORIGIN: Final = "offloading.liqo.io/origin"
_CREATOR: Final = "liqo.io/creator-user"
"""Set by Liqo's webhook: the identity of the ResourceSlice, which is its name and a hash."""
_RESERVATION_PREFIX: Final = "rsv-"
VIRTUAL_NODE_LABEL: Final = "offloading.liqo.io/nodename"


def _containers_requests(found: KubernetesPod) -> Nanos:
    """Init containers run in sequence, each beside the sidecars started before it; then the
    containers run beside all sidecars. The effective request is the maximum over time.
    """
    status, is_infeasible = found.status, _is_infeasible(found.status)
    known = {one.name: one for one in (*status.container_statuses, *status.init_container_statuses)}
    running: Nanos = {}
    most: Nanos = {}
    for container in found.spec.init_containers:
        if container.restart_policy == "Always":
            _add_to(
                running, _container_requests(container, known.get(container.name), is_infeasible)
            )
        else:
            starting = _parse_nanos(container.resources.requests)
            _add_to(starting, running)
            _raise_to(most, starting)
    for container in found.spec.containers:
        _add_to(running, _container_requests(container, known.get(container.name), is_infeasible))
    _raise_to(most, running)
    return most


def _container_requests(
    container: Container, status: ContainerStatus | None, is_infeasible: bool
) -> Nanos:
    """The largest of requested, actual and allocated resources during a resize.

    An infeasible resize does not count as requested.
    """
    wanted = container.resources.requests
    if status is None:
        return _parse_nanos(wanted)
    if status.resources is None:
        return _elementwise_max((wanted, status.allocated_resources))
    actual = (status.resources.requests, status.allocated_resources)
    return _elementwise_max(actual if is_infeasible else (wanted, *actual))


def _pod_level_requests(found: KubernetesPod) -> Nanos:
    """Pod-level requests, which replace the sum of the containers' requests.

    The status includes the overhead since 1.36, and the scheduler adds the overhead all the same.
    """
    wanted = Container(resources=found.spec.resources)
    actual = ContainerStatus("", found.status.resources, found.status.allocated_resources)
    effective = _container_requests(wanted, actual, _is_infeasible(found.status))
    named = filter(_is_pod_level, found.spec.resources.requests)
    return {name: effective.get(name, 0) for name in named}


def _is_pod_level(name: str) -> bool:
    return name in ("cpu", "memory") or name.startswith("hugepages-")


def _is_infeasible(status: PodStatus) -> bool:
    pending = (one.reason for one in status.conditions if one.type == "PodResizePending")
    return next(pending, status.resize) == "Infeasible"


def _elementwise_max(lists: Iterable[QuantityTexts]) -> Nanos:
    most: Nanos = {}
    for texts in lists:
        _raise_to(most, _parse_nanos(texts))
    return most


def _parse_nanos(texts: QuantityTexts) -> Nanos:
    name = ""
    try:
        amounts: Nanos = {}
        for name, text in texts.items():
            _add_to(amounts, {_RESOURCE_NAMES.get(name, name): _parse_nano(text)})
        return amounts
    except errors.InvalidInput as error:
        raise type(error)(f"{name}: {error.message}", hint=error.hint) from None


@functools.lru_cache(maxsize=PARSE_CACHE_SIZE)
def _parse_nano(text: str) -> int:
    amount = Quantity.parse(text).rounded_up(9)
    if amount < 0:
        raise errors.InvalidQuantity(f"{text!r} is negative", hint="write zero or more")
    return amount


def _round_up(name: str, nanos: int) -> int:
    unit = 10**6 if name == "cpu" else 10**9
    amount = -(-nanos // unit)
    if amount > MAX_AMOUNT:
        raise errors.InvalidQuantity(f"{name}: is out of range", hint="request less")
    return amount


def _add_to(total: Nanos, more: Nanos) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, 0) + amount


def _raise_to(most: Nanos, others: Nanos) -> None:
    for name, amount in others.items():
        most[name] = max(most.get(name, 0), amount)


# Pods of one Deployment have equal requests and share one record.
@functools.lru_cache(maxsize=PARSE_CACHE_SIZE)
def _cached_resources(amounts: tuple[tuple[str, int], ...]) -> Resources:
    return Resources.of(dict(amounts))


def _offloaded_from(labels: QuantityTexts) -> OffloadedFrom | None:
    """The origin of an offloaded pod, from the labels that Liqo sets."""
    if labels.get(_MANAGED_BY) != _SHADOW_POD or not labels.get(_ORIGIN):
        return None
    # After a move between providers, a node has a number after the name: `rsv-rome-1.2`.
    node = labels.get(VIRTUAL_NODE_LABEL, "")
    is_authenticated = labels.get(_CREATOR, "").rpartition("-")[0] == node
    is_reservation = node.startswith(_RESERVATION_PREFIX)
    origin = BY_RESERVATION if is_authenticated and is_reservation else labels[_ORIGIN]
    return _cached_offloaded_from(origin, node.partition(".")[0])


_cached_offloaded_from = functools.lru_cache(maxsize=PARSE_CACHE_SIZE)(OffloadedFrom)


class Node(msgspec.Struct, frozen=True, gc=False):
    """The projection of a Node."""

    name: str
    capacity: Resources = NOTHING
    allocatable: Resources = NOTHING
    labels: dict[str, str] = {}
    is_ready: bool = True
    is_schedulable: bool = True
    is_tainted: bool = False
    """Whether pods need a toleration to be scheduled on it."""


class NodeMetadata(PartialObject, frozen=True, gc=False):
    name: str
    labels: dict[str, str] = {}


class Taint(PartialObject, frozen=True, gc=False):
    key: str = ""
    effect: str = ""

    @property
    def keeps_pods_away(self) -> bool:
        """Taints that repeat what is read from the node itself do not count: they come and go later."""
        return self.effect in ("NoSchedule", "NoExecute") and self.key not in _REPEATED_TAINTS


_REPEATED_TAINTS: Final = frozenset(
    f"node.kubernetes.io/{state}" for state in ("not-ready", "unreachable", "unschedulable")
)


class NodeSpec(PartialObject, frozen=True, gc=False):
    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class NodeCondition(PartialObject, frozen=True, gc=False):
    type: str = ""
    status: str = ""


class NodeStatus(PartialObject, frozen=True, gc=False):
    conditions: tuple[NodeCondition, ...] = ()
    capacity: dict[str, str] = {}
    allocatable: dict[str, str] = {}


class KubernetesNode(PartialObject, frozen=True, gc=False):
    """The fields of a Kubernetes Node that are decoded."""

    metadata: NodeMetadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


def project_node(found: KubernetesNode) -> Node:
    """Projects a Node; raises `InvalidInput` that names the node and the invalid quantity."""
    where = f"node {found.metadata.name}: status"
    labels = found.metadata.labels
    return Node(
        name=found.metadata.name,
        capacity=_node_amounts(found.status.capacity, f"{where}.capacity"),
        allocatable=_node_amounts(found.status.allocatable, f"{where}.allocatable"),
        labels={name: labels[name] for name in _VIRTUAL_NODE_LABELS if name in labels},
        is_ready=any(
            one.type == "Ready" and one.status == "True" for one in found.status.conditions
        ),
        is_schedulable=not found.spec.unschedulable,
        is_tainted=any(one.keeps_pods_away for one in found.spec.taints),
    )


def counts_as_capacity(node: Node) -> bool:
    """Whether the node counts as capacity: ready, schedulable without a toleration, and not virtual.

    Requesters' pods tolerate no taints of this cluster, so tainted nodes hold nothing for them. A virtual
    node represents another cluster: borrowed capacity must not be lent again.
    """
    labels = node.labels
    is_virtual = _LIQO_TYPE_LABEL in labels or _VIRTUAL_KUBELET_LABEL in labels
    is_virtual = is_virtual or labels.get(_TYPE_LABEL) == "virtual-kubelet"
    return node.is_ready and node.is_schedulable and not node.is_tainted and not is_virtual


_LIQO_TYPE_LABEL: Final = "liqo.io/type"
_TYPE_LABEL: Final = "type"
_VIRTUAL_KUBELET_LABEL: Final = "virtual-kubelet.io/provider"
_VIRTUAL_NODE_LABELS: Final = (_LIQO_TYPE_LABEL, _TYPE_LABEL, _VIRTUAL_KUBELET_LABEL)


def _node_amounts(texts: dict[str, str], where: str) -> Resources:
    # Pods consume these without requests, so the free amount is unknown and cannot be lent.
    names = (n for n in texts if n != "pods" and not n.startswith("attachable-volumes-"))
    return resources.parse_offered({_RESOURCE_NAMES.get(n, n): texts[n] for n in names}, where)
