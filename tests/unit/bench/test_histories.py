"""Stores with a past: what a broker finds in them keeps every invariant."""

from collections import Counter

import make
from kubelend.bench import fixtures
from kubelend.core import audit
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Phase
from kubelend.stores import factory


def written(path, reservations):
    clusters = fixtures.make_clusters(20, make.T0, all_open=True)
    fixtures.fill_store(path, clusters, reservations, make.T0)
    store = factory.open_readonly(str(path))
    try:
        return Ledger.restore(store.load())
    finally:
        store.close()


def test_the_audit_finds_nothing_in_a_written_history(tmp_path):
    ledger = written(tmp_path / "store.db", 2500)
    assert audit.invariant_violations(ledger) == []
    assert audit.overcommitted_clusters(ledger) == []
    assert (len(ledger.clusters), len(ledger.reservations)) == (20, 2500)


def test_one_reservation_in_five_is_live(tmp_path):
    ledger = written(tmp_path / "store.db", 500)
    phases = Counter(found.phase for found in ledger.reservations.values())
    assert phases[Phase.ACTIVE] + phases[Phase.RESERVED] == 100
    assert phases[Phase.RELEASED] == 400


def test_nothing_in_a_history_is_over_or_forgotten_soon(tmp_path):
    ledger = written(tmp_path / "store.db", 500)
    assert not list(ledger.overdue(make.T0 + 20 * make.MINUTE))
    assert not list(ledger.finished_before(make.T0 - make.HOUR + 20 * make.MINUTE))


def test_a_history_may_be_empty(tmp_path):
    ledger = written(tmp_path / "store.db", 0)
    assert (len(ledger.clusters), len(ledger.reservations)) == (20, 0)
