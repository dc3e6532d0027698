"""Enums that are API: roles, phases of a reservation with their reasons and allowed transitions,
and reasons why a cluster was rejected for a request.
"""

from __future__ import annotations

from enum import StrEnum


class _FastStrEnum(StrEnum):
    """A StrEnum with the hash of `str`: `Enum.__hash__` is implemented in Python and is slow in sets."""

    __hash__ = str.__hash__


class Phase(_FastStrEnum):
    """Phase of a reservation."""

    PENDING = "Pending"  # waiting for capacity
    RESERVED = "Reserved"  # placed; the resources are locked on the provider
    ACTIVE = "Active"  # in use by the requester
    RELEASED = "Released"  # resources released; final
    FAILED = "Failed"  # never placed, or lost its provider; final


class Reason(_FastStrEnum):
    """Reason for the current phase."""

    WAITING = "Waiting"  # Pending: no cluster fits yet
    LOCKED = "Locked"  # Reserved: placed on its first provider
    MOVED = "Moved"  # Reserved: moved; the previous provider refused, was drained or unreachable
    IN_USE = "InUse"  # Active: activated by the requester
    PROVIDER_SILENT = (
        "ProviderSilent"  # Reserved, Active: provider unreachable, no other cluster fits
    )
    BY_REQUESTER = "ReleasedByRequester"  # Released: released by the requester
    BY_ADMIN = "ReleasedByAdmin"  # Released: released by an administrator
    DELETED = "Deleted"  # Released: its Kubernetes object was deleted
    EXPIRED = "Expired"  # Released: its duration has elapsed
    DRAINED = "Drained"  # Released: provider drained, no other cluster fits
    WAIT_TIMED_OUT = "WaitTimedOut"  # Failed: no cluster fitted within the wait timeout
    REFUSED = "ProviderRefused"  # Failed: provider refused, no other cluster fits


LIVE = frozenset({Phase.RESERVED, Phase.ACTIVE})
FINAL = frozenset({Phase.RELEASED, Phase.FAILED})

ALLOWED_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.PENDING: frozenset({Phase.PENDING, Phase.RESERVED, Phase.RELEASED, Phase.FAILED}),
    Phase.RESERVED: frozenset({Phase.RESERVED, Phase.ACTIVE, Phase.RELEASED, Phase.FAILED}),
    Phase.ACTIVE: frozenset({Phase.ACTIVE, Phase.RESERVED, Phase.RELEASED, Phase.FAILED}),
    Phase.RELEASED: frozenset(),
    Phase.FAILED: frozenset(),
}
"""Active returns to Reserved when the reservation moves: the requester has to connect to the new
provider.
"""


def is_allowed_transition(phase: Phase, next_phase: Phase) -> bool:
    return next_phase in ALLOWED_TRANSITIONS[phase]
