"""A simulated cluster: a sequence of events determined by the seed, and a source that plays it in time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import uuid
from collections.abc import AsyncGenerator, Callable
from datetime import datetime, timedelta
from random import Random
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from kubelend.agent.ports import ClusterChange, PodDeleted, Snapshot
from kubelend.core.pod_requests import Node, Pod
from kubelend.core.resources import NOTHING, Resources
from kubelend.sources import simulation_spec
from kubelend.sources.simulation_spec import (
    PodGroup,
    PodWorkload,
    Range,
    SimulationSpec,
)

_Event = Callable[[], list[ClusterChange]]
"""In the heap a pod's ID stands for its end: there are thousands, and a closure takes more memory."""


class SimulationStep(NamedTuple):
    """All changes of one point in time."""

    at: int
    """Microseconds since the start, as all times here."""
    changes: list[ClusterChange]


class SimulatedCluster:
    """The cluster after its last step. Its pods come and go; its nodes stay."""

    def __init__(self, spec: SimulationSpec) -> None:
        self._seed = spec.seed
        self._now = 0
        self._event_heap: list[tuple[int, int, _Event | str]] = []
        self._order = itertools.count()
        self._nodes = _initial_nodes(spec)
        self._free = {
            node.name: node.allocatable
            for node in self._nodes
            if node.is_ready and node.is_schedulable
        }
        self._pods: dict[str, Pod] = {}
        self._pending: dict[str, None] = {}
        for index, group in enumerate(spec.pods):
            self._create_pods(f"pod-{index + 1}", group)
        for index, work in enumerate(spec.work):
            self._schedule_workload(f"work-{index + 1}", work)

    def snapshot(self) -> Snapshot:
        """The complete state."""
        return Snapshot(list(self._nodes), list(self._pods.values()))

    @property
    def next_at(self) -> int | None:
        """When the next step is due; None if there is none."""
        return self._event_heap[0][0] if self._event_heap else None

    def step(self) -> SimulationStep:
        """Process the next event."""
        self._now, _, action = heapq.heappop(self._event_heap)
        return SimulationStep(
            self._now, self._delete_pod(action) if isinstance(action, str) else action()
        )

    # -- scheduling

    def _create_pods(self, name: str, group: PodGroup) -> None:
        requests = group.amounts()
        total = sum((node.allocatable for node in self._nodes), NOTHING)
        count = group.count or _pods_for_share(requests, group.percent(), total)
        for number in range(1, count + 1):
            self._create_pod(Pod(f"{name}-{number}", requests=requests))

    def _schedule_workload(self, name: str, work: PodWorkload) -> None:
        random = Random(f"{self._seed}/{name}")  # noqa: S311  reproducible on purpose
        amounts, lifetime = work.amounts(), simulation_spec.parse_period(work.lifetime, "lifetime")
        numbers, pause = itertools.count(1), simulation_spec.rate_interval(work.rate)

        def one_more(rest: Callable[[int], int]) -> list[ClusterChange]:
            pod = Pod(f"{name}-{next(numbers)}", requests=_random_amounts(random, amounts))
            self._schedule(rest(_random_in(random, lifetime)), pod.id)
            return self._create_pod(pod)

        def arrive() -> list[ClusterChange]:
            self._schedule(_random_interval(random, pause), arrive)
            return one_more(lambda whole: whole)

        for _ in range(work.start):
            one_more(lambda whole: random.randint(0, whole))
        self._schedule(_random_interval(random, pause), arrive)

    def _schedule(self, pause: int, action: _Event | str) -> None:
        heapq.heappush(self._event_heap, (self._now + pause, next(self._order), action))

    # -- events

    def _create_pod(self, pod: Pod) -> list[ClusterChange]:
        """Scheduled on the first node with enough free resources; else pending."""
        for name, free in self._free.items():
            if pod.requests.fits_in(free):
                return [self._bind_pod(pod, name)]
        self._pods[pod.id] = pod
        self._pending[pod.id] = None
        return [pod]

    def _bind_pod(self, pod: Pod, node: str) -> Pod:
        self._free[node] -= pod.requests
        placed = self._pods[pod.id] = replace(pod, node=node)
        return placed

    def _delete_pod(self, id: str) -> list[ClusterChange]:
        pod = self._pods.pop(id)
        if not pod.node:
            del self._pending[id]
            return [PodDeleted(id)]
        self._free[pod.node] += pod.requests
        return [PodDeleted(id), *self._schedule_pending(pod.node)]

    def _schedule_pending(self, name: str) -> list[ClusterChange]:
        """Schedule pending pods: only this node has gained free resources."""
        placed: list[ClusterChange] = []
        for waiting in list(self._pending):
            pod = self._pods[waiting]
            if pod.requests.fits_in(self._free[name]):
                del self._pending[waiting]
                placed.append(self._bind_pod(pod, name))
        return placed


def _initial_nodes(spec: SimulationSpec) -> list[Node]:
    return [
        Node(
            f"{group.name}-{number}", *group.amounts(), group.labels, group.ready, group.schedulable
        )
        for group in spec.nodes
        for number in range(1, group.count + 1)
    ]


def _pods_for_share(requests: Resources, percent: int, total: Resources) -> int:
    """As many pods as stay within the share of every requested resource."""
    return min(
        (total.amount(name) * percent // (100 * amount) for name, amount in requests.items()),
        default=0,
    )


def _random_amounts(random: Random, amounts: dict[str, Range]) -> Resources:
    # Adding NOTHING shares its empty dictionary instead of one per pod.
    return NOTHING + Resources.of(
        {name: _random_in(random, ends) for name, ends in amounts.items()}
    )


def _random_in(random: Random, ends: Range) -> int:
    return random.randint(ends.low, ends.high)


def _random_interval(random: Random, mean: int) -> int:
    """Uniform around the mean, in integers: logarithms differ between machines."""
    return random.randint(1, 2 * mean - 1)


MAX_EVENTS_PER_TURN: Final = 500
"""Events processed before other tasks get a turn."""

MAX_SLEEP_SECONDS: Final = 5.0
"""Seconds after which the clock is read again: it may have been set."""

_ID_NAMESPACE: Final = uuid.UUID("6f0b7d0e-6c1b-4d0e-9d3c-2b1f6f4b8a11")


class SimulatedSource:
    """`agent.ports.ClusterSource` of a simulated cluster, whose time starts when it is created.

    Each call of `changes` plays the cluster from its start: the seed determines it.
    """

    problem = ""
    """Always empty: a simulation cannot fail."""

    def __init__(self, spec: SimulationSpec, clock: Callable[[], datetime]) -> None:
        self.spec = spec
        self._clock = clock
        self._start = clock()

    async def identity(self) -> str:
        """The spec's ID, or one derived from the whole spec."""
        text = msgspec.json.encode(self.spec, order="deterministic").decode()
        return self.spec.cluster_id or str(uuid.uuid5(_ID_NAMESPACE, text))

    async def changes(self) -> AsyncGenerator[ClusterChange, None]:
        cluster, has_snapshot = SimulatedCluster(self.spec), False
        for number in itertools.count():
            pause = self._until_next(cluster)
            if pause and not has_snapshot:
                has_snapshot = True
                yield cluster.snapshot()
            if pause or not number % MAX_EVENTS_PER_TURN:
                await asyncio.sleep(pause)
            changes = [] if pause else cluster.step().changes
            for change in changes if has_snapshot else ():
                yield change

    def _until_next(self, cluster: SimulatedCluster) -> float:
        """Seconds until the next event is due, at most `MAX_SLEEP_SECONDS`; zero if it is due."""
        if cluster.next_at is None:
            return MAX_SLEEP_SECONDS
        at = self._start + timedelta(microseconds=cluster.next_at)
        return min(max((at - self._clock()).total_seconds(), 0), MAX_SLEEP_SECONDS)
