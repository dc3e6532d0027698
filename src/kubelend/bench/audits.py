"""The audit behind every benchmark that writes: a figure counts only if what was promised is there."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kubelend.apps import audits
from kubelend.core import audit
from kubelend.wire import bodies


def violations(store: str, answers: Sequence[bytes]) -> int:
    """Broken invariants, and answered reservations that are not there or were answered twice."""
    ledger, found, _ = audits.of(store)
    promised = {msgspec.json.decode(body, type=bodies.Reservation).id for body in answers}
    lost = promised - ledger.reservations.keys()
    doubled = len(answers) - len(promised)
    return len(found) + len(audit.overcommitted(ledger)) + len(lost) + doubled
