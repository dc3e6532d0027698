"""Live reservations per cluster, and their sum."""

from __future__ import annotations

from collections.abc import Collection

from kubelend.core.models import ClusterId, Reservation, ReservationId
from kubelend.core.resources import NOTHING, Resources


class HeldResources:
    """Resources held on each cluster by live reservations."""

    def __init__(self) -> None:
        self._sums: dict[ClusterId, Resources] = {}
        self._lent: dict[ClusterId, dict[ReservationId, None]] = {}

    def total(self, cluster: ClusterId) -> Resources:
        return self._sums.get(cluster, NOTHING)

    def reservations_on(self, cluster: ClusterId) -> Collection[ReservationId]:
        """Unordered."""
        return self._lent.get(cluster, ())

    def add(self, cluster: ClusterId, found: Reservation) -> None:
        self._lent.setdefault(cluster, {})[found.id] = None
        self._set_total(cluster, self.total(cluster) + found.request.resources)

    def remove(self, cluster: ClusterId, found: Reservation) -> None:
        del self._lent[cluster][found.id]
        self._set_total(cluster, self.total(cluster) - found.request.resources)

    def _set_total(self, cluster: ClusterId, total: Resources) -> None:
        if total:
            self._sums[cluster] = total
        else:
            self._sums.pop(cluster, None)
