"""Replays a simulated cluster to determine how many of its events an agent has processed.

The same description yields the same events, so the allocated memory that an agent reports identifies its
last event: amounts are random down to the byte, and no two moments have the same sum.
"""

from __future__ import annotations

from collections.abc import Iterable

from kubelend.agent.ports import Change, PodDeleted
from kubelend.core.errors import KubelendError
from kubelend.core.pods import Pod
from kubelend.sources.descriptions import SimulationSpec
from kubelend.sources.worlds import SimulatedCluster


class SimulationReplay:
    """A simulated cluster that has been replayed up to some event."""

    def __init__(self, description: SimulationSpec) -> None:
        self._simulation = SimulatedCluster(description)
        self._memory_by_pod: dict[str, int] = {}
        """Memory by pod, for pods on a node."""
        self._memory = 0
        self._apply_changes(self._simulation.snapshot().pods)

    def events_until(self, memory: int, most: int) -> int:
        """Replays until `memory` is allocated; returns the number of pod events.

        Raises if that state is not reached within `most` events.
        """
        events = 0
        while self._memory != memory:
            if events >= most or self._simulation.next_at is None:
                raise KubelendError(
                    f"the agent reports {memory} allocated bytes, which the simulation never reached"
                )
            events += self._apply_changes(self._simulation.step().changes)
        return events

    def _apply_changes(self, changes: Iterable[Change]) -> int:
        pods = [change for change in changes if isinstance(change, Pod | PodDeleted)]
        for pod in pods:
            self._memory -= self._memory_by_pod.pop(pod.id, 0)
            if isinstance(pod, Pod) and pod.node:
                self._memory_by_pod[pod.id] = pod.requests.memory
                self._memory += pod.requests.memory
        return len(pods)
