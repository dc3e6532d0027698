"""The fleet: all clusters as numpy columns, so that a placement over thousands is a few vector
operations.

The ledger maintains it; filters and scores read it. Rows are ordered by cluster ID, so the first of
equal scores has the smaller ID. Scratch buffers are reused: the result of a score function is valid
until the next placement.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from kubelend.core.columns import (
    FOREVER,
    INT64_MIN,
    NEVER,
    ColumnGroup,
    Floats,
    Ints,
    LimitColumn,
    Mask,
    OpeningHoursColumn,
    PolicyColumns,
    ResourceColumn,
)
from kubelend.core.durations import to_micros
from kubelend.core.lending import EffectivePolicy
from kubelend.core.models import Cluster, ClusterId, Reservation
from kubelend.core.prices import Prices
from kubelend.core.resources import NOTHING, Resources

UNPRICED = -1
NO_NOMINATION = INT64_MIN
"""Priority in rows without a nomination: every request ranks above it."""

MAX_LABEL_MASKS = 256
"""Cache size; the labels come from requests, so the cache is bounded."""

_STANDARD_RESOURCES = ("cpu", "memory", "gpu", "storage")


def currency_code(currency: str) -> int:
    """A currency code of at most eight letters as an integer."""
    return int.from_bytes(currency.encode("ascii"))


def _scratch_buffers(capacity: int) -> list[Floats]:
    return [np.empty(capacity, np.float64) for _ in range(4)]


class Fleet(ColumnGroup):
    """All clusters, one row each."""

    def __init__(self, capacity: int = 64) -> None:
        self.ids: list[ClusterId] = []
        self.labels: list[dict[str, str]] = []
        self.prices: list[Prices | None] = []
        self.nomination_count = 0
        self.policy_columns: PolicyColumns | None = None
        """Columns of the lending policies; None while no cluster has one."""
        self.lent_by_requester = LentByRequester()
        self._extended: list[frozenset[str]] = []
        self._offer_counts: Counter[str] = Counter()
        """Number of clusters that offer each extended resource."""
        self._columns = {name: ResourceColumn(capacity) for name in _STANDARD_RESOURCES}
        self._valid_until = np.zeros(capacity, np.int64)
        self._uncordoned = np.zeros(capacity, np.bool_)
        self._usable = np.zeros(capacity, np.bool_)
        """Neither cordoned, stale nor closed; cached from `_usable_from` to `_usable_until`."""
        self._usable_from = self._usable_until = NEVER
        self._currency = np.full(capacity, UNPRICED, np.int64)
        self._rates = np.zeros((len(_STANDARD_RESOURCES), capacity), np.float64)
        self._nomination_priority = np.full(capacity, NO_NOMINATION, np.int64)
        self._nomination_ticket = np.zeros(capacity, np.int64)
        self._label_masks: dict[tuple[str, str], Mask] = {}
        self._scratch = _scratch_buffers(capacity)
        self._rows = slice(0)
        """The part of every array that is in use."""

    def __len__(self) -> int:
        return len(self.ids)

    # -- written by the ledger

    def put(self, cluster: Cluster, free: Resources) -> None:
        """Adds or rewrites the row of a cluster; its nomination stays."""
        row = bisect_left(self.ids, cluster.id)
        if row == len(self.ids) or self.ids[row] != cluster.id:
            self._insert(row, cluster.id)
        advertisement = cluster.advertisement
        self._valid_until[row] = to_micros(cluster.valid_until)
        self._uncordoned[row] = cluster.cordon is None
        self._set_usable(row)
        if self.labels[row] != advertisement.labels:
            self.labels[row] = advertisement.labels
            self._label_masks.clear()
        self._set_prices(row, cluster)
        self._set_extended(row, frozenset(advertisement.allocatable.extended))
        ceiling = cluster.ceiling.clamped()
        for name, column in self._columns.items():
            column.ceiling[row] = ceiling.amount(name)
            column.allocatable[row] = advertisement.allocatable.amount(name) or 1
            column.free[row] = column.free_float[row] = free.amount(name)

    def renew_validity(self, cluster: Cluster) -> None:
        """Hot path of an advertisement that only extends the validity."""
        row = self._row(cluster.id)
        self._valid_until[row] = to_micros(cluster.valid_until)
        self._set_usable(row)

    def set_free(self, cluster: ClusterId, free: Resources, changed: Resources) -> None:
        """Hot path of a reservation: updates the free amounts of the requested resources."""
        row = self._row(cluster)
        for name, _ in changed.items():  # noqa: PERF102 - not a dict
            column = self._columns.get(name)
            if column is not None:
                column.free[row] = column.free_float[row] = free.amount(name)

    def set_policy(self, cluster: Cluster, lending: EffectivePolicy | None) -> None:
        """Writes or clears the policy of a cluster. Call it after each `put`."""
        if lending is None and self.policy_columns is None:
            return
        row = self._row(cluster.id)
        if self.policy_columns is None:
            self.policy_columns = PolicyColumns(len(self._uncordoned))
        if self.policy_columns.set_policy(row, lending):
            self._usable_until = NEVER
        if lending is not None:
            ceiling, offer = lending.lendable(cluster.ceiling, NOTHING), cluster.advertisement
            for name, column in self._columns.items():
                column.ceiling[row] = ceiling.amount(name)
                if offer.allocatable.amount(name):
                    self.policy_columns.column(name).set_policy(row, name, lending)
                else:
                    self.policy_columns.column(name).clear(row)
        elif not self.policy_columns.policy_count:
            self.policy_columns = None

    def apply_policy(
        self,
        cluster: ClusterId,
        lending: EffectivePolicy,
        available: Resources,
        reserved: Resources,
    ) -> None:
        """Subtracts what a policy withholds. Call it after each `put` and `set_free`."""
        row, bounds = self._row(cluster), self.policy_columns
        if bounds is None:
            return
        for name, column in self._columns.items():
            most = lending.max_lent.get(name)
            left = FOREVER if most is None else max(most - reserved.amount(name), 0)
            column.free[row] = bounds.column(name).update_free(row, available.amount(name), left)

    def set_nomination(self, cluster: ClusterId, rank: tuple[int, int] | None) -> None:
        """Nominates a cluster for the request of this priority and ticket, or clears the nomination."""
        row = self.find_row(cluster)
        if row is None:
            return
        self.nomination_count += int(rank is not None) - int(
            self._nomination_priority[row] != NO_NOMINATION
        )
        self._nomination_priority[row], self._nomination_ticket[row] = rank or (NO_NOMINATION, 0)

    def remove(self, cluster: ClusterId) -> None:
        row = self._row(cluster)
        self.set_nomination(cluster, None)
        if self.policy_columns is not None:
            self.policy_columns.set_policy(row, None)
            self.policy_columns = self.policy_columns if self.policy_columns.policy_count else None
        for array in self.arrays():
            array[..., row : len(self) - 1] = array[..., row + 1 : len(self)]
        self._set_extended(row, frozenset())
        del self.ids[row], self.labels[row], self.prices[row], self._extended[row]
        self._rows = slice(len(self))
        if self.policy_columns is not None:
            self.policy_columns.on_row_removed()
        self._label_masks.clear()

    # -- read by filters and scores

    def find_row(self, cluster: ClusterId) -> int | None:
        row = bisect_left(self.ids, cluster)
        return row if row < len(self.ids) and self.ids[row] == cluster else None

    def page(self, after: str, limit: int) -> list[ClusterId]:
        """The next page of cluster IDs."""
        start = bisect_right(self.ids, after) if after else 0
        return self.ids[start : start + limit]

    def free(self, name: str) -> Ints | None:
        column = self._columns.get(name)
        return None if column is None else column.free[self._rows]

    def available(self, name: str) -> Ints | None:
        """Free amounts without the effect of policies."""
        free = self.free(name)
        if free is None or self.policy_columns is None:
            return free
        size = len(self)
        return np.where(
            self.policy_columns.has_policy[:size],
            self.policy_columns.column(name).available[:size],
            free,
        )

    def limit_column(self, name: str) -> LimitColumn | None:
        """Policy limits of a resource; None if there are no policies or no cluster offers it."""
        if self.policy_columns is None or name not in self._columns:
            return None
        return self.policy_columns.column(name)

    def requester_cap_left(self, name: str, requester: ClusterId) -> Ints | None:
        """What each cluster may still lend to a requester under its cap per requester; None as above."""
        bound = self.limit_column(name)
        if bound is None:
            return None
        left = bound.requester_cap[self._rows]
        lent_by_provider = self.lent_by_requester.for_requester(requester)
        if lent_by_provider:
            left = left.copy()
        for provider, lent in lent_by_provider.items():
            row = self.find_row(provider)
            if row is not None:
                left[row] -= lent.amount(name)
        return left

    def lendable(self, name: str, requester: ClusterId) -> Ints | None:
        """Free amounts within the cap per requester; None if no cluster offers the resource."""
        free, left = self.free(name), self.requester_cap_left(name, requester)
        return free if free is None or left is None else np.minimum(free, left)

    def ceiling(self, name: str) -> Ints | None:
        column = self._columns.get(name)
        return None if column is None else column.ceiling[self._rows]

    def free_and_allocatable(self, name: str) -> tuple[Floats, Floats] | None:
        """Free and allocatable amounts as floats for scores; the divisor is never zero."""
        column = self._columns.get(name)
        if column is None:
            return None
        return column.free_float[self._rows], column.allocatable[self._rows]

    @property
    def valid_until(self) -> Ints:
        return self._valid_until[self._rows]

    def usable(self, now: int) -> Mask:
        """Clusters that are neither cordoned, stale nor outside their hours, as a new array."""
        if not self._usable_from <= now < self._usable_until:
            self._refresh_usable(now)
        return self._usable[self._rows].copy()

    @property
    def _opening_hours(self) -> OpeningHoursColumn | None:
        """None if no cluster has opening hours."""
        columns = self.policy_columns
        return columns.opening_hours if columns and columns.opening_hours.hours else None

    def within_hours(self, now: int) -> Mask | None:
        """Clusters within their opening hours; None if none has any."""
        column = self._opening_hours
        if column is None:
            return None
        column.refresh(now)
        return column.open_mask(len(self))

    def is_within_hours(self, row: int, now: int) -> bool:
        mask = self.within_hours(now)
        return mask is None or bool(mask[row])

    def newly_opened(self, now: int) -> list[ClusterId]:
        """Clusters that have opened since the last call."""
        if self.policy_columns is None:
            return []
        self.policy_columns.opening_hours.refresh(now)
        return [self.ids[row] for row in self.policy_columns.opening_hours.newly_opened(len(self))]

    @property
    def uncordoned(self) -> Mask:
        return self._uncordoned[self._rows]

    @property
    def currency(self) -> Ints:
        """Currency code of each cluster, or UNPRICED."""
        return self._currency[self._rows]

    @property
    def rates(self) -> Floats:
        """Currency per hour of a milli-core, byte, device and byte, one array row each."""
        return self._rates[:, self._rows]

    def not_nominated_above(self, priority: int, ticket: int) -> Mask:
        """Clusters not nominated for a request that ranks above this priority and ticket."""
        held_by, since = self._nomination_priority[self._rows], self._nomination_ticket[self._rows]
        open_to: Mask = (held_by < priority) | ((held_by == priority) & (since >= ticket))
        return open_to

    def with_label(self, key: str, value: str) -> Mask:
        """Clusters with a label; cached until the labels of any cluster change."""
        mask = self._label_masks.get((key, value))
        if mask is None:
            if len(self._label_masks) >= MAX_LABEL_MASKS:
                self._label_masks.clear()
            mask = np.fromiter(
                (labels.get(key) == value for labels in self.labels), bool, len(self)
            )
            self._label_masks[key, value] = mask
        return mask

    def scratch(self, number: int) -> Floats:
        """A reused buffer with one value per cluster."""
        return self._scratch[number][self._rows]

    # -- helpers

    def _row(self, cluster: ClusterId) -> int:
        """The row of a cluster that has one."""
        return bisect_left(self.ids, cluster)

    def _insert(self, row: int, cluster: ClusterId) -> None:
        size = len(self.ids)
        if size == len(self._uncordoned):
            self.grow(2 * size)
            self._scratch = _scratch_buffers(2 * size)
        for array in self.arrays():
            array[..., row + 1 : size + 1] = array[..., row:size]
        self._nomination_priority[row] = NO_NOMINATION
        self.ids.insert(row, cluster)
        self.labels.insert(row, {})
        self.prices.insert(row, None)
        self._extended.insert(row, frozenset())
        self._rows = slice(len(self))
        if self.policy_columns is not None:
            self.policy_columns.on_row_inserted(row)
        self._label_masks.clear()

    def nested(self) -> Iterable[ColumnGroup]:
        return filter(None, (*self._columns.values(), self.policy_columns))

    def _set_extended(self, row: int, names: frozenset[str]) -> None:
        """Adds columns for new extended resources and drops those no cluster offers any more."""
        before, self._extended[row] = self._extended[row], names
        if before == names:
            return
        self._offer_counts.update(names - before)
        self._offer_counts.subtract(before - names)
        for name in names - self._columns.keys():
            self._columns[name] = ResourceColumn(len(self._uncordoned))
        for name in before - names:
            if not self._offer_counts[name]:
                del self._columns[name], self._offer_counts[name]
                if self.policy_columns is not None:
                    self.policy_columns.drop_resource(name)

    def _set_usable(self, row: int) -> None:
        """Marks a usable row immediately; any other change invalidates the cache."""
        if self._uncordoned[row] and self._usable_until <= self._valid_until[row]:
            hours = None if self.policy_columns is None else self.policy_columns.opening_hours
            self._usable[row] = self._usable_until == NEVER or hours is None or hours.is_open(row)
        else:
            self._usable_until = NEVER

    def _refresh_usable(self, now: int) -> None:
        usable = self._usable[self._rows]
        np.greater(self.valid_until, now, out=usable)
        usable &= self.uncordoned
        ends = self.valid_until[usable]
        self._usable_from = now
        self._usable_until = int(ends.min()) if len(ends) else FOREVER
        column = self._opening_hours
        if column is not None:
            self._usable_until = min(self._usable_until, column.refresh(now))
            usable &= column.open_mask(len(self))

    def _set_prices(self, row: int, cluster: Cluster) -> None:
        prices = self.prices[row] = cluster.advertisement.prices
        if prices is None:
            self._currency[row] = UNPRICED
            self._rates[:, row] = 0
            return
        self._currency[row] = currency_code(prices.currency)
        self._rates[:, row] = prices.rates()


class LentByRequester:
    """Sums of live reservations by requester and provider. Only the ledger changes them."""

    def __init__(self) -> None:
        self.tracked: set[ClusterId] = set()
        """Providers with a cap per requester."""
        self._by_requester: dict[ClusterId, dict[ClusterId, Resources]] = {}

    def for_requester(self, requester: ClusterId) -> Mapping[ClusterId, Resources]:
        return self._by_requester.get(requester, {})

    def track(self, provider: ClusterId, lent: Iterable[Reservation]) -> None:
        """Starts tracking a provider with its current reservations."""
        if provider in self.tracked:
            return
        self.tracked.add(provider)
        for reservation in lent:
            self.add(provider, reservation)

    def untrack(self, provider: ClusterId) -> None:
        if provider not in self.tracked:
            return
        self.tracked.remove(provider)
        for requester, lent_by_provider in list(self._by_requester.items()):
            lent_by_provider.pop(provider, None)
            if not lent_by_provider:
                del self._by_requester[requester]

    def add(self, provider: ClusterId, reservation: Reservation, sign: int = 1) -> bool:
        """True if the provider is tracked."""
        if provider not in self.tracked:
            return False
        requester, amounts = reservation.requester, reservation.request.resources
        lent_by_provider = self._by_requester.setdefault(requester, {})
        before = lent_by_provider.pop(provider, NOTHING)
        total = before + amounts if sign > 0 else before - amounts
        if total:
            lent_by_provider[provider] = total
        elif not lent_by_provider:
            del self._by_requester[requester]
        return True

    def remove(self, provider: ClusterId, reservation: Reservation) -> None:
        self.add(provider, reservation, -1)


class FleetSubset:
    """Some rows of a fleet, with the columns that scores need."""

    def __init__(self, fleet: Fleet, rows: Ints) -> None:
        self._fleet = fleet
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def currency(self) -> Ints:
        return self._fleet.currency[self._rows]

    @property
    def rates(self) -> Floats:
        return self._fleet.rates[:, self._rows]

    def free_and_allocatable(self, name: str) -> tuple[Floats, Floats] | None:
        shares = self._fleet.free_and_allocatable(name)
        return None if shares is None else (shares[0][self._rows], shares[1][self._rows])

    def scratch(self, _: int) -> Floats:
        return np.empty(len(self._rows), np.float64)
