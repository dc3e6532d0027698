"""Why a cluster cannot serve a request: machine-readable, in the order in which filters look."""

from __future__ import annotations

from enum import StrEnum


class Refusal(StrEnum):
    """One reason of one cluster. The values are API."""

    IS_REQUESTER = "IsRequester"  # a cluster does not lend to itself
    NOT_PINNED = "NotPinned"  # the request names another cluster
    EXCLUDED = "Excluded"  # the request excludes it
    LEFT_BEFORE = "LeftBefore"  # it refused this reservation, was drained of it or silent
    REQUESTER_NOT_ALLOWED = "RequesterNotAllowed"  # it lends to others only
    REQUESTER_DENIED = "RequesterDenied"  # it does not lend to this requester
    STALE = "Stale"  # its advertisement is too old to be believed
    CORDONED = "Cordoned"  # an administrator closed it to new reservations
    OUTSIDE_OPENING_HOURS = "OutsideOpeningHours"  # it lends at other times
    LABEL_MISMATCH = "LabelMismatch"  # it lacks a label that the request wants
    CURRENCY_MISMATCH = (
        "CurrencyMismatch"  # its price cannot be compared with the maximum, or the budget
    )
    TOO_EXPENSIVE = "TooExpensive"  # its price for this request is above the maximum
    OVER_BUDGET = "OverBudget"  # its price is above what the requester's budget leaves
    INSUFFICIENT_CPU = "InsufficientCPU"
    INSUFFICIENT_MEMORY = "InsufficientMemory"
    INSUFFICIENT_GPU = "InsufficientGPU"
    INSUFFICIENT_STORAGE = "InsufficientStorage"
    INSUFFICIENT_EXTENDED = "InsufficientExtendedResource"
    KEPT_BACK = "KeptBack"  # it would fit, but for what the cluster keeps for itself
    LENDING_CAP_REACHED = "LendingCapReached"  # it would lend more in total than it wants to
    REQUESTER_CAP_REACHED = (
        "RequesterCapReached"  # it would lend more to this requester than it wants to
    )
    HELD_FOR_WAITER = (
        "HeldForWaiter"  # its capacity is kept for a request that waits longer or matters more
    )


INSUFFICIENT = {
    "cpu": Refusal.INSUFFICIENT_CPU,
    "memory": Refusal.INSUFFICIENT_MEMORY,
    "gpu": Refusal.INSUFFICIENT_GPU,
    "storage": Refusal.INSUFFICIENT_STORAGE,
}
