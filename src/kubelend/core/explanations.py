"""Why a request fits where it fits and nowhere else, and the smallest change that would help.

One explanation serves REST, the command line, conditions and the dashboard, so that all of them say
the same words. It is computed with the filters of the decision; a property says that they never disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from kubelend.core import filters, policies, prices, resources
from kubelend.core.errors import NoCapacity
from kubelend.core.filters import Question
from kubelend.core.fleet import UNPRICED, Columns, Fleet, Floats, Mask, Selection
from kubelend.core.models import ClusterId, Request
from kubelend.core.refusals import INSUFFICIENT, Refusal
from kubelend.core.resources import NOTHING, Resources

_INSUFFICIENT = {*INSUFFICIENT.values(), Refusal.INSUFFICIENT_EXTENDED}
_HELPLESS = {Refusal.IS_REQUESTER, Refusal.REFUSED_BEFORE, Refusal.STALE, Refusal.CORDONED}
"""Refusals that no other request of the same cluster would avoid."""
_PRICE = {Refusal.CURRENCY_MISMATCH, Refusal.TOO_EXPENSIVE}

Verdicts = Sequence[tuple[Refusal, Mask]]


class Remedy(msgspec.Struct, frozen=True, omit_defaults=True):
    """The smallest change to the request that would make it fit a cluster."""

    cluster: ClusterId
    text: str
    less: Resources = NOTHING
    max_price: int | None = None
    currency: str = ""
    """Of `max_price`: the cluster's own, which may be another than the request's."""
    drop_labels: dict[str, str] = {}


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

    def __str__(self) -> str:
        if not self.total:
            return "no cluster advertises yet"
        counts = sorted(self.refusals.items(), key=lambda item: (-item[1], item[0]))
        why = ", ".join(f"{count} {refusal}" for refusal, count in counts)
        noun = "cluster fits" if self.total == 1 else "clusters fit"
        return f"{self.fitting}/{self.total} {noun}" + (f": {why}" if why else "")


def no_capacity(explanation: Explanation) -> NoCapacity:
    """The same as an error: what a caller hears that wanted a cluster and not an explanation."""
    hint = "" if explanation.remedy is None else explanation.remedy.text
    return NoCapacity(f"no suitable cluster: {explanation}", hint=hint, explanation=explanation)


def explain(question: Question, fleet: Fleet, limit: int) -> Explanation:
    """Count the refusals over all clusters, and look closely at the first `limit` of them."""
    verdicts = list(filters.verdicts(question, fleet))
    feasible, refusals = _histogram(verdicts, len(fleet))
    distance = _distance(question, fleet, verdicts)
    return Explanation(
        total=len(fleet),
        fitting=int(feasible.sum()),
        refusals=refusals,
        candidates=_candidates(question, fleet, verdicts, feasible, distance, limit),
        remedy=None if feasible.any() else _nearest_remedy(question, fleet, verdicts, distance),
    )


def _histogram(verdicts: Verdicts, total: int) -> tuple[Mask, dict[Refusal, int]]:
    remaining, counts = np.ones(total, np.bool_), {}
    for refusal, mask in verdicts:
        refused = int((remaining & ~mask).sum())
        if refused:
            counts[refusal] = refused
        remaining &= mask
    return remaining, counts


def _distance(question: Question, fleet: Fleet, verdicts: Verdicts) -> Floats:
    """How far each cluster is from fitting: missing shares, a whole step per other refusal."""
    distance = np.zeros(len(fleet), np.float64)
    for refusal, mask in verdicts:
        if refusal in _HELPLESS:
            distance[~mask] = np.inf
        elif refusal not in _INSUFFICIENT:
            distance[~mask] += 1
    for name, wanted in question.request.resources.items():
        free = fleet.free(name)
        missing = wanted - (0 if free is None else free)
        distance += np.clip(missing, 0, None) / wanted
    distance[_has_nothing(question, fleet)] = np.inf
    return distance


def _has_nothing(question: Question, fleet: Fleet) -> Mask:
    """Where no part is free and no waiting helps: less of the request would be nothing at all."""
    nothing, never = np.ones(len(fleet), np.bool_), np.zeros(len(fleet), np.bool_)
    for name, wanted in question.request.resources.items():
        free, ceiling = fleet.free(name), fleet.ceiling(name)
        nothing &= free is None or free == 0
        never |= ceiling is None or ceiling < wanted
    return nothing & never


def _candidates(
    question: Question,
    fleet: Fleet,
    verdicts: Verdicts,
    feasible: Mask,
    distance: Floats,
    limit: int,
) -> tuple[Candidate, ...]:
    if not limit or not len(fleet):
        return ()
    request = question.request
    weights = policies.of(request).weights
    scores = policies.weigh(weights, request, fleet, feasible) / policies.BILLION
    hourly = filters.hourly(request, fleet)
    nearness = np.where(feasible, -scores, distance)
    order = np.lexsort((_between_equals(request, fleet, feasible), nearness, ~feasible))[:limit]
    return tuple(
        _candidate(question, fleet, verdicts, int(row), float(scores[row]), float(hourly[row]))
        for row in order
    )


def _between_equals(request: Request, fleet: Fleet, feasible: Mask) -> Floats:
    """As `policies.best` tells equals apart, so that the first candidate is the one it chooses."""
    then = policies.of(request).then
    if not then:
        return np.zeros(len(fleet), np.float64)
    return np.where(feasible, -policies.weigh(then, request, fleet, feasible), 0.0)


def _candidate(
    question: Question, fleet: Fleet, verdicts: Verdicts, row: int, score: float, hourly: float
) -> Candidate:
    refusals = tuple(refusal for refusal, mask in verdicts if not mask[row])
    currency = _currency(fleet, row)
    return Candidate(
        fleet.ids[row],
        refusals,
        score=None if refusals else score,
        price=hourly if currency else None,
        currency=currency,
        remedy=_remedy(question, fleet, row, refusals),
    )


def _nearest_remedy(
    question: Question, fleet: Fleet, verdicts: Verdicts, distance: Floats
) -> Remedy | None:
    if not len(fleet) or not np.isfinite(distance.min()):
        return None
    row = int(distance.argmin())
    return _remedy(question, fleet, row, tuple(r for r, mask in verdicts if not mask[row]))


def _remedy(
    question: Question, fleet: Fleet, row: int, refusals: tuple[Refusal, ...]
) -> Remedy | None:
    if not refusals or _HELPLESS.intersection(refusals):
        return None
    less = _missing(question, fleet, row)
    waits = bool(less) and _fits_empty(question, fleet, row)
    if less == question.request.resources:
        if not waits:
            return None
        less = NOTHING
    price = _price_needed(question, fleet, row) if _PRICE.intersection(refusals) else None
    currency = "" if price is None else _currency(fleet, row)
    labels = _labels_missing(question, fleet, row)
    steps = [_STEPS[refusal] for refusal in refusals if refusal in _STEPS]
    steps += _amount_steps(less, waits)
    if price is not None:
        steps.append(f"allow {prices.text(price)} {currency} per hour")
    steps += [f"drop the label {key}={value}" for key, value in labels.items()]
    text = f"{fleet.ids[row]} fits if you {' and '.join(steps)}"
    return Remedy(fleet.ids[row], text, less, price, currency, labels)


_STEPS = {
    Refusal.NOT_PINNED: "do not pin another cluster",
    Refusal.EXCLUDED: "do not exclude it",
    Refusal.HELD_FOR_WAITER: "wait, or ask with a higher priority",
}


def _missing(question: Question, fleet: Fleet, row: int) -> Resources:
    return question.request.resources.shortfall(_amounts(fleet.free, question, row))


def _fits_empty(question: Question, fleet: Fleet, row: int) -> bool:
    return question.request.resources.fits_in(_amounts(fleet.ceiling, question, row))


def _amounts(column: Columns, question: Question, row: int) -> Resources:
    amounts = {}
    for name, _ in question.request.resources.items():  # noqa: PERF102 - not a dict: it has no keys()
        values = column(name)
        amounts[name] = 0 if values is None else int(values[row])
    return Resources.of(amounts)


def _amount_steps(less: Resources, waits: bool) -> Iterator[str]:
    wait = "wait until reservations there end"
    if less:
        amounts = " and ".join(f"{resources.text(*part)} {part[0]}" for part in less.items())
        yield f"ask for {amounts} less, or {wait}" if waits else f"ask for {amounts} less"
    elif waits:
        yield wait


def _price_needed(question: Question, fleet: Fleet, row: int) -> int:
    """The smallest maximum that lets this cluster pass."""
    only = Selection(fleet, np.array([row]))
    hourly = float(filters.hourly(question.request, only)[0])
    rounded_down = int(hourly * prices.BILLIONTHS)
    return rounded_down if hourly <= prices.limit(rounded_down) else rounded_down + 1


def _currency(fleet: Fleet, row: int) -> str:
    code = int(fleet.currency[row])
    return "" if code == UNPRICED else code.to_bytes(8).lstrip(b"\0").decode("ascii")


def _labels_missing(question: Question, fleet: Fleet, row: int) -> dict[str, str]:
    has = fleet.labels[row]
    wanted = question.request.constraints.labels
    return {key: value for key, value in wanted.items() if has.get(key) != value}
