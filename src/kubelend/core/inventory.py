"""Inventory of the local cluster: capacity, usage by pods, and holds for other clusters.

The collector applies changes; the publisher and the provider read totals. All sums are incremental,
so a pod change costs the same for any number of pods and nodes.

Pods offloaded here by other clusters are both usage and held resources, and must not count twice. A
hold is set aside for one reservation, and the larger of held and used counts: max(held, used). The
pods of a hold are those of its requester on the virtual node with the reservation's name. Offloaded
pods on another virtual node may belong to any other hold of their cluster, so these are compared as
sums.

Placeholders keep room on nodes for a hold. The hold itself is counted, so they are not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from kubelend.core import pod_requests
from kubelend.core.pod_requests import BY_RESERVATION, Node, OffloadedFrom, Pod
from kubelend.core.resources import NOTHING, Resources


class Hold(NamedTuple):
    """Resources held for a reservation."""

    requester: str
    resources: Resources

    def is_of(self, origin: str) -> bool:
        """Whether pods of this origin, on the virtual node of the reservation, belong to it."""
        return origin in (self.requester, BY_RESERVATION)


class Totals(msgspec.Struct, frozen=True):
    """Sums over the nodes that count as capacity: ready, schedulable and not virtual."""

    capacity: Resources
    allocatable: Resources
    allocated: Resources
    """Usage beyond the holds; the broker subtracts the reserved amounts itself."""
    pending: Resources
    """Requests of unfinished pods without a node. Not part of `allocated`."""
    largest: Resources
    """The largest free amount on a single node, per resource; of holds only placeholders count."""
    free: Resources
    """As `Inventory.free`: negative if more is held than available."""
    nodes: int
    pods: int
    """Number of unfinished pods on these nodes."""


class Inventory:
    """Nodes, pods and holds of the local cluster, and their sums."""

    def __init__(self) -> None:
        self.is_synced = False
        """Whether the first list is complete; before that the totals are unknown, not zero."""
        self._nodes: dict[str, Node] = {}
        """Only nodes that count as capacity."""
        self._pods: dict[str, Pod] = {}
        """Unfinished pods on any node or none."""
        self._use: dict[str, _NodeUse] = {}
        """By node name, including nodes that do not count or are unknown; "" for no node."""
        self._total_use = _NodeUse()
        """The sum over nodes that count as capacity."""
        self._holds: dict[str, Hold] = {}
        self._scheduled: dict[str, Pod] = {}
        """The pods with `scheduling`: placeholders and offloaded pods."""

    def reset(self, nodes: Iterable[Node], pods: Iterable[Pod]) -> None:
        """Replaces all nodes and pods; holds stay."""
        self._nodes, self._pods, self._use, self._total_use = {}, {}, {}, _NodeUse()
        self._scheduled = {}
        self.is_synced = True
        for node in nodes:
            self.put_node(node)
        for pod in pods:
            self.put_pod(pod)

    def put_node(self, node: Node) -> None:
        """Adds or updates a node."""
        known = self._nodes.get(node.name)
        if not pod_requests.counts_as_capacity(node):
            self.delete_node(node.name)
        elif known != node:
            self._nodes[node.name] = node
            if known is None and node.name in self._use:
                self._total_use.include(self._use[node.name])

    def delete_node(self, name: str) -> None:
        """Deletes a node. Pods still assigned to it no longer count."""
        if self._nodes.pop(name, None) is not None and name in self._use:
            self._total_use.exclude(self._use[name])

    def put_pod(self, pod: Pod) -> None:
        """Adds or updates a pod. Its node may be unknown yet."""
        if pod.is_finished:
            self.delete_pod(pod.id)
        elif self._pods.get(pod.id) != pod:
            self.delete_pod(pod.id)
            self._pods[pod.id] = pod
            if pod.scheduling is not None:
                self._scheduled[pod.id] = pod
            use = _NodeUse.of(pod)
            self._use.setdefault(pod.node, _NodeUse()).include(use)
            if pod.node in self._nodes:
                self._total_use.include(use)

    def delete_pod(self, id: str) -> None:
        pod = self._pods.pop(id, None)
        if pod is None:
            return
        self._scheduled.pop(id, None)
        use = _NodeUse.of(pod)
        self._use[pod.node].exclude(use)
        if not self._use[pod.node].pods:
            del self._use[pod.node]
        if pod.node in self._nodes:
            self._total_use.exclude(use)

    def put_hold(self, reservation: str, hold: Hold) -> None:
        self._holds[reservation] = hold

    def delete_hold(self, reservation: str) -> None:
        self._holds.pop(reservation, None)

    @property
    def holds(self) -> Mapping[str, Hold]:
        return MappingProxyType(self._holds)

    @property
    def scheduled(self) -> Mapping[str, Pod]:
        """Placeholders and offloaded pods by ID, with a node or without."""
        return MappingProxyType(self._scheduled)

    def free_by_node(self) -> dict[str, Resources]:
        """What no pod takes, placeholders included, per node that counts as capacity."""
        return dict(self._free_per_node())

    def totals(self) -> Totals:
        unscheduled = self._use.get("")
        return Totals(
            capacity=sum((node.capacity for node in self._nodes.values()), NOTHING),
            allocatable=self._allocatable(),
            allocated=self._allocated(),
            pending=NOTHING if unscheduled is None else unscheduled.amounts,
            largest=functools.reduce(
                Resources.elementwise_max, (free for _, free in self._free_per_node()), NOTHING
            ),
            free=self.free(),
            nodes=len(self._nodes),
            pods=self._total_use.pods,
        )

    def free(self, without: str = "") -> Resources:
        """Resources neither used nor held; negative if overcommitted.

        `without` is a reservation whose own hold counts as free, to check whether it still fits.
        Offloaded pods that may belong to it or to another hold do not count against it.
        """
        held = sum((hold.resources for hold in self._holds.values()), NOTHING)
        return self._allocatable() - self._allocated() - held + self._effective_hold(without)

    def _effective_hold(self, reservation: str) -> Resources:
        hold = self._holds.get(reservation)
        if hold is None:
            return NOTHING
        return hold.resources.elementwise_max(self._offloaded(reservation, hold) or NOTHING)

    def _offloaded(self, reservation: str, hold: Hold) -> Resources | None:
        """What the pods of a hold use; None without any."""
        origins = (hold.requester, BY_RESERVATION)
        known = (self._total_use.offloaded.get(OffloadedFrom(one, reservation)) for one in origins)
        found = [one.amounts for one in known if one is not None]
        return sum(found, NOTHING) if found else None

    def _allocatable(self) -> Resources:
        return sum((node.allocatable for node in self._nodes.values()), NOTHING)

    def _allocated(self) -> Resources:
        own = self._total_use.amounts
        offloaded = sum((one.amounts for one in self._total_use.offloaded.values()), NOTHING)
        beyond = sum(((used - held).clamped() for held, used in self._held_and_used()), NOTHING)
        return own - offloaded + beyond

    def _held_and_used(self) -> Iterator[tuple[Resources, Resources]]:
        """Pairs of held and used resources that belong together."""
        held: dict[str, Resources] = {}
        used: dict[str, Resources] = {}
        for reservation, hold in self._holds.items():
            own = self._offloaded(reservation, hold)
            if own is None:
                held[hold.requester] = held.get(hold.requester, NOTHING) + hold.resources
            else:
                yield hold.resources, own
        for source, offloaded in self._total_use.offloaded.items():
            hold_there = self._holds.get(source.virtual_node)
            if hold_there is None or not hold_there.is_of(source.origin):
                used[source.origin] = used.get(source.origin, NOTHING) + offloaded.amounts
        for origin in held.keys() | used.keys():
            yield held.get(origin, NOTHING), used.get(origin, NOTHING)

    def _free_per_node(self) -> Iterator[tuple[str, Resources]]:
        for name, node in self._nodes.items():
            use = self._use.get(name)
            taken = NOTHING if use is None else use.amounts + use.placeholders
            yield name, node.allocatable - taken


class _PodSum:
    """Number of pods and the sum of their requests."""

    __slots__ = ("amounts", "pods")

    def __init__(self, amounts: Resources = NOTHING, pods: int = 0) -> None:
        self.amounts = amounts
        self.pods = pods

    def add(self, other: _PodSum) -> None:
        self.amounts += other.amounts
        self.pods += other.pods

    def subtract(self, other: _PodSum) -> None:
        self.amounts -= other.amounts
        self.pods -= other.pods


class _NodeUse(_PodSum):
    """The same without placeholders, and their sum; with separate sums per group of offloaded pods."""

    __slots__ = ("offloaded", "placeholders")

    def __init__(self) -> None:
        super().__init__()
        self.placeholders = NOTHING
        self.offloaded: dict[OffloadedFrom, _PodSum] = {}

    @classmethod
    def of(cls, pod: Pod) -> _NodeUse:
        use = cls()
        use.pods = 1
        if pod.placeholder_for:
            use.placeholders = pod.requests
        else:
            use.amounts = pod.requests
        if pod.offloaded_from is not None:
            use.offloaded[pod.offloaded_from] = _PodSum(pod.requests, 1)
        return use

    def include(self, other: _NodeUse) -> None:
        self.add(other)
        self.placeholders += other.placeholders
        for source, offloaded in other.offloaded.items():
            self.offloaded.setdefault(source, _PodSum()).add(offloaded)

    def exclude(self, other: _NodeUse) -> None:
        self.subtract(other)
        self.placeholders -= other.placeholders
        for source, offloaded in other.offloaded.items():
            self.offloaded[source].subtract(offloaded)
            if not self.offloaded[source].pods:
                del self.offloaded[source]
