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
    PROVIDER_UNREACHABLE = (
        "ProviderUnreachable"  # Reserved, Active: unreachable, no other cluster fits
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
"""Active returns to Reserved when it moves: the requester has to connect to the new provider."""


class Role(StrEnum):
    """Role of a caller or member."""

    CLUSTER = "cluster"  # lends and borrows under its own name
    VIEWER = "viewer"  # a user with read access to everything
    ADMIN = "admin"  # a user with write access to everything
    PROXY = "proxy"  # terminates TLS and forwards client certificates; has no access itself


class Rejection(StrEnum):
    """Why one cluster was rejected. The values are API."""

    IS_REQUESTER = "IsRequester"  # a cluster does not borrow from itself
    NOT_PINNED = "NotPinned"  # the request is pinned to another cluster
    EXCLUDED = "Excluded"  # the request excludes it
    PREVIOUS_PROVIDER = (
        "PreviousProvider"  # a previous provider: it refused, was drained or unreachable
    )
    REQUESTER_NOT_ALLOWED = "RequesterNotAllowed"  # the requester is not on its allow list
    REQUESTER_DENIED = "RequesterDenied"  # the requester is on its deny list
    STALE = "Stale"  # its advertisement has expired
    CORDONED = "Cordoned"  # cordoned by an administrator
    OUTSIDE_OPENING_HOURS = "OutsideOpeningHours"  # outside its opening hours
    LABEL_MISMATCH = "LabelMismatch"  # lacks a label that the request requires
    CURRENCY_MISMATCH = "CurrencyMismatch"  # another currency than the maximum price or budget
    TOO_EXPENSIVE = "TooExpensive"  # costs more than the maximum price
    OVER_BUDGET = "OverBudget"  # costs more than the requester's remaining budget
    INSUFFICIENT_CPU = "InsufficientCPU"
    INSUFFICIENT_MEMORY = "InsufficientMemory"
    INSUFFICIENT_GPU = "InsufficientGPU"
    INSUFFICIENT_STORAGE = "InsufficientStorage"
    INSUFFICIENT_EXTENDED = "InsufficientExtendedResource"
    KEPT_BACK = "KeptBack"  # fits only into what the policy keeps back for the cluster itself
    LENDING_CAP_REACHED = "LendingCapReached"  # would exceed the policy's total cap
    REQUESTER_CAP_REACHED = "RequesterCapReached"  # would exceed the policy's cap per requester
    NOMINATED_FOR_OTHER = "NominatedForOther"  # nominated for a waiting request of higher rank


INSUFFICIENT_BY_RESOURCE = {
    "cpu": Rejection.INSUFFICIENT_CPU,
    "memory": Rejection.INSUFFICIENT_MEMORY,
    "gpu": Rejection.INSUFFICIENT_GPU,
    "storage": Rejection.INSUFFICIENT_STORAGE,
}

INSUFFICIENT_AMOUNT = frozenset(
    {
        *INSUFFICIENT_BY_RESOURCE.values(),
        Rejection.INSUFFICIENT_EXTENDED,
        Rejection.KEPT_BACK,
        Rejection.LENDING_CAP_REACHED,
        Rejection.REQUESTER_CAP_REACHED,
    }
)
"""A smaller request would avoid these."""
