"""Why a request fits where it fits and nowhere else, and the smallest change that would help.

One explanation serves REST, the command line, conditions and the dashboard, so that all of them say
the same words. It is computed with the filters of the decision; a property says that they never disagree.
"""

from __future__ import annotations

import msgspec
import numpy as np

from kubelend.core import filters, nearness, policies, remedies
from kubelend.core.columns import Floats, Mask
from kubelend.core.errors import NoCapacity, QuotaExceeded
from kubelend.core.filters import Question
from kubelend.core.fleet import Fleet
from kubelend.core.models import ClusterId, Request
from kubelend.core.nearness import Nearness, Verdicts
from kubelend.core.refusals import Refusal
from kubelend.core.remedies import Remedy


class Candidate(msgspec.Struct, frozen=True, omit_defaults=True):
    """One cluster in the light of one request."""

    cluster: ClusterId
    refusals: tuple[Refusal, ...] = ()
    score: float | None = None
    price: float | None = None
    currency: str = ""
    remedy: Remedy | None = None


class Explanation(msgspec.Struct, frozen=True):
    """All clusters in the light of one request; `candidates` are the best and the nearest of them."""

    total: int
    fitting: int
    refusals: dict[Refusal, int]
    """How many clusters have this as their first refusal; with `fitting` they add up to `total`."""
    candidates: tuple[Candidate, ...] = ()
    remedy: Remedy | None = None
    quota: tuple[QuotaExceeded, ...] = ()
    """What of the requester's own quota a request would exceed, whatever the clusters say."""
    unknown: ClusterId | None = None
    """The cluster that the request is pinned to, if none of that name advertises."""

    def __str__(self) -> str:
        if not self.total:
            return "no cluster advertises yet"
        counts = sorted(self.refusals.items(), key=lambda item: (-item[1], item[0]))
        why = ", ".join(f"{count} {refusal}" for refusal, count in counts)
        noun = "cluster fits" if self.total == 1 else "clusters fit"
        unknown = "" if self.unknown is None else f"; cluster {self.unknown!r} is unknown"
        return f"{self.fitting}/{self.total} {noun}" + (f": {why}" if why else "") + unknown


def no_capacity(explanation: Explanation) -> NoCapacity:
    """The same as an error: what a caller hears that wanted a cluster and not an explanation."""
    hint = "" if explanation.remedy is None else explanation.remedy.text
    return NoCapacity(f"no suitable cluster: {explanation}", hint=hint, explanation=explanation)


def explain(question: Question, fleet: Fleet, limit: int) -> Explanation:
    """Count the refusals over all clusters, and look closely at the first `limit` of them."""
    verdicts = list(filters.verdicts(question, fleet))
    feasible, refusals = _histogram(verdicts, len(fleet))
    near = nearness.measure(question, fleet, verdicts)
    pinned = question.request.constraints.pinned
    return Explanation(
        total=len(fleet),
        fitting=int(feasible.sum()),
        refusals=refusals,
        candidates=_candidates(question, fleet, verdicts, feasible, near, limit),
        remedy=None if feasible.any() else _nearest_remedy(question, fleet, verdicts, near),
        unknown=pinned if pinned is not None and fleet.find(pinned) is None else None,
    )


def _histogram(verdicts: Verdicts, total: int) -> tuple[Mask, dict[Refusal, int]]:
    remaining, counts = np.ones(total, np.bool_), {}
    for refusal, mask in verdicts:
        refused = int((remaining & ~mask).sum())
        if refused:
            counts[refusal] = refused
        remaining &= mask
    return remaining, counts


def _candidates(
    question: Question,
    fleet: Fleet,
    verdicts: Verdicts,
    feasible: Mask,
    near: Nearness,
    limit: int,
) -> tuple[Candidate, ...]:
    if not limit or not len(fleet):
        return ()
    request = question.request
    weights = policies.of(request).weights
    scores = policies.weigh(weights, request, fleet, feasible) / policies.BILLION
    hourly = filters.hourly(request, fleet)
    merit = np.where(feasible, -scores, near.distance)
    order = np.lexsort((_between_equals(request, fleet, feasible), merit, ~feasible))[:limit]
    return tuple(
        _candidate(
            question, fleet, verdicts, near, int(row), float(scores[row]), float(hourly[row])
        )
        for row in order
    )


def _between_equals(request: Request, fleet: Fleet, feasible: Mask) -> Floats:
    """As `policies.best` tells equals apart, so that the first candidate is the one it chooses."""
    then = policies.of(request).then
    if not then:
        return np.zeros(len(fleet), np.float64)
    return np.where(feasible, -policies.weigh(then, request, fleet, feasible), 0.0)


def _candidate(
    question: Question,
    fleet: Fleet,
    verdicts: Verdicts,
    near: Nearness,
    row: int,
    score: float,
    hourly: float,
) -> Candidate:
    refusals = tuple(refusal for refusal, mask in verdicts if not mask[row])
    currency = remedies.currency(fleet, row)
    return Candidate(
        fleet.ids[row],
        refusals,
        score=None if refusals else score,
        price=hourly if currency else None,
        currency=currency,
        remedy=remedies.remedy(question, fleet, row, refusals, near),
    )


def _nearest_remedy(
    question: Question, fleet: Fleet, verdicts: Verdicts, near: Nearness
) -> Remedy | None:
    distance = near.distance
    for _ in range(min(_TRIES, len(fleet))):
        row = int(distance.argmin())
        if not np.isfinite(distance[row]):
            return None
        refusals = tuple(refusal for refusal, mask in verdicts if not mask[row])
        found = remedies.remedy(question, fleet, row, refusals, near)
        if found is not None:
            return found
        distance[row] = np.inf
    return None


_TRIES = 8
"""Of the nearest clusters some may be beyond remedy: those that never open, for example."""
