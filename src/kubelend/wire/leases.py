"""Kubernetes' Lease, as far as brokers agree by it on who leads."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import ClassVar

from kubelend.wire.objects import Metadata, Object, Part


def micro(moment: datetime) -> str:
    """As a Lease writes times: always with six decimals, and nothing else is taken."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class LeaseSpec(Part, frozen=True):
    """Who leads, and until when the others leave it alone."""

    holder_identity: str | None = None
    """Nobody, if it is empty or not said."""
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None
    """How often it has changed hands."""


class Lease(Object, frozen=True):
    """One seat that one process at a time holds."""

    group: ClassVar[str] = "coordination.k8s.io"
    version: ClassVar[str] = "v1"
    kind: ClassVar[str] = "Lease"
    plural: ClassVar[str] = "leases"

    metadata: Metadata
    spec: LeaseSpec = LeaseSpec()
