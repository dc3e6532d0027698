"""Lease of coordination.k8s.io, as used for leader election."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import ClassVar

from kubelend.wire.objects import Metadata, Object, ObjectStruct


def micro_time(moment: datetime) -> str:
    """Format a MicroTime: always six decimals, as the API server requires."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class LeaseSpec(ObjectStruct, frozen=True):
    """Holder of the lease and its timestamps."""

    holder_identity: str | None = None
    """Empty or absent if there is no holder."""
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None
    """Number of changes of the holder."""


class Lease(Object, frozen=True):
    """A lock that one process at a time holds."""

    group: ClassVar[str] = "coordination.k8s.io"
    version: ClassVar[str] = "v1"
    kind: ClassVar[str] = "Lease"
    plural: ClassVar[str] = "leases"

    metadata: Metadata
    spec: LeaseSpec = LeaseSpec()
