"""Audits a store: checks the invariants of the ledger and compares it with a replay of the audit log.

Used by the CLI, the demo, the benchmarks and the fault tests. The store is opened read-only; a broker may
use it at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kubelend.core import audit
from kubelend.core.audit import AuditLogReplay
from kubelend.core.audit_log import AuditLine
from kubelend.core.ledger import Ledger
from kubelend.core.models import ReservationId
from kubelend.stores import factory
from kubelend.stores.factory import AnyStore

LINES_PER_READ = 1024
"""Number of audit log lines read at a time, which bounds the memory for a long log."""


class StoreAudit(NamedTuple):
    """The ledger that was read, and the violations found."""

    ledger: Ledger
    violations: list[str]
    deleted: list[ReservationId]
    """Reservations whose objects were deleted in Kubernetes with their finalizer; they count as released."""


def audit_store(store: str) -> StoreAudit:
    """Reads the store and runs all checks."""
    opened = factory.open_readonly(store)
    try:
        return _audit_opened(opened, may_delete=factory.is_kubernetes_url(store))
    finally:
        opened.close()


def _audit_opened(opened: AnyStore, *, may_delete: bool) -> StoreAudit:
    last_durable = opened.audit_log_bounds()[1].number
    ledger = Ledger.restore(opened.load())
    replay = AuditLogReplay(ledger, last_durable)
    start, end = opened.audit_log_bounds()
    for line in _audit_lines(opened, start.number, end.number):
        replay.feed(line)
    # Read again: the broker may have truncated the log meanwhile.
    found = replay.violations(opened.audit_log_bounds()[0].number, end.number)
    missing_by_id = replay.missing()
    missing = [] if may_delete else list(missing_by_id.values())
    return StoreAudit(
        ledger,
        [*audit.invariant_violations(ledger), *missing, *found],
        list(missing_by_id) if may_delete else [],
    )


def _audit_lines(opened: AnyStore, after: int, last: int) -> Iterator[AuditLine]:
    while after < last and (lines := opened.audit_lines(after, min(LINES_PER_READ, last - after))):
        yield from lines
        after = lines[-1].number
