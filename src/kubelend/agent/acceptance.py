"""Whether a provider keeps the promise that the broker has made for it: its own policy, and what is free.

The broker has asked the same questions, but of an advertisement that may be half a minute old. Called by
`agent.providing`; the answer is a sentence, which the requester may read in the end.
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
    """One reservation."""

    requester: str
    wanted: Resources
    at: datetime
    """When the broker chose this cluster, which is when its opening hours count."""


class Means(NamedTuple):
    """What there is to answer with."""

    policy: LendingPolicy | None
    free: Resources | None
    """What nobody uses or was promised; None if that is not to matter."""
    lent: Iterable[Hold]
    """What others have been promised."""


def refusal(asked: Question, means: Means) -> str:
    """Why not, for a person; empty if nothing speaks against it."""
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
        yield f"this cluster lends to others only, not to {asked.requester}"


def _by_hours(asked: Question, policy: LendingPolicy) -> Iterator[str]:
    if policy.hours and not hours.Timetable((policy.hours,)).is_open(asked.at):
        yield f"this cluster lends at other times: {', '.join(policy.hours)}"


def _by_room(wanted: Resources, free: Resources, keep_back: Resources) -> Iterator[str]:
    if not wanted.fits_in(free):
        yield f"asked for {wanted.describe()}, but only {_of(wanted, free)} is free now"
    elif not wanted.fits_in(free - keep_back):
        yield (
            f"asked for {wanted.describe()}, but of the {_of(wanted, free)} that is free now "
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
                f"asked for {resources.text(name, amount)} {name}, but this cluster lends "
                f"{resources.text(name, most)}{whom} at most, "
                f"of which {resources.text(name, total.amount(name))} is lent"
            )


def _of(wanted: Resources, there: Resources) -> str:
    """How much there is of what is wanted."""
    return Resources.of({name: max(there.amount(name), 0) for name, _ in wanted.items()}).describe()
