"""A simulated cluster played once more, to tell how much of what happens in it an agent has taken in.

The same description gives the same events everywhere, so what an agent says is in use tells which of them
was its last: amounts are random down to the byte, and no two moments have the same sum.
"""

from __future__ import annotations

from collections.abc import Iterable

from kubelend.agent.ports import Change, PodGone
from kubelend.core.errors import KubelendError
from kubelend.core.pods import Pod
from kubelend.sources.descriptions import Description
from kubelend.sources.worlds import World


class Replay:
    """The cluster of a description, as far as it was played."""

    def __init__(self, description: Description) -> None:
        self._world = World(description)
        self._used: dict[str, int] = {}
        """The memory of each pod that is on a node."""
        self._sum = 0
        self._take(self._world.snapshot().pods)

    def events_until(self, memory: int, most: int) -> int:
        """Play on until so much memory is in use; gives how often a pod came, went or changed meanwhile.

        It is an error if that is not so after `most` of these events.
        """
        events = 0
        while self._sum != memory:
            if events >= most or self._world.next_at is None:
                raise KubelendError(
                    f"the agent says that {memory} bytes are in use, which never was so"
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
