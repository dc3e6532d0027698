"""Made-up fleets: the same each time, varied within, and with room for what is asked of them."""

import pytest
from msgspec.structs import replace

import make
from kubelend.bench import fixtures
from kubelend.core import decision
from kubelend.core.decision import Placement
from kubelend.core.filters import PlacementQuery, feasible_clusters
from kubelend.core.fleet import Fleet


def fleet_of(clusters):
    fleet = Fleet()
    for cluster in clusters:
        fleet.put(cluster, cluster.ceiling.clamped())
    return fleet


def test_the_same_seed_makes_the_same_clusters():
    assert fixtures.make_clusters(50, make.T0) == fixtures.make_clusters(50, make.T0)
    assert fixtures.make_clusters(50, make.T0) != fixtures.make_clusters(50, make.T0, seed=9)


def test_clusters_are_in_the_order_of_their_ids():
    ids = [cluster.id for cluster in fixtures.make_clusters(120, make.T0)]
    assert ids == sorted(set(ids))


def test_a_fleet_has_all_kinds_of_clusters():
    known = fixtures.make_clusters(1000, make.T0)
    assert {cluster.cordon is None for cluster in known} == {True, False}
    assert {cluster.is_stale(make.T0) for cluster in known} == {True, False}
    assert {cluster.advertisement.prices is None for cluster in known} == {True, False}
    assert {cluster.advertisement.allocatable.gpu > 0 for cluster in known} == {True, False}


def test_an_open_fleet_has_no_closed_or_silent_cluster():
    known = fixtures.make_clusters(1000, make.T0, all_open=True)
    assert not any(cluster.cordon or cluster.is_stale(make.T0) for cluster in known)


def test_no_cluster_uses_more_than_it_has():
    for cluster in fixtures.make_clusters(500, make.T0):
        offer = cluster.advertisement
        assert offer.allocated.fits_in(offer.allocatable)
        assert offer.allocatable.fits_in(offer.capacity)


@pytest.mark.parametrize("size", [1, 100, 3000])
def test_every_request_fits_somewhere(size):
    known = fixtures.make_clusters(size, make.T0, all_open=True)
    fleet = fleet_of(known)
    asked = [*fixtures.small_requests(16), *fixtures.large_requests(16, known, make.T0)]
    for request in asked:
        assert isinstance(
            decision.decide_placement(PlacementQuery(request, make.T0), fleet), Placement
        )


def test_a_single_cluster_has_room_for_very_many_tiny_requests():
    smallest = min(cluster.ceiling.cpu for cluster in fixtures.make_clusters(1000, make.T0))
    assert max(request.resources.cpu for request in fixtures.tiny_requests(100)) * 100 < smallest


def test_small_requests_fit_nearly_everywhere_and_large_ones_nearly_nowhere():
    known = fixtures.make_clusters(2000, make.T0)
    fleet = fleet_of(known)
    (small,) = fixtures.small_requests(1)
    (large,) = fixtures.large_requests(1, known, make.T0)
    assert feasible_clusters(PlacementQuery(small, make.T0), fleet).mean() > 0.9
    assert feasible_clusters(PlacementQuery(large, make.T0), fleet).mean() < 0.01


def test_cluster_with_other_pods_offers_something_else_and_stays_within_what_it_has():
    known = fixtures.make_clusters(200, make.T0)
    full = replace(known[0], advertisement=make.advertisement("a", "cpu=4", allocated="cpu=4"))
    for cluster in (*known, full):
        later = fixtures.with_other_pods(cluster)
        assert not later.has_same_offer(cluster)
        assert min(later.ceiling.cpu, later.advertisement.allocated.cpu) >= 0
        assert later.id == cluster.id
