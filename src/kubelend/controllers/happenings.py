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

from kubelend.controllers import marks
from kubelend.core.errors import KubelendError
from kubelend.core.lifecycle import Phase, Reason
from kubelend.kube.answers import Unreadable
from kubelend.kube.client import Client
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from kubelend.wire.objects import Metadata, Object

LONGEST: Final = 1024
"""Characters of a message: the API server's limit."""
MOST_WAITING: Final = 1000
COMPONENT: Final = "kubelend-broker"

log = structlog.get_logger("kubelend.controllers")


class Subject(NamedTuple):
    """An object of which only the type and metadata are known."""

    type: type[Object]
    metadata: Metadata


class Happening(NamedTuple):
    """An Event to be written, and the object it is about."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    about: Object | Subject


def of_reservation(before: Reservation, after: Reservation) -> Iterator[Happening]:
    was, now = before.status, after.status
    if marks.is_own(after.metadata):
        return
    if was.phase != now.phase and (word := _PHASES.get(now.phase)):
        reason = "Expired" if now.reason == Reason.EXPIRED else word
        kind: Literal["Normal", "Warning"] = "Warning" if reason == "Failed" else "Normal"
        yield Happening(kind, reason, now.message, after)
    elif now.phase == Phase.RESERVED and was.target_cluster_id != now.target_cluster_id:
        yield Happening("Normal", "Moved", now.message, after)


def of_advertisement(
    before: ClusterAdvertisement, after: ClusterAdvertisement
) -> Iterator[Happening]:
    was, now = before.status.phase, after.status.phase
    if marks.is_own(after.metadata):
        return
    if was != now and now == "Stale":
        yield Happening("Warning", "Stale", after.status.message, after)
    elif was == "Stale" and now == "Active":
        yield Happening("Normal", "Active", "The cluster advertises again", after)
    if _is_overcommitted(after) and not _is_overcommitted(before):
        yield Happening("Warning", "Overcommitted", after.status.message, after)


def at_deletion(found: Reservation, message: str) -> Happening:
    """The Reservation was deleted by its user."""
    return Happening("Normal", "Released", message, found)


def at_removal(found: Object) -> Happening:
    """The object was labelled as managed by the broker, but was not."""
    message = "Deleted because it was labelled as managed by the broker, which has no record of it"
    return Happening("Warning", "OrphanDeleted", message, found)


def of_outdated(found: ClusterAdvertisement) -> Happening:
    """The spec is older than the cluster's latest advertisement."""
    message = "Ignored because the cluster has sent a newer advertisement; set a later timestamp"
    return Happening("Warning", "Outdated", message, found)


def of_unreadable(kind: type[Object], found: Unreadable) -> Happening:
    """The object is skipped until it is fixed."""
    about = Subject(kind, Metadata(found.name, found.namespace, found.uid))
    return Happening("Warning", "Undecodable", f"Skipped: {found.problem}", about)


def body(happening: Happening, at: datetime, suffix: str) -> dict[str, object]:
    """The Event object as the API server takes it."""
    about, stamp = happening.about, msgspec.to_builtins(at.replace(microsecond=0))
    metadata = about.metadata
    kind = about.type if isinstance(about, Subject) else type(about)
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
        "type": happening.type,
        "reason": happening.reason,
        "message": _cut(happening.message),
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": COMPONENT,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }


class Teller:
    """Writes Events in the background. Use `run` as a task; `emit` never blocks."""

    def __init__(self, client: Client, clock: Callable[[], datetime]) -> None:
        self._client = client
        self._clock = clock
        self._waiting: asyncio.Queue[Happening] = asyncio.Queue(MOST_WAITING)

    def tell(self, happening: Happening) -> None:
        try:
            self._waiting.put_nowait(happening)
        except asyncio.QueueFull:
            log.warning(
                "Event dropped", event_reason=happening.reason, error="too many Events are queued"
            )

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            event = await self._waiting.get()
            made = body(event, self._clock(), secrets.token_hex(8))
            namespace = event.about.metadata.namespace
            try:
                await self._client.raw("POST", f"/api/v1/namespaces/{namespace}/events", made)
            except KubelendError as error:
                log.warning("Event dropped", event_reason=event.reason, error=str(error))


class Riddles:
    """Emits an Event for each object of a kind that cannot be decoded, once per error."""

    def __init__(self, kind: type[Object], teller: Teller) -> None:
        self._kind = kind
        self._teller = teller
        self._told: dict[str, Unreadable] = {}

    def look(self, name: str, found: Unreadable | None) -> None:
        """`found` is None if the object can be decoded or does not exist."""
        if found is None:
            self._told.pop(name, None)
        elif self._told.get(name) != found:
            self._told[name] = found
            self._teller.tell(of_unreadable(self._kind, found))


_PHASES: Final[dict[str, str]] = {
    Phase.RESERVED: "Reserved",
    Phase.ACTIVE: "Activated",
    Phase.RELEASED: "Released",
    Phase.FAILED: "Failed",
}


def _is_overcommitted(found: ClusterAdvertisement) -> bool:
    conditions = found.status.conditions
    return any(one.type == "Overcommitted" and one.status == "True" for one in conditions)


def _cut(message: str) -> str:
    return message if len(message) <= LONGEST else message[: LONGEST - 1] + "…"
