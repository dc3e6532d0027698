"""Who serves a request: filter, score, choose. Equal inputs give equal decisions."""

from __future__ import annotations

import msgspec

from kubelend.core import explanations, filters, policies
from kubelend.core.explanations import Explanation
from kubelend.core.filters import Question
from kubelend.core.fleet import Fleet
from kubelend.core.models import ClusterId


class Placement(msgspec.Struct, frozen=True):
    """Yes: this cluster, with the score that won."""

    cluster: ClusterId
    score: float


class NoFit(msgspec.Struct, frozen=True):
    """No, and why."""

    explanation: Explanation


def decide(question: Question, fleet: Fleet) -> Placement | NoFit:
    """The best cluster that fits, or the reasons why none does."""
    placement = choose(question, fleet)
    return placement or NoFit(explanations.explain(question, fleet, limit=0))


def choose(question: Question, fleet: Fleet) -> Placement | None:
    """The same for who need not be told why not."""
    feasible = filters.passing(question, fleet)
    best = policies.best(question.request, fleet, feasible)
    return None if best is None else Placement(fleet.ids[best.row], best.score)
