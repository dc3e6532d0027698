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


class Question(NamedTuple):
    """The reservation to be admitted."""

    requester: str
    wanted: Resources
    at: datetime
    """When the broker placed the reservation; opening hours are checked at this time."""


class Means(NamedTuple):
    """What a reservation is checked against."""

    policy: LendingPolicy | None
    free: Resources | None
    """Resources neither used nor held; None if capacity is not enforced."""
    lent: Iterable[Hold]
    """Holds of other reservations."""


def refusal(asked: Question, means: Means) -> str:
    """The first reason to refuse, for people; empty if the reservation is admissible."""
    return next(_refusals(asked, means), "")


def _refusals(asked: Question, means: Means) -> Iterator[str]:
    policy, lent = means.policy or lending.NO_POLICY, tuple(means.lent)
    yield from _by_access(asked, policy)
    yield from _by_hours(asked, policy)
    if means.free is not None:
        yield from _by_room(asked.wanted, means.free, policy.keep_back)
    yield from _by_cap(asked.wanted, lent, policy.max_lent, "")
    to_it = [hold for hold in lent if hold.requester == asked.requester]
    yield from _by_cap(asked.wanted, to_it, policy.max_per_requester, f" to {asked.requester}")


def _by_access(asked: Question, policy: LendingPolicy) -> Iterator[str]:
    if lending.matches(asked.requester, policy.deny):
        yield f"this cluster does not lend to {asked.requester}"
    if policy.allow and not lending.matches(asked.requester, policy.allow):
        yield f"{asked.requester} is not in this cluster's list of allowed requesters"


def _by_hours(asked: Question, policy: LendingPolicy) -> Iterator[str]:
    if policy.hours and not hours.Timetable((policy.hours,)).is_open(asked.at):
        yield f"outside this cluster's lending hours: {', '.join(policy.hours)}"


def _by_room(wanted: Resources, free: Resources, keep_back: Resources) -> Iterator[str]:
    if not wanted.fits_in(free):
        yield f"requested {wanted.describe()}, but only {_of(wanted, free)} is free"
    elif not wanted.fits_in(free - keep_back):
        yield (
            f"requested {wanted.describe()}, but of {_of(wanted, free)} free "
            f"this cluster keeps back {_of(wanted, keep_back)}"
        )


def _by_cap(
    wanted: Resources, lent: Iterable[Hold], caps: Mapping[str, int], whom: str
) -> Iterator[str]:
    total = sum((hold.resources for hold in lent), start=NOTHING)
    for name, most in caps.items():
        amount = wanted.amount(name)
        if amount and total.amount(name) + amount > most:
            yield (
                f"requested {resources.text(name, amount)} {name}, but this cluster lends at most "
                f"{resources.text(name, most)}{whom}, "
                f"of which {resources.text(name, total.amount(name))} is lent"
            )


def _of(wanted: Resources, there: Resources) -> str:
    """The free amounts of the requested resources only."""
    return Resources.of({name: max(there.amount(name), 0) for name, _ in wanted.items()}).describe()
