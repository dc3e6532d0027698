"""Reasons why a cluster is rejected for a request, in the order in which the filters run."""

from __future__ import annotations

from enum import StrEnum


class Rejection(StrEnum):
    """Why one cluster was rejected. The values are API."""

    IS_REQUESTER = "IsRequester"  # a cluster does not borrow from itself
    NOT_PINNED = "NotPinned"  # the request is pinned to another cluster
    EXCLUDED = "Excluded"  # the request excludes it
    LEFT_BEFORE = "LeftBefore"  # a previous provider: it refused, was drained or unreachable
    REQUESTER_NOT_ALLOWED = "RequesterNotAllowed"  # the requester is not on its allow list
    REQUESTER_DENIED = "RequesterDenied"  # the requester is on its deny list
    STALE = "Stale"  # its advertisement has expired
    CORDONED = "Cordoned"  # cordoned by an administrator
    OUTSIDE_OPENING_HOURS = "OutsideOpeningHours"  # outside its opening hours
    LABEL_MISMATCH = "LabelMismatch"  # lacks a label that the request requires
    CURRENCY_MISMATCH = (
        "CurrencyMismatch"  # priced in another currency than the maximum price or the budget
    )
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
    HELD_FOR_WAITER = "HeldForWaiter"  # nominated for a waiting request of higher rank


INSUFFICIENT_BY_RESOURCE = {
    "cpu": Rejection.INSUFFICIENT_CPU,
    "memory": Rejection.INSUFFICIENT_MEMORY,
    "gpu": Rejection.INSUFFICIENT_GPU,
    "storage": Rejection.INSUFFICIENT_STORAGE,
}
