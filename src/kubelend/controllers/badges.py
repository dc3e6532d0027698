"""A label on the leading broker's own pod, by which a Service finds the one that takes changes.

The pods that follow answer questions and refuse changes, and a client that kept its connection to one of
them would go on being refused.
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
"""How often it asks who leads: for so long changes may go to the wrong pod."""
LEAVES_WITHIN: Final = timedelta(seconds=2)
"""For which a broker that stops waits until its label is gone."""
SECOND_LOOK: Final = 40
"""Every so many looks the pod itself is read: somebody may have changed its label."""

log = structlog.get_logger("kubelend.election")


class Pod(Part, frozen=True):
    """As little of it as this needs."""

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
        """Wear what this broker is, and nothing once it stops. Never returns."""
        try:
            for look in itertools.count(1):
                await self.change(is_second_look=look % SECOND_LOOK == 0)
                await asyncio.sleep(LOOKS.total_seconds())
        finally:
            await self.take_off()

    async def change(self, *, is_second_look: bool = False) -> None:
        """Only what is otherwise is written. An error is tried again at the next look."""
        try:
            if is_second_look:
                self._worn = await self._seen()
            await self._wear(LEADER if self._leadership.leads else FOLLOWER)
        except KubelendError as error:
            self._complain(str(error))

    async def take_off(self) -> None:
        """A broker that stops takes no changes any more. If it cannot say so, it stops all the same."""
        try:
            async with asyncio.timeout(LEAVES_WITHIN.total_seconds()):
                await self._write(None)
        except (KubelendError, TimeoutError) as error:
            problem = str(error) or "the API server did not answer in time"
            log.warning("the own pod keeps its label", pod=self._pod.name, problem=problem)
        else:
            self._worn = ""
            log.info("label taken off", pod=self._pod.name)

    async def _seen(self) -> str:
        found = await self._client.find(PODS, *self._pod)
        return "" if found is None else found.metadata.labels.get(ROLE, "")

    async def _wear(self, due: str) -> None:
        if due != self._worn:
            await self._write(due)
            self._worn, self._problem = due, ""
            log.info("labelled", pod=self._pod.name, role=due)

    async def _write(self, role: str | None) -> None:
        labels: dict[str, object] = {"metadata": {"labels": {ROLE: role}}}
        await self._client.patch(PODS, *self._pod, labels)

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log.warning("the own pod cannot be labelled", pod=self._pod.name, problem=problem)
