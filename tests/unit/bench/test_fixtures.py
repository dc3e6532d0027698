"""Fixtures of the benchmarks: reproducible fleets and valid stores."""

from collections import Counter

import pytest
from msgspec.structs import replace

import make
from kubelend.bench import fixtures
from kubelend.core import audit, explanations
from kubelend.core.explanations import Placement
from kubelend.core.filters import PlacementQuery, feasible_clusters
from kubelend.core.fleet import Fleet
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Phase
from kubelend.stores import factory

# -- fleets


def fleet_of(clusters):
    fleet = Fleet()
    for cluster in clusters:
        fleet.put(cluster, cluster.ceiling.clamped())
    return fleet


def test_same_seed_makes_the_same_clusters_in_the_order_of_their_ids():
    known = fixtures.make_clusters(120, make.T0)
    assert known == fixtures.make_clusters(120, make.T0)
    assert known != fixtures.make_clusters(120, make.T0, seed=9)
    ids = [cluster.id for cluster in known]
    assert ids == sorted(set(ids))


def test_fleet_has_all_kinds_of_clusters_unless_all_are_open():
    known = fixtures.make_clusters(1000, make.T0)
    for offer in (cluster.advertisement for cluster in known):
        assert offer.allocated.fits_in(offer.allocatable)
        assert offer.allocatable.fits_in(offer.capacity)
    assert {cluster.cordon is None for cluster in known} == {True, False}
    assert {cluster.is_stale(make.T0) for cluster in known} == {True, False}
    assert {cluster.advertisement.prices is None for cluster in known} == {True, False}
    assert {cluster.advertisement.allocatable.gpu > 0 for cluster in known} == {True, False}
    opened = fixtures.make_clusters(1000, make.T0, all_open=True)
    assert not any(cluster.cordon or cluster.is_stale(make.T0) for cluster in opened)


@pytest.mark.parametrize("size", [1, 100, 3000])
def test_every_request_fits_somewhere(size):
    known = fixtures.make_clusters(size, make.T0, all_open=True)
    fleet = fleet_of(known)
    for request in (
        *fixtures.small_requests(16),
        *fixtures.large_requests(16, known, make.T0),
    ):
        query = PlacementQuery(request, make.T0)
        assert isinstance(explanations.decide_placement(query, fleet), Placement)


def test_small_requests_fit_nearly_everywhere_and_large_ones_nearly_nowhere():
    known = fixtures.make_clusters(2000, make.T0)
    fleet = fleet_of(known)
    (small,) = fixtures.small_requests(1)
    (large,) = fixtures.large_requests(1, known, make.T0)
    assert feasible_clusters(PlacementQuery(small, make.T0), fleet).mean() > 0.9
    assert feasible_clusters(PlacementQuery(large, make.T0), fleet).mean() < 0.01


def test_smallest_cluster_has_room_for_very_many_tiny_requests():
    smallest = min(cluster.ceiling.cpu for cluster in fixtures.make_clusters(1000, make.T0))
    assert max(request.resources.cpu for request in fixtures.tiny_requests(100)) * 100 < smallest


def test_cluster_with_other_pods_offers_something_else_within_its_capacity():
    known = fixtures.make_clusters(200, make.T0)
    full = replace(known[0], advertisement=make.advertisement("a", "cpu=4", allocated="cpu=4"))
    for cluster in (*known, full):
        later = fixtures.with_other_pods(cluster)
        assert not later.has_same_offer(cluster)
        assert min(later.ceiling.cpu, later.advertisement.allocated.cpu) >= 0
        assert later.id == cluster.id


# -- stores


@pytest.mark.parametrize("reservations", [0, 500, 2500])
def test_filled_store_keeps_every_invariant_and_nothing_in_it_ends_soon(tmp_path, reservations):
    path = tmp_path / "store.db"
    clusters = fixtures.make_clusters(20, make.T0, all_open=True)
    fixtures.fill_store(path, clusters, reservations, make.T0)
    store = factory.open_readonly(str(path))
    try:
        ledger = Ledger.restore(store.load())
    finally:
        store.close()
    assert audit.invariant_violations(ledger) == []
    assert audit.overcommitted_clusters(ledger) == []
    assert (len(ledger.clusters), len(ledger.reservations)) == (20, reservations)
    phases = Counter(found.phase for found in ledger.reservations.values())
    assert (phases[Phase.ACTIVE] + phases[Phase.RESERVED]) * 5 == reservations
    assert phases[Phase.RELEASED] == reservations * 4 // 5
    assert not list(ledger.overdue(make.T0 + 20 * make.MINUTE))
    assert not list(ledger.finished_before(make.T0 - make.HOUR + 20 * make.MINUTE))
