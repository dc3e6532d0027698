"""Placement: filter, score, choose. Deterministic."""

from __future__ import annotations

import msgspec

from kubelend.core import explanations, filters, scoring
from kubelend.core.explanations import Explanation
from kubelend.core.filters import PlacementQuery
from kubelend.core.fleet import Fleet
from kubelend.core.models import ClusterId


class Placement(msgspec.Struct, frozen=True):
    """The chosen cluster with its score."""

    cluster: ClusterId
    score: float


class NoFit(msgspec.Struct, frozen=True):
    """No cluster fits; the explanation has the reasons."""

    explanation: Explanation


def decide_placement(query: PlacementQuery, fleet: Fleet) -> Placement | NoFit:
    """The best cluster that fits, or the reasons why none does."""
    placement = choose_cluster(query, fleet)
    return placement or NoFit(explanations.explain_placement(query, fleet, limit=0))


def choose_cluster(query: PlacementQuery, fleet: Fleet) -> Placement | None:
    """The best cluster that fits, without an explanation if none does."""
    feasible = filters.feasible_clusters(query, fleet)
    best = scoring.best_row(query.request, fleet, feasible)
    return None if best is None else Placement(fleet.ids[best.row], best.score)
