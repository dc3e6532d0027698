"""Kubernetes Events as types: what `kubectl describe` shows below an object.

Broker and agent emit them when something happens, and rely on none: `kube.events` writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Final, Literal, NamedTuple

import msgspec

from kubelend.wire.objects import Metadata, Object

MAX_MESSAGE_LENGTH: Final = 1024
"""Characters of a message: the API server's limit."""


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


EmitEvent = Callable[[EventRecord], None]
"""Takes an Event to be written; returns at once and never fails."""


def discard_event(event: EventRecord) -> None:
    """For objects outside Kubernetes, which have no Events."""


def event_body(event: EventRecord, at: datetime, suffix: str, component: str) -> dict[str, object]:
    """The Event object as the API server takes it; `component` is the program that reports it."""
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
        "source": {"component": component},
        "reportingComponent": component,
        "reportingInstance": component,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }
