"""Sets a label on the leader's own pod, so that a Service can select the broker that accepts changes.

Followers serve reads and reject changes. A client with a connection to a follower would be rejected again
and again.
"""

from __future__ import annotations

import asyncio
import itertools
from datetime import timedelta
from typing import Final, NamedTuple

import structlog

from kubelend.broker.ports import Leadership
from kubelend.core.errors import KubelendError
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource
from kubelend.wire.objects import Metadata, Part

ROLE: Final = "kubelend.io/role"
LEADER: Final = "leader"
FOLLOWER: Final = "follower"

LOOKS: Final = timedelta(milliseconds=250)
"""Interval of the leadership checks: changes may go to the wrong pod for this long."""
LEAVES_WITHIN: Final = timedelta(seconds=2)
"""How long a stopping broker waits for the removal of its label."""
SECOND_LOOK: Final = 40
"""Every this many checks the pod itself is read, in case others have changed the label."""

log = structlog.get_logger("kubelend.election")


class Pod(Part, frozen=True):
    """A Pod with its metadata only."""

    metadata: Metadata


PODS: Final = Resource("", "v1", "pods", "Pod", Pod)


class OwnPod(NamedTuple):
    name: str
    namespace: str


class Badge:
    """Use `run` as a root task."""

    def __init__(self, client: Client, pod: OwnPod, leadership: Leadership) -> None:
        self._client = client
        self._pod = pod
        self._leadership = leadership
        self._worn = ""
        self._problem = ""

    async def run(self) -> None:
        """Keep the label up to date, and remove it at the end. Runs until cancelled."""
        try:
            for attempt in itertools.count(1):
                await self.change(is_second_look=attempt % SECOND_LOOK == 0)
                await asyncio.sleep(LOOKS.total_seconds())
        finally:
            await self.take_off()

    async def change(self, *, is_second_look: bool = False) -> None:
        """Set the label if it differs. After an error the next check tries again."""
        try:
            if is_second_look:
                self._worn = await self._seen()
            await self._wear(LEADER if self._leadership.leads else FOLLOWER)
        except KubelendError as error:
            self._complain(str(error))

    async def take_off(self) -> None:
        """Remove the label, because a stopping broker accepts no changes. Gives up after a timeout."""
        try:
            async with asyncio.timeout(LEAVES_WITHIN.total_seconds()):
                await self._write(None)
        except (KubelendError, TimeoutError) as error:
            message = str(error) or "the API server did not answer in time"
            log.warning("Failed to remove leader label from pod", pod=self._pod.name, error=message)
        else:
            self._worn = ""
            log.info("Removed leader label", pod=self._pod.name)

    async def _seen(self) -> str:
        found = await self._client.find(PODS, *self._pod)
        return "" if found is None else found.metadata.labels.get(ROLE, "")

    async def _wear(self, due: str) -> None:
        if due != self._worn:
            await self._write(due)
            self._worn, self._problem = due, ""
            log.info("Set leader label", pod=self._pod.name, role=due)

    async def _write(self, role: str | None) -> None:
        labels: dict[str, object] = {"metadata": {"labels": {ROLE: role}}}
        await self._client.patch(PODS, *self._pod, labels)

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log.warning("Failed to set leader label, will retry", pod=self._pod.name, error=problem)
