"""The fleet: all clusters as numpy columns, so that a placement over thousands is a few vector
operations.

The ledger maintains it; filters and scores read it. Rows are ordered by cluster ID, so the first of
equal scores has the smaller ID. Scratch buffers are reused: the result of a score function is valid
until the next placement.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kubelend.core.bounds import Bound, Bounds
from kubelend.core.columns import FOREVER, LOWEST, NEVER, Column, Floats, Ints, Mask, widened
from kubelend.core.instants import micros
from kubelend.core.lending import Lending
from kubelend.core.loans import Loans
from kubelend.core.models import Cluster, ClusterId
from kubelend.core.prices import Prices
from kubelend.core.resources import NOTHING, Resources

UNPRICED = -1
NO_EARMARK = LOWEST
"""Priority in rows without a nomination: every request ranks above it."""

LABEL_MASKS = 256
"""Cache size; the labels come from requests, so the cache is bounded."""

_NAMED = ("cpu", "memory", "gpu", "storage")


def currency_code(currency: str) -> int:
    """A currency code of at most eight letters as an integer."""
    return int.from_bytes(currency.encode("ascii"))


class Fleet:
    """All clusters, one row each."""

    def __init__(self, capacity: int = 64) -> None:
        self.ids: list[ClusterId] = []
        self.labels: list[dict[str, str]] = []
        self.prices: list[Prices | None] = []
        self.earmarks = 0
        self.bounds: Bounds | None = None
        """Columns of the lending policies; None while no cluster has one."""
        self.loans = Loans()
        self._extended: list[frozenset[str]] = []
        self._offers: Counter[str] = Counter()
        """Number of clusters that offer each extended resource."""
        self._columns = {name: Column(capacity) for name in _NAMED}
        self._valid_until = np.zeros(capacity, np.int64)
        self._open = np.zeros(capacity, np.bool_)
        self._usable = np.zeros(capacity, np.bool_)
        """Neither cordoned, stale nor closed; cached from `_usable_from` to `_usable_until`."""
        self._usable_from = self._usable_until = NEVER
        self._currency = np.full(capacity, UNPRICED, np.int64)
        self._rates = np.zeros((len(_NAMED), capacity), np.float64)
        self._earmark_priority = np.full(capacity, NO_EARMARK, np.int64)
        self._earmark_ticket = np.zeros(capacity, np.int64)
        self._label_masks: dict[tuple[str, str], Mask] = {}
        self._scratch = np.empty((4, capacity), np.float64)
        self._rows = slice(0)
        """The part of every array that is in use."""

    def __len__(self) -> int:
        return len(self.ids)

    # -- written by the ledger

    def put(self, cluster: Cluster, free: Resources) -> None:
        """Adds or rewrites the row of a cluster; its nomination stays."""
        row = self._row_for(cluster.id)
        advertisement = cluster.advertisement
        self._valid_until[row] = micros(cluster.valid_until)
        self._open[row] = cluster.cordon is None
        self._set_usable(row)
        self._set_labels(row, advertisement.labels)
        self._set_prices(row, cluster)
        self._set_extended(row, frozenset(advertisement.allocatable.extended))
        ceiling = cluster.ceiling.clamped()
        for name, column in self._columns.items():
            column.ceiling[row] = ceiling.amount(name)
            column.allocatable[row] = advertisement.allocatable.amount(name) or 1
            column.free[row] = column.free_float[row] = free.amount(name)

    def renew(self, cluster: Cluster) -> None:
        """Hot path of an advertisement that only extends the validity."""
        row = self.find(cluster.id)
        if row is not None:
            self._valid_until[row] = micros(cluster.valid_until)
            self._set_usable(row)

    def set_free(self, cluster: ClusterId, free: Resources, changed: Resources) -> None:
        """Hot path of a reservation: updates the free amounts of the requested resources."""
        row = self.find(cluster)
        if row is None:
            return
        for name, _ in changed.items():  # noqa: PERF102 - not a dict
            column = self._columns.get(name)
            if column is not None:
                column.free[row] = column.free_float[row] = free.amount(name)

    def bind(self, cluster: Cluster, lending: Lending | None) -> None:
        """Writes or clears the policy of a cluster. Call it after each `put`."""
        if lending is None and self.bounds is None:
            return
        row = self.find(cluster.id)
        if row is None:
            return
        if self.bounds is None:
            self.bounds = Bounds(len(self._open))
        if self.bounds.bind(row, lending):
            self._usable_until = NEVER
        if lending is not None:
            ceiling, offer = lending.lendable(cluster.ceiling, NOTHING), cluster.advertisement
            for name, column in self._columns.items():
                column.ceiling[row] = ceiling.amount(name)
                if offer.allocatable.amount(name):
                    self.bounds.column(name).bind(row, name, lending)
                else:
                    self.bounds.column(name).clear(row)
        elif not self.bounds.policies:
            self.bounds = None

    def withhold(
        self, cluster: ClusterId, lending: Lending, available: Resources, reserved: Resources
    ) -> None:
        """Subtracts what a policy withholds from the free amounts. Call it after each `put` and
        `set_free`.
        """
        row, bounds = self.find(cluster), self.bounds
        if row is None or bounds is None:
            return
        for name, column in self._columns.items():
            most = lending.max_lent.get(name)
            left = FOREVER if most is None else max(most - reserved.amount(name), 0)
            column.free[row] = bounds.column(name).withhold(row, available.amount(name), left)

    def set_earmark(self, cluster: ClusterId, rank: tuple[int, int] | None) -> None:
        """Nominates a cluster for the request of this priority and ticket, or clears the nomination."""
        row = self.find(cluster)
        if row is None:
            return
        self.earmarks += int(rank is not None) - int(self._earmark_priority[row] != NO_EARMARK)
        self._earmark_priority[row], self._earmark_ticket[row] = rank or (NO_EARMARK, 0)

    def remove(self, cluster: ClusterId) -> None:
        row = self.find(cluster)
        if row is None:
            return
        self.set_earmark(cluster, None)
        if self.bounds is not None:
            self.bounds.bind(row, None)
            self.bounds = self.bounds if self.bounds.policies else None
        for array in self._arrays():
            array[..., row : len(self) - 1] = array[..., row + 1 : len(self)]
        self._set_extended(row, frozenset())
        del self.ids[row], self.labels[row], self.prices[row], self._extended[row]
        self._rows = slice(len(self))
        if self.bounds is not None:
            self.bounds.removed()
        self._label_masks.clear()

    # -- read by filters and scores

    def find(self, cluster: ClusterId) -> int | None:
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
        if free is None or self.bounds is None:
            return free
        size = len(self)
        return np.where(self.bounds.bound[:size], self.bounds.column(name).available[:size], free)

    def bound(self, name: str) -> Bound | None:
        """Policy limits of a resource; None if there are no policies or no cluster offers it."""
        if self.bounds is None or name not in self._columns:
            return None
        return self.bounds.column(name)

    def share_left(self, name: str, requester: ClusterId) -> Ints | None:
        """What each cluster may still lend to a requester under its cap per requester; None as above."""
        bound = self.bound(name)
        if bound is None:
            return None
        left, loans = bound.share[self._rows], self.loans.of(requester)
        if not loans:
            return left
        left = left.copy()
        for provider, lent in loans.items():
            row = self.find(provider)
            if row is not None:
                left[row] -= lent.amount(name)
        return left

    def ceiling(self, name: str) -> Ints | None:
        column = self._columns.get(name)
        return None if column is None else column.ceiling[self._rows]

    def shares(self, name: str) -> tuple[Floats, Floats] | None:
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
            self._look_again(now)
        return self._usable[self._rows].copy()

    def within_hours(self, now: int) -> Mask | None:
        """Clusters within their opening hours; None if none has any."""
        if self.bounds is None or not self.bounds.openings.hours:
            return None
        self.bounds.openings.look(now)
        return self.bounds.openings.open(len(self))

    def is_within_hours(self, row: int, now: int) -> bool:
        if self.bounds is None or not self.bounds.openings.hours:
            return True
        self.bounds.openings.look(now)
        return self.bounds.openings.is_open(row)

    def opened(self, now: int) -> list[ClusterId]:
        """Clusters that have opened since the last call."""
        if self.bounds is None:
            return []
        self.bounds.openings.look(now)
        return [self.ids[row] for row in self.bounds.openings.opened(len(self))]

    @property
    def open(self) -> Mask:
        return self._open[self._rows]

    @property
    def currency(self) -> Ints:
        """Currency code of each cluster, or UNPRICED."""
        return self._currency[self._rows]

    @property
    def rates(self) -> Floats:
        """Currency per hour of a milli-core, byte, device and byte, one array row each."""
        return self._rates[:, self._rows]

    def open_to(self, priority: int, ticket: int) -> Mask:
        """Clusters not nominated for a request that ranks above this priority and ticket."""
        held_by, since = self._earmark_priority[self._rows], self._earmark_ticket[self._rows]
        open_to: Mask = (held_by < priority) | ((held_by == priority) & (since >= ticket))
        return open_to

    def with_label(self, key: str, value: str) -> Mask:
        """Clusters with a label; cached until the labels of any cluster change."""
        mask = self._label_masks.get((key, value))
        if mask is None:
            if len(self._label_masks) >= LABEL_MASKS:
                self._label_masks.clear()
            mask = np.fromiter(
                (labels.get(key) == value for labels in self.labels), bool, len(self)
            )
            self._label_masks[key, value] = mask
        return mask

    def scratch(self, number: int) -> Floats:
        """A reused buffer with one value per cluster."""
        return self._scratch[number, self._rows]

    # -- helpers

    def _row_for(self, cluster: ClusterId) -> int:
        row = bisect_left(self.ids, cluster)
        if row == len(self.ids) or self.ids[row] != cluster:
            self._insert(row, cluster)
        return row

    def _insert(self, row: int, cluster: ClusterId) -> None:
        size = len(self.ids)
        if size == len(self._open):
            self._grow(2 * size)
        for array in self._arrays():
            array[..., row + 1 : size + 1] = array[..., row:size]
        self._earmark_priority[row] = NO_EARMARK
        self.ids.insert(row, cluster)
        self.labels.insert(row, {})
        self.prices.insert(row, None)
        self._extended.insert(row, frozenset())
        self._rows = slice(len(self))
        if self.bounds is not None:
            self.bounds.inserted(row)
        self._label_masks.clear()

    def _grow(self, capacity: int) -> None:
        if self.bounds is not None:
            self.bounds.grow(capacity)
        for column in self._columns.values():
            column.grow(capacity)
        self._valid_until = widened(self._valid_until, capacity)
        self._open = widened(self._open, capacity)
        self._usable = widened(self._usable, capacity)
        self._currency = widened(self._currency, capacity)
        self._rates = widened(self._rates, capacity)
        self._earmark_priority = widened(self._earmark_priority, capacity)
        self._earmark_ticket = widened(self._earmark_ticket, capacity)
        self._scratch = np.empty((4, capacity), np.float64)

    def _arrays(self) -> Iterator[npt.NDArray[np.generic]]:
        """All arrays with a value per row, which insertions and removals shift."""
        for column in self._columns.values():
            yield from column.arrays()
        yield from (self._valid_until, self._open, self._usable, self._currency, self._rates)
        yield from (self._earmark_priority, self._earmark_ticket)
        if self.bounds is not None:
            yield from self.bounds.arrays()

    def _set_extended(self, row: int, names: frozenset[str]) -> None:
        """Adds columns for new extended resources and drops those no cluster offers any more."""
        before, self._extended[row] = self._extended[row], names
        if before == names:
            return
        self._offers.update(names - before)
        self._offers.subtract(before - names)
        for name in names - self._columns.keys():
            self._columns[name] = Column(len(self._open))
        for name in before - names:
            if not self._offers[name]:
                del self._columns[name], self._offers[name]
                if self.bounds is not None:
                    self.bounds.drop(name)

    def _set_usable(self, row: int) -> None:
        """Marks a usable row immediately; any other change invalidates the cache."""
        if self._open[row] and self._usable_until <= self._valid_until[row]:
            self._usable[row] = self._usable_until == NEVER or self._was_open(row)
        else:
            self._usable_until = NEVER

    def _was_open(self, row: int) -> bool:
        return self.bounds is None or self.bounds.openings.is_open(row)

    def _look_again(self, now: int) -> None:
        usable = self._usable[self._rows]
        np.greater(self.valid_until, now, out=usable)
        usable &= self.open
        ends = self.valid_until[usable]
        self._usable_from = now
        self._usable_until = int(ends.min()) if len(ends) else FOREVER
        if self.bounds is not None and self.bounds.openings.hours:
            self._usable_until = min(self._usable_until, self.bounds.openings.look(now))
            usable &= self.bounds.openings.open(len(self))

    def _set_labels(self, row: int, labels: dict[str, str]) -> None:
        if self.labels[row] != labels:
            self.labels[row] = labels
            self._label_masks.clear()

    def _set_prices(self, row: int, cluster: Cluster) -> None:
        prices = self.prices[row] = cluster.advertisement.prices
        if prices is None:
            self._currency[row] = UNPRICED
            self._rates[:, row] = 0
            return
        self._currency[row] = currency_code(prices.currency)
        self._rates[:, row] = prices.rates()
