"""Audits a store: checks the invariants of the ledger and compares it with a replay of the audit log.

Used by the CLI, the demo, the benchmarks and the fault tests. The store is opened read-only; a broker may
use it at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kubelend.core import audit
from kubelend.core.journal import Line
from kubelend.core.ledger import Ledger
from kubelend.core.models import ReservationId
from kubelend.core.testimony import Witness
from kubelend.stores import opening
from kubelend.stores.opening import AnyStore

PORTION = 1024
"""Number of audit log lines read at a time, which bounds the memory for a long log."""


class Audit(NamedTuple):
    """The ledger that was read, and the violations found."""

    ledger: Ledger
    violations: list[str]
    gone: list[ReservationId]
    """Reservations whose objects were deleted in Kubernetes with their finalizer; they count as released."""


def of(store: str) -> Audit:
    """Reads the store and runs all checks."""
    opened = opening.open_readonly(store)
    try:
        return _audit(opened, may_delete=opening.is_of_objects(store))
    finally:
        opened.close()


def _audit(opened: AnyStore, *, may_delete: bool) -> Audit:
    settled = opened.journal_ends()[1].number
    ledger = Ledger.restore(opened.load())
    witness = Witness(ledger, settled)
    start, end = opened.journal_ends()
    for line in _lines(opened, start.number, end.number):
        witness.hear(line)
    # Read again: the broker may have truncated the log meanwhile.
    found = witness.violations(opened.journal_ends()[0].number, end.number)
    lost = witness.lost()
    promises = [] if may_delete else list(lost.values())
    return Audit(
        ledger, [*audit.violations(ledger), *promises, *found], list(lost) if may_delete else []
    )


def _lines(opened: AnyStore, after: int, last: int) -> Iterator[Line]:
    while after < last and (lines := opened.lines(after, min(PORTION, last - after))):
        yield from lines
        after = lines[-1].number
