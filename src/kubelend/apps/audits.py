"""The audit of a store: its invariants hold, and it has all that its journal tells of.

For `kubelend audit`, for the demo, and behind every benchmark and fault test. The store is only read, and a
broker may go on meanwhile.
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
"""Lines read at a time, so that a long journal takes no more memory than a short one."""


class Audit(NamedTuple):
    """What was read, and what is wrong with it."""

    ledger: Ledger
    violations: list[str]
    gone: list[ReservationId]
    """Whose objects somebody has deleted in Kubernetes, with their finalizers: as good as released."""


def of(store: str) -> Audit:
    """Read a store, and check all that can be checked."""
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
    # Where it begins by now: the broker may have cut it off since.
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
