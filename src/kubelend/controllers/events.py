"""Kubernetes Events on objects that users applied, as shown by `kubectl describe`.

Each is emitted once, when it happens, and nothing relies on them: one that cannot be written is dropped.
Objects that the broker manages have none, because their users receive everything over the REST interface.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Final, Literal, NamedTuple

import msgspec
import structlog

from kubelend.controllers import labels
from kubelend.core.errors import KubelendError
from kubelend.core.lifecycle import Phase, Reason
from kubelend.kube.client import Client
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from kubelend.wire.objects import Metadata, Object

MAX_MESSAGE_LENGTH: Final = 1024
"""Characters of a message: the API server's limit."""
MAX_QUEUED_EVENTS: Final = 1000
COMPONENT: Final = "kubelend-broker"

log = structlog.get_logger("kubelend.controllers")


class ObjectReference(NamedTuple):
    """An object of which only the type and metadata are known."""

    type: type[Object]
    metadata: Metadata


class EventRecord(NamedTuple):
    """An Event to be written, and the object it is about."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    involved_object: Object | ObjectReference


def reservation_events(before: Reservation, after: Reservation) -> Iterator[EventRecord]:
    was, now = before.status, after.status
    if labels.is_managed(after.metadata):
        return
    if was.phase != now.phase and (event_reason := _EVENT_REASONS.get(now.phase)):
        reason = "Expired" if now.reason == Reason.EXPIRED else event_reason
        kind: Literal["Normal", "Warning"] = "Warning" if reason == "Failed" else "Normal"
        yield EventRecord(kind, reason, now.message, after)
    elif now.phase == Phase.RESERVED and was.target_cluster_id != now.target_cluster_id:
        yield EventRecord("Normal", "Moved", now.message, after)


def advertisement_events(
    before: ClusterAdvertisement, after: ClusterAdvertisement
) -> Iterator[EventRecord]:
    was, now = before.status.phase, after.status.phase
    if labels.is_managed(after.metadata):
        return
    if was != now and now == "Stale":
        yield EventRecord("Warning", "Stale", after.status.message, after)
    elif was == "Stale" and now == "Active":
        yield EventRecord("Normal", "Active", "The cluster advertises again", after)
    if _is_overcommitted(after) and not _is_overcommitted(before):
        yield EventRecord("Warning", "Overcommitted", after.status.message, after)


def event_body(event: EventRecord, at: datetime, suffix: str) -> dict[str, object]:
    """The Event object as the API server takes it."""
    about, stamp = event.involved_object, msgspec.to_builtins(at.replace(microsecond=0))
    metadata, message = about.metadata, event.message
    if len(message) > MAX_MESSAGE_LENGTH:
        message = message[: MAX_MESSAGE_LENGTH - 1] + "…"
    kind = about.type if isinstance(about, ObjectReference) else type(about)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata.name[:200]}.{suffix}", "namespace": metadata.namespace},
        "involvedObject": {
            "apiVersion": f"{kind.group}/{kind.version}",
            "kind": kind.kind,
            "namespace": metadata.namespace,
            "name": metadata.name,
            "uid": metadata.uid,
            "resourceVersion": metadata.resource_version,
        },
        "type": event.type,
        "reason": event.reason,
        "message": message,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": COMPONENT,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }


class EventRecorder:
    """Writes Events in the background. Use `run` as a task; `emit` never blocks."""

    def __init__(self, client: Client, clock: Callable[[], datetime]) -> None:
        self._client = client
        self._clock = clock
        self._queue: asyncio.Queue[EventRecord] = asyncio.Queue(MAX_QUEUED_EVENTS)

    def emit(self, event: EventRecord) -> None:
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            log.warning(
                "Event dropped", event_reason=event.reason, error="too many Events are queued"
            )

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            event = await self._queue.get()
            made = event_body(event, self._clock(), secrets.token_hex(8))
            namespace = event.involved_object.metadata.namespace
            try:
                await self._client.raw("POST", f"/api/v1/namespaces/{namespace}/events", made)
            except KubelendError as error:
                log.warning("Event dropped", event_reason=event.reason, error=str(error))


_EVENT_REASONS: Final[dict[str, str]] = {
    Phase.RESERVED: "Reserved",
    Phase.ACTIVE: "Activated",
    Phase.RELEASED: "Released",
    Phase.FAILED: "Failed",
}


def _is_overcommitted(found: ClusterAdvertisement) -> bool:
    conditions = found.status.conditions
    return any(one.type == "Overcommitted" and one.status == "True" for one in conditions)
