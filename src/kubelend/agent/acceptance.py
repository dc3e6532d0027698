"""Admission of a reservation by its provider: the lending policy, and the capacity that is free now.

The broker has applied the same rules, but to an advertisement that may be half a minute old. The result
is a refusal reason that the requester may read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import NamedTuple

from kubelend.core import hours, lending, resources
from kubelend.core.inventory import Hold
from kubelend.core.lending import LendingPolicy
from kubelend.core.resources import NOTHING, Resources


class HoldRequest(NamedTuple):
    """The reservation to be admitted."""

    requester: str
    resources: Resources
    at: datetime
    """When the broker placed the reservation; opening hours are checked at this time."""


class Capacity(NamedTuple):
    """What a reservation is checked against."""

    policy: LendingPolicy | None
    free: Resources | None
    """Resources neither used nor held; None if capacity is not enforced."""
    held: Iterable[Hold]
    """Holds of other reservations."""


def refusal_reason(request: HoldRequest, capacity: Capacity) -> str:
    """The first reason to refuse, for people; empty if the reservation is admissible."""
    return next(_refusal_reasons(request, capacity), "")


def _refusal_reasons(request: HoldRequest, capacity: Capacity) -> Iterator[str]:
    policy, lent = capacity.policy or lending.NO_POLICY, tuple(capacity.held)
    yield from _access_refusals(request, policy)
    yield from _opening_hours_refusals(request, policy)
    if capacity.free is not None:
        yield from _free_capacity_refusals(request.resources, capacity.free, policy.keep_back)
    yield from _cap_refusals(request.resources, lent, policy.max_lent, "")
    to_it = [hold for hold in lent if hold.requester == request.requester]
    yield from _cap_refusals(
        request.resources, to_it, policy.max_per_requester, f" to {request.requester}"
    )


def _access_refusals(request: HoldRequest, policy: LendingPolicy) -> Iterator[str]:
    if lending.matches_any(request.requester, policy.deny):
        yield f"this cluster does not lend to {request.requester}"
    if policy.allow and not lending.matches_any(request.requester, policy.allow):
        yield f"{request.requester} is not in this cluster's list of allowed requesters"


def _opening_hours_refusals(request: HoldRequest, policy: LendingPolicy) -> Iterator[str]:
    if policy.hours and not hours.OpeningHours((policy.hours,)).is_open(request.at):
        yield f"outside this cluster's lending hours: {', '.join(policy.hours)}"


def _free_capacity_refusals(
    wanted: Resources, free: Resources, keep_back: Resources
) -> Iterator[str]:
    if not wanted.fits_in(free):
        yield f"requested {wanted.describe()}, but only {_amounts_of(wanted, free)} is free"
    elif not wanted.fits_in(free - keep_back):
        yield (
            f"requested {wanted.describe()}, but of {_amounts_of(wanted, free)} free "
            f"this cluster keeps back {_amounts_of(wanted, keep_back)}"
        )


def _cap_refusals(
    wanted: Resources, lent: Iterable[Hold], caps: Mapping[str, int], to_requester: str
) -> Iterator[str]:
    total = sum((hold.resources for hold in lent), start=NOTHING)
    for name, most in caps.items():
        amount = wanted.amount(name)
        if amount and total.amount(name) + amount > most:
            yield (
                f"requested {resources.format_amount(name, amount)} {name}, but this cluster lends at most "
                f"{resources.format_amount(name, most)}{to_requester}, "
                f"of which {resources.format_amount(name, total.amount(name))} is lent"
            )


def _amounts_of(wanted: Resources, there: Resources) -> str:
    """The free amounts of the requested resources only."""
    return Resources.of({name: max(there.amount(name), 0) for name, _ in wanted.items()}).describe()
