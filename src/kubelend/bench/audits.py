"""Audits the store after a benchmark: figures are valid only if every confirmed reservation is stored."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kubelend.apps import audits
from kubelend.core import audit
from kubelend.wire import bodies


def count_violations(store: str, responses: Sequence[bytes]) -> int:
    """Counts violated invariants, and confirmed reservations that are missing or duplicate."""
    ledger, found, _ = audits.audit_store(store)
    promised = {msgspec.json.decode(body, type=bodies.Reservation).id for body in responses}
    lost = promised - ledger.reservations.keys()
    doubled = len(responses) - len(promised)
    return len(found) + len(audit.overcommitted_clusters(ledger)) + len(lost) + doubled
