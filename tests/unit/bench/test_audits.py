"""What a benchmark's audit counts: promises that the store does not keep."""

import msgspec
import pytest

import make
from kubelend.bench import fixtures, measure
from kubelend.core.ledger import Ledger
from kubelend.stores import factory
from kubelend.wire import conversion


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store.db"
    fixtures.fill_store(path, fixtures.make_clusters(5, make.T0, all_open=True), 20, make.T0)
    return str(path)


@pytest.fixture
def answers(store):
    opened = factory.open_readonly(store)
    try:
        ledger = Ledger.restore(opened.load())
    finally:
        opened.close()
    return [answer(found) for found in ledger.reservations.values()]


def answer(found):
    return msgspec.json.encode(conversion.from_reservation(found))


def test_a_store_that_keeps_what_was_answered_passes(store, answers):
    assert len(answers) == 20
    assert measure.count_violations(store, answers) == 0


def test_an_answered_reservation_that_is_not_there_counts(store, answers):
    assert measure.count_violations(store, [*answers, answer(make.reservation("rsv-lost"))]) == 1


def test_one_that_was_answered_twice_counts(store, answers):
    assert measure.count_violations(store, [*answers, answers[0]]) == 1


def test_promises_that_do_not_fit_count(tmp_path):
    path = tmp_path / "store.db"
    tiny = make.cluster("cluster-a", "cpu=1m,memory=1Mi")
    fixtures.fill_store(path, [tiny], 20, make.T0)
    assert measure.count_violations(str(path), []) > 0
