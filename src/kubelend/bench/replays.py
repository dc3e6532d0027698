"""Replays a simulated cluster to determine how many of its events an agent has processed.

The same description yields the same events, so the allocated memory that an agent reports identifies its
last event: amounts are random down to the byte, and no two moments have the same sum.
"""

from __future__ import annotations

from collections.abc import Iterable

from kubelend.agent.ports import Change, PodGone
from kubelend.core.errors import KubelendError
from kubelend.core.pods import Pod
from kubelend.sources.descriptions import Description
from kubelend.sources.worlds import World


class Replay:
    """A simulated cluster that has been replayed up to some event."""

    def __init__(self, description: Description) -> None:
        self._world = World(description)
        self._used: dict[str, int] = {}
        """Memory by pod, for pods on a node."""
        self._sum = 0
        self._take(self._world.snapshot().pods)

    def events_until(self, memory: int, most: int) -> int:
        """Replays until `memory` is allocated; returns the number of pod events.

        Raises if that state is not reached within `most` events.
        """
        events = 0
        while self._sum != memory:
            if events >= most or self._world.next_at is None:
                raise KubelendError(
                    f"the agent reports {memory} allocated bytes, which the simulation never reached"
                )
            events += self._take(self._world.step().changes)
        return events

    def _take(self, changes: Iterable[Change]) -> int:
        pods = [change for change in changes if isinstance(change, Pod | PodGone)]
        for pod in pods:
            self._sum -= self._used.pop(pod.id, 0)
            if isinstance(pod, Pod) and pod.node:
                self._used[pod.id] = pod.requests.memory
                self._sum += pod.requests.memory
        return len(pods)
