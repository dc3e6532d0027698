"""The phases of a reservation, why it is in one, and which may follow which. All of it is API."""

from __future__ import annotations

from enum import StrEnum


class _Word(StrEnum):
    """A text in every way: enumerations would hash their names in Python, on every look into a set."""

    __hash__ = str.__hash__


class Phase(_Word):
    """Where a reservation stands."""

    PENDING = "Pending"  # asked for, and waiting for capacity
    RESERVED = "Reserved"  # a provider is chosen and the amount is locked there
    ACTIVE = "Active"  # the requester uses it
    RELEASED = "Released"  # given back; final
    FAILED = "Failed"  # never had, or lost without the requester's wish; final


class Reason(_Word):
    """Why a reservation is in its phase."""

    WAITING = "Waiting"  # Pending: nothing fits yet
    LOCKED = "Locked"  # Reserved: placed at the first provider
    MOVED = "Moved"  # Reserved: placed anew, for the one before refused, was drained or silent
    IN_USE = "InUse"  # Active: the requester said so
    PROVIDER_SILENT = "ProviderSilent"  # Reserved, Active: its provider is, and no other fits
    BY_REQUESTER = "ReleasedByRequester"  # Released: the requester gave it back
    BY_ADMIN = "ReleasedByAdmin"  # Released: an administrator took it back
    DELETED = "Deleted"  # Released: somebody deleted its object in Kubernetes
    EXPIRED = "Expired"  # Released: its duration is over
    DRAINED = "Drained"  # Released: its provider was drained, and no other fits
    WAIT_TIMED_OUT = "WaitTimedOut"  # Failed: nothing fitted within the time it would wait
    REFUSED = "ProviderRefused"  # Failed: its provider refused, and no other fits


LIVE = frozenset({Phase.RESERVED, Phase.ACTIVE})
FINAL = frozenset({Phase.RELEASED, Phase.FAILED})

FOLLOWS: dict[Phase, frozenset[Phase]] = {
    Phase.PENDING: frozenset({Phase.PENDING, Phase.RESERVED, Phase.RELEASED, Phase.FAILED}),
    Phase.RESERVED: frozenset({Phase.RESERVED, Phase.ACTIVE, Phase.RELEASED, Phase.FAILED}),
    Phase.ACTIVE: frozenset({Phase.ACTIVE, Phase.RESERVED, Phase.RELEASED, Phase.FAILED}),
    Phase.RELEASED: frozenset(),
    Phase.FAILED: frozenset(),
}
"""Active goes back to Reserved when it moves to another provider: the requester has to connect anew."""


def may_follow(phase: Phase, next_phase: Phase) -> bool:
    return next_phase in FOLLOWS[phase]
