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
from kubelend.wire.objects import Metadata, ObjectStruct

ROLE_LABEL: Final = "kubelend.io/role"
LEADER: Final = "leader"
FOLLOWER: Final = "follower"

CHECK_INTERVAL: Final = timedelta(milliseconds=250)
"""Interval of the leadership checks: changes may go to the wrong pod for this long."""
REMOVE_TIMEOUT: Final = timedelta(seconds=2)
"""How long a stopping broker waits for the removal of its label."""
REREAD_EVERY: Final = 40
"""Every this many checks the pod itself is read, in case others have changed the label."""

log = structlog.get_logger("kubelend.election")


class LabelledPod(ObjectStruct, frozen=True):
    """A LabelledPod with its metadata only."""

    metadata: Metadata


PODS: Final = Resource("", "v1", "pods", "Pod", LabelledPod)


class OwnPod(NamedTuple):
    name: str
    namespace: str


class LeaderLabel:
    """Use `run` as a root task."""

    def __init__(self, client: Client, pod: OwnPod, leadership: Leadership) -> None:
        self._client = client
        self._pod = pod
        self._leadership = leadership
        self._role = ""
        self._logged_error = ""

    async def run(self) -> None:
        """Keep the label up to date, and remove it at the end. Runs until cancelled."""
        try:
            for attempt in itertools.count(1):
                await self.apply(reread=attempt % REREAD_EVERY == 0)
                await asyncio.sleep(CHECK_INTERVAL.total_seconds())
        finally:
            await self.remove()

    async def apply(self, *, reread: bool = False) -> None:
        """Set the label if it differs. After an error the next check tries again."""
        try:
            if reread:
                found = await self._client.find(PODS, *self._pod)
                self._role = "" if found is None else found.metadata.labels.get(ROLE_LABEL, "")
            role = LEADER if self._leadership.is_leader else FOLLOWER
            if role != self._role:
                await self._write(role)
                self._role, self._logged_error = role, ""
                log.info("Set leader label", pod=self._pod.name, role=role)
        except KubelendError as error:
            if str(error) != self._logged_error:
                message = self._logged_error = str(error)
                pod = self._pod.name
                log.warning("Failed to set leader label, will retry", pod=pod, error=message)

    async def remove(self) -> None:
        """Remove the label, because a stopping broker accepts no changes. Gives up after a timeout."""
        try:
            async with asyncio.timeout(REMOVE_TIMEOUT.total_seconds()):
                await self._write(None)
        except (KubelendError, TimeoutError) as error:
            message = str(error) or "the API server did not respond in time"
            log.warning("Failed to remove leader label from pod", pod=self._pod.name, error=message)
        else:
            self._role = ""
            log.info("Removed leader label", pod=self._pod.name)

    async def _write(self, role: str | None) -> None:
        labels: dict[str, object] = {"metadata": {"labels": {ROLE_LABEL: role}}}
        await self._client.patch(PODS, *self._pod, labels)
