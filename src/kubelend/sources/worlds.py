"""A simulated cluster without a clock: a sequence of events determined by the seed."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from msgspec.structs import replace

from kubelend.agent.ports import Change, NodeGone, PodGone, Snapshot
from kubelend.core.nodes import Node
from kubelend.core.pods import Pod
from kubelend.core.resources import NOTHING, Resources
from kubelend.sources import descriptions
from kubelend.sources.descriptions import Description, Failure, PodGroup, Range, Work

_Action = Callable[[], list[Change]]
"""In the heap a pod's ID stands for its end: there are thousands, and a closure takes more memory."""


class Step(NamedTuple):
    """All changes of one point in time."""

    at: int
    """Microseconds since the start, as all times here."""
    changes: list[Change]


class World:
    """The cluster after its last step."""

    def __init__(self, description: Description) -> None:
        self._seed = description.seed
        self._now = 0
        self._agenda: list[tuple[int, int, _Action | str]] = []
        self._order = itertools.count()
        self._joined = itertools.count(1)
        self._nodes = _nodes(description)
        self._free = {name: node.allocatable for name, node in self._nodes.items()}
        self._faults = {name: 0 if node.is_ready else 1 for name, node in self._nodes.items()}
        self._makes: dict[str, str] = {}
        """The spec's name of each node that has replaced another."""
        self._pods: dict[str, Pod] = {}
        self._pending: dict[str, None] = {}
        self._begin(description)

    def snapshot(self) -> Snapshot:
        """The complete state."""
        return Snapshot(list(self._nodes.values()), list(self._pods.values()))

    @property
    def next_at(self) -> int | None:
        """When the next step is due; None if there is none."""
        return self._agenda[0][0] if self._agenda else None

    def step(self) -> Step:
        """Process the next event."""
        self._now, _, action = heapq.heappop(self._agenda)
        return Step(self._now, self._depart(action) if isinstance(action, str) else action())

    # -- scheduling

    def _begin(self, description: Description) -> None:
        for index, group in enumerate(description.pods):
            self._fill(f"pod-{index + 1}", group)
        for index, work in enumerate(description.work):
            self._start_work(f"work-{index + 1}", work)
        for index, failure in enumerate(description.failures):
            self._start_failure(f"failure-{index + 1}", failure)

    def _fill(self, name: str, group: PodGroup) -> None:
        requests = group.amounts()
        count = group.count or _count_of(requests, group.percent(), self._allocatable())
        for number in range(1, count + 1):
            self._arrive(Pod(f"{name}-{number}", requests=requests))

    def _start_work(self, name: str, work: Work) -> None:
        dice = self._dice(name)
        amounts, lifetime = work.amounts(), descriptions.period(work.lifetime, "lifetime")
        numbers, pause = itertools.count(1), descriptions.interval(work.rate)

        def one_more(rest: Callable[[int], int]) -> list[Change]:
            pod = Pod(f"{name}-{next(numbers)}", requests=_drawn(dice, amounts))
            self._after(rest(_draw(dice, lifetime)), pod.id)
            return self._arrive(pod)

        def arrive() -> list[Change]:
            self._after(_pause(dice, pause), arrive)
            return one_more(lambda whole: whole)

        for _ in range(work.start):
            one_more(lambda whole: dice.randint(0, whole))
        self._after(_pause(dice, pause), arrive)

    def _start_failure(self, name: str, failure: Failure) -> None:
        dice = self._dice(name)
        repair = descriptions.period(failure.repair, "repair") if failure.repair else None
        fail = self._leave if failure.gone else self._fail
        if failure.node:
            at = descriptions.moment(failure.at, "at")
            self._after(at, lambda: fail(failure.node, dice, repair))
            return
        pause = descriptions.interval(failure.rate)

        def strike() -> list[Change]:
            self._after(_pause(dice, pause), strike)
            ready = [node.name for node in self._nodes.values() if node.is_ready]
            return fail(dice.choice(ready), dice, repair) if ready else []

        self._after(_pause(dice, pause), strike)

    def _after(self, pause: int, action: _Action | str) -> None:
        heapq.heappush(self._agenda, (self._now + pause, next(self._order), action))

    # -- events

    def _arrive(self, pod: Pod) -> list[Change]:
        """Scheduled on the first node with enough free resources; else pending."""
        for name, node in self._nodes.items():
            if _is_open(node) and pod.requests.fits_in(self._free[name]):
                return [self._place(pod, name)]
        self._pods[pod.id] = pod
        self._pending[pod.id] = None
        return [pod]

    def _place(self, pod: Pod, node: str) -> Pod:
        self._free[node] -= pod.requests
        placed = self._pods[pod.id] = replace(pod, node=node)
        return placed

    def _depart(self, id: str) -> list[Change]:
        pod = self._pods.pop(id, None)
        if pod is None:  # deleted with its node
            return []
        if not pod.node:
            del self._pending[id]
            return [PodGone(id)]
        self._free[pod.node] += pod.requests
        return [PodGone(id), *self._use_room(pod.node)]

    def _leave(self, name: str, dice: Random, repair: Range | None) -> list[Change]:
        node = self._nodes.pop(name, None)
        if node is None:
            return []
        del self._free[name], self._faults[name]
        make = self._makes.pop(name, name)
        if repair is not None:
            self._after(_draw(dice, repair), lambda: self._join(node, make))
        lost = [pod.id for pod in self._pods.values() if pod.node == name]
        for pod in lost:
            del self._pods[pod]
        return [*map(PodGone, lost), NodeGone(name)]

    def _join(self, gone: Node, make: str) -> list[Change]:
        name = f"{make}.{next(self._joined)}"
        node = self._nodes[name] = replace(gone, name=name, is_ready=True)
        self._free[name], self._faults[name], self._makes[name] = node.allocatable, 0, make
        return [node, *self._use_room(name)]

    def _fail(self, name: str, dice: Random, repair: Range | None) -> list[Change]:
        if name not in self._nodes:
            return []
        if repair is not None:
            self._after(_draw(dice, repair), lambda: self._repair(name))
        self._faults[name] += 1
        return self._set_ready(name) if self._faults[name] == 1 else []

    def _repair(self, name: str) -> list[Change]:
        if name not in self._nodes:
            return []
        self._faults[name] -= 1
        return [] if self._faults[name] else [*self._set_ready(name), *self._use_room(name)]

    def _set_ready(self, name: str) -> list[Change]:
        node = replace(self._nodes[name], is_ready=not self._faults[name])
        self._nodes[name] = node
        return [node]

    def _use_room(self, name: str) -> list[Change]:
        """Schedule pending pods: only this node has gained free resources."""
        placed: list[Change] = []
        if not _is_open(self._nodes[name]):
            return placed
        for waiting in list(self._pending):
            pod = self._pods[waiting]
            if pod.requests.fits_in(self._free[name]):
                del self._pending[waiting]
                placed.append(self._place(pod, name))
        return placed

    def _allocatable(self) -> Resources:
        return sum((node.allocatable for node in self._nodes.values()), NOTHING)

    def _dice(self, name: str) -> Random:
        return Random(f"{self._seed}/{name}")  # noqa: S311  reproducible on purpose


def _nodes(description: Description) -> dict[str, Node]:
    nodes: dict[str, Node] = {}
    for group in description.nodes:
        capacity, allocatable = group.amounts()
        for number in range(1, group.count + 1):
            name = f"{group.name}-{number}"
            labels, ready = group.labels, group.ready
            nodes[name] = Node(name, capacity, allocatable, labels, ready, group.schedulable)
    return nodes


def _is_open(node: Node) -> bool:
    return node.is_ready and node.is_schedulable


def _count_of(requests: Resources, percent: int, total: Resources) -> int:
    """As many pods as stay within the share of every requested resource."""
    return min(
        (total.amount(name) * percent // (100 * amount) for name, amount in requests.items()),
        default=0,
    )


def _drawn(dice: Random, amounts: dict[str, Range]) -> Resources:
    # Adding NOTHING shares its empty dictionary instead of one per pod.
    return NOTHING + Resources.of({name: _draw(dice, ends) for name, ends in amounts.items()})


def _draw(dice: Random, ends: Range) -> int:
    return dice.randint(ends.low, ends.high)


def _pause(dice: Random, mean: int) -> int:
    """Uniform around the mean, in integers: logarithms differ between machines."""
    return dice.randint(1, 2 * mean - 1)
