"""What a cluster has, what its pods use of it, and what it has promised to others.

The collector feeds it one change after the other; the publisher and the provider read it. Every sum
follows the changes, so that one pod's costs the same however many pods and nodes there are.

Pods that other clusters run here are use and promise at once, and must not count twice. A hold is
what is set aside for one reservation, and of each only the larger counts: max(reserved, used). Its
guests are those of its requester which run on a virtual node of its name. Guests under another name
may belong to any of their cluster's other holds, hence these and those are compared as sums.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from kubelend.core import nodes
from kubelend.core.nodes import Node
from kubelend.core.pods import Guest, Pod
from kubelend.core.resources import NOTHING, Resources


class Hold(NamedTuple):
    """What is set aside for a reservation."""

    requester: str
    resources: Resources


class Totals(msgspec.Struct, frozen=True):
    """The sums over all nodes that count: ready, schedulable, and of this cluster."""

    capacity: Resources
    allocatable: Resources
    allocated: Resources
    """What is used beyond the holds: the broker, which is told this, knows what it has reserved."""
    pending: Resources
    """What unfinished pods ask for that are on no node yet. It is no part of `allocated`."""
    largest: Resources
    """The most that is free on one node, of each resource by itself; holds are on no node."""
    free: Resources
    """As `Inventory.free`: below zero where more is promised than there is."""
    nodes: int
    pods: int
    """The unfinished ones on these nodes."""


class Inventory:
    """The nodes, pods and holds of one cluster, and their sums."""

    def __init__(self) -> None:
        self.is_measured = False
        """Whether anybody has looked yet: before that nothing is known, which is not to have nothing."""
        self._nodes: dict[str, Node] = {}
        """Only those that count."""
        self._pods: dict[str, Pod] = {}
        """Only unfinished ones, wherever they are."""
        self._use: dict[str, _Use] = {}
        """By the node's name, also of nodes that do not count or are not known; "" for no node."""
        self._own = _Use()
        """The sum over the nodes that count."""
        self._holds: dict[str, Hold] = {}

    def reset(self, nodes: Iterable[Node], pods: Iterable[Pod]) -> None:
        """Only these are there, whatever was known; holds stay."""
        self._nodes, self._pods, self._use, self._own = {}, {}, {}, _Use()
        self.is_measured = True
        for node in nodes:
            self.put_node(node)
        for pod in pods:
            self.put_pod(pod)

    def put_node(self, node: Node) -> None:
        """It is new, or otherwise than before."""
        known = self._nodes.get(node.name)
        if not nodes.is_own(node):
            self.drop_node(node.name)
        elif known != node:
            self._nodes[node.name] = node
            if known is None and node.name in self._use:
                self._own.include(self._use[node.name])

    def drop_node(self, name: str) -> None:
        """It is gone. Pods that are still said to be on it count nowhere."""
        if self._nodes.pop(name, None) is not None and name in self._use:
            self._own.exclude(self._use[name])

    def put_pod(self, pod: Pod) -> None:
        """It is new, or otherwise than before. Its node may be yet unknown."""
        if pod.is_finished:
            self.drop_pod(pod.id)
        elif self._pods.get(pod.id) != pod:
            self.drop_pod(pod.id)
            self._pods[pod.id] = pod
            use = _Use.of(pod)
            self._use.setdefault(pod.node, _Use()).include(use)
            if pod.node in self._nodes:
                self._own.include(use)

    def drop_pod(self, id: str) -> None:
        """It is gone."""
        pod = self._pods.pop(id, None)
        if pod is None:
            return
        use = _Use.of(pod)
        self._use[pod.node].exclude(use)
        if not self._use[pod.node].pods:
            del self._use[pod.node]
        if pod.node in self._nodes:
            self._own.exclude(use)

    def put_hold(self, reservation: str, hold: Hold) -> None:
        self._holds[reservation] = hold

    def drop_hold(self, reservation: str) -> None:
        self._holds.pop(reservation, None)

    @property
    def holds(self) -> Mapping[str, Hold]:
        return MappingProxyType(self._holds)

    def totals(self) -> Totals:
        unscheduled = self._use.get("")
        return Totals(
            capacity=sum((node.capacity for node in self._nodes.values()), NOTHING),
            allocatable=self._allocatable(),
            allocated=self._allocated(),
            pending=NOTHING if unscheduled is None else unscheduled.amounts,
            largest=functools.reduce(Resources.larger, self._left(), NOTHING),
            free=self.free(),
            nodes=len(self._nodes),
            pods=self._own.pods,
        )

    def free(self, without: str = "") -> Resources:
        """What is neither used nor promised: below zero where that is more than there is.

        `without` is a reservation whose own share counts as free, so that one can see whether it
        still fits. Guests that may be its own or another's do not speak against it.
        """
        held = sum((hold.resources for hold in self._holds.values()), NOTHING)
        return self._allocatable() - self._allocated() - held + self._share(without)

    def _share(self, reservation: str) -> Resources:
        hold = self._holds.get(reservation)
        if hold is None:
            return NOTHING
        guests = self._own.guests.get(Guest(hold.requester, reservation))
        return hold.resources if guests is None else hold.resources.larger(guests.amounts)

    def _allocatable(self) -> Resources:
        return sum((node.allocatable for node in self._nodes.values()), NOTHING)

    def _allocated(self) -> Resources:
        own = self._own.amounts
        guests = sum((guests.amounts for guests in self._own.guests.values()), NOTHING)
        beyond = sum(((used - held).clamped() for held, used in self._compared()), NOTHING)
        return own - guests + beyond

    def _compared(self) -> Iterator[tuple[Resources, Resources]]:
        """What is held and what is used, in pairs that belong together."""
        held: dict[str, Resources] = {}
        used: dict[str, Resources] = {}
        for reservation, hold in self._holds.items():
            guests = self._own.guests.get(Guest(hold.requester, reservation))
            if guests is None:
                held[hold.requester] = held.get(hold.requester, NOTHING) + hold.resources
            else:
                yield hold.resources, guests.amounts
        for guest, guests in self._own.guests.items():
            if not self._has_hold(guest):
                used[guest.origin] = used.get(guest.origin, NOTHING) + guests.amounts
        for origin in held.keys() | used.keys():
            yield held.get(origin, NOTHING), used.get(origin, NOTHING)

    def _has_hold(self, guest: Guest) -> bool:
        hold = self._holds.get(guest.virtual_node)
        return hold is not None and hold.requester == guest.origin

    def _left(self) -> Iterator[Resources]:
        for name, node in self._nodes.items():
            use = self._use.get(name)
            yield node.allocatable if use is None else node.allocatable - use.amounts


class _Sum:
    """How many pods, and what they ask for together."""

    __slots__ = ("amounts", "pods")

    def __init__(self, amounts: Resources = NOTHING, pods: int = 0) -> None:
        self.amounts = amounts
        self.pods = pods

    def add(self, other: _Sum) -> None:
        self.amounts += other.amounts
        self.pods += other.pods

    def subtract(self, other: _Sum) -> None:
        self.amounts -= other.amounts
        self.pods -= other.pods


class _Use(_Sum):
    """The same, and of each group of guests apart: as many as have pods."""

    __slots__ = ("guests",)

    def __init__(self) -> None:
        super().__init__()
        self.guests: dict[Guest, _Sum] = {}

    @classmethod
    def of(cls, pod: Pod) -> _Use:
        use = cls()
        use.amounts, use.pods = pod.requests, 1
        if pod.guest is not None:
            use.guests[pod.guest] = _Sum(pod.requests, 1)
        return use

    def include(self, other: _Use) -> None:
        self.add(other)
        for guest, guests in other.guests.items():
            self.guests.setdefault(guest, _Sum()).add(guests)

    def exclude(self, other: _Use) -> None:
        self.subtract(other)
        for guest, guests in other.guests.items():
            self.guests[guest].subtract(guests)
            if not self.guests[guest].pods:
                del self.guests[guest]
