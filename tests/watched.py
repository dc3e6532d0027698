"""A ledger that looks at every hold in the moment it is taken, whichever event takes it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

import make
import reference
from kubelend.core.events import Change, Event
from kubelend.core.ledger import Ledger
from kubelend.core.models import ClusterId, Reservation, ReservationId
from kubelend.core.resources import Resources

Holds = set[tuple[ReservationId, ClusterId]]


class Watched(make.Recorder):
    """Remembers what should not have happened."""

    def __init__(self) -> None:
        super().__init__()
        self.overbooked: list[str] = []

    def apply(self, event: Event) -> Change:
        before, ends = holds(self), {r.id: r.expires_at for r in self.reservations.values()}
        change = super().apply(event)
        new = holds(self) - before
        for name, cluster in new:
            found = self.reservations[name]
            self.overbooked += self._shortages(found, cluster)
            self.overbooked += self._breaches(found, cluster, event.at)
            if found.left == ():  # a move takes nothing more of its requester's quota
                self.overbooked += self._excesses(found)
        for found in list(self.reservations.values()):
            longer = found.is_live and ends.get(found.id) not in {None, found.expires_at}
            if longer or any(found.id == name for name, _ in new):
                self.overbooked += self._overspent(found, event.at)
        return change

    def _shortages(self, found: Reservation, cluster: ClusterId) -> Iterator[str]:
        """What was not asked for may be short already: the cluster's own pods may have taken it."""
        offer = self.clusters[cluster].advertisement
        promised = self._loaned(cluster) + offer.allocated
        for name, _ in found.request.resources.items():  # noqa: PERF102 - not a dict
            if promised.amount(name) > offer.allocatable.amount(name):
                yield f"{found.id} took {name} that {cluster} does not have"

    def _breaches(self, found: Reservation, cluster: ClusterId, at: datetime) -> Iterator[str]:
        record, requester = self.clusters[cluster], found.requester
        own = _sum(reference.lent_to(requester, record, self))
        for policy in reference.policies(record, self):
            if policy.allow and not reference.is_named(requester, policy.allow):
                yield f"{cluster} does not lend to {requester}"
            if reference.is_named(requester, policy.deny):
                yield f"{cluster} denies {requester}"
            if not reference.is_open((policy.hours,), at):
                yield f"{cluster} is closed"
            for name, _ in found.request.resources.items():  # noqa: PERF102 - not a dict
                if self.available(cluster).amount(name) < policy.keep_back.amount(name):
                    yield f"{found.id} took {name} that {cluster} keeps back"
                if self._loaned(cluster).amount(name) > policy.max_lent.get(name, 10**20):
                    yield f"{cluster} lends more {name} than it wants to"
                if own.amount(name) > policy.max_per_requester.get(name, 10**20):
                    yield f"{cluster} lends {requester} more {name} than it wants to"

    def _excesses(self, found: Reservation) -> Iterator[str]:
        quota = self.limits(found.requester).quota
        mine = [r for r in self.reservations.values() if r.requester == found.requester]
        live = [one for one in mine if one.is_live]
        if quota is None:
            return
        if quota.reservations is not None and len(live) > quota.reservations:
            yield f"{found.requester} holds more reservations than its quota"
        for name, _ in found.request.resources.items():  # noqa: PERF102 - not a dict
            if _sum(live).amount(name) > quota.amounts.get(name, 10**20):
                yield f"{found.requester} holds more {name} than its quota"

    def _overspent(self, found: Reservation, at: datetime) -> Iterator[str]:
        quota = self.limits(found.requester).quota
        if quota is None or quota.budget is None or not found.hourly:
            return
        if found.currency != quota.currency:
            yield f"{found.id} costs another currency than the budget's"
        day = at.replace(hour=0, minute=0, second=0, microsecond=0)
        while found.expires_at is not None and day < found.expires_at:
            spent = sum(
                reference.spent_on(one, day, quota.currency)
                for one in self.reservations.values()
                if one.requester == found.requester
            )
            if spent > quota.budget:
                yield f"{found.requester} spends {float(spent)} on {day:%d %B}"
            day += timedelta(days=1)

    def _loaned(self, cluster: ClusterId) -> Resources:
        return _sum([r for r in self.reservations.values() if r.is_live and r.target == cluster])


def holds(ledger: Ledger) -> Holds:
    """Every live hold there is, as the records tell it: which reservation, on which cluster."""
    return {
        (found.id, found.target)
        for found in ledger.reservations.values()
        if found.phase in ("Reserved", "Active") and found.target is not None
    }


def _sum(reservations: list[Reservation]) -> Resources:
    return sum((found.request.resources for found in reservations), Resources())
