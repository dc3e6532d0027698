"""Fixtures of the benchmarks: reproducible fleets, valid stores, and requests that the broker decodes."""

from collections import Counter

import msgspec
import pytest
from msgspec.structs import replace

import make
from kubelend.bench import fixtures
from kubelend.core import audit, decision
from kubelend.core.decision import Placement
from kubelend.core.filters import PlacementQuery, feasible_clusters
from kubelend.core.fleet import Fleet
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Phase
from kubelend.stores import factory
from kubelend.wire import bodies, route, routes

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
    assert {cluster.cordon is None for cluster in known} == {True, False}
    assert {cluster.is_stale(make.T0) for cluster in known} == {True, False}
    assert {cluster.advertisement.prices is None for cluster in known} == {True, False}
    assert {cluster.advertisement.allocatable.gpu > 0 for cluster in known} == {True, False}
    opened = fixtures.make_clusters(1000, make.T0, all_open=True)
    assert not any(cluster.cordon or cluster.is_stale(make.T0) for cluster in opened)


def test_no_cluster_uses_more_than_it_has():
    for cluster in fixtures.make_clusters(500, make.T0):
        offer = cluster.advertisement
        assert offer.allocated.fits_in(offer.allocatable)
        assert offer.allocatable.fits_in(offer.capacity)


@pytest.mark.parametrize("size", [1, 100, 3000])
def test_every_request_fits_somewhere(size):
    known = fixtures.make_clusters(size, make.T0, all_open=True)
    fleet = fleet_of(known)
    for request in (
        *fixtures.small_requests(16),
        *fixtures.large_requests(16, known, make.T0),
    ):
        query = PlacementQuery(request, make.T0)
        assert isinstance(decision.decide_placement(query, fleet), Placement)


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


# -- requests


def split(request):
    head, _, body = request.partition(b"\r\n\r\n")
    line, *fields = head.decode().split("\r\n")
    return line, dict(field.split(": ", 1) for field in fields), body


def test_health_request_has_no_body():
    assert split(fixtures.healthz_request()) == (
        *("GET /healthz HTTP/1.1", {"Host": "localhost"}),
        b"",
    )


def test_advertisement_is_the_body_of_its_route_with_a_certificate_behind_a_proxy():
    (cluster,) = fixtures.make_clusters(1, make.T0)
    line, headers, body = split(fixtures.advertisement_request(cluster))
    assert line == f"POST {routes.ROUTES_BY_NAME['publish'].path} HTTP/1.1"
    assert headers["Content-Length"] == str(len(body))
    assert headers["Content-Type"] == "application/json"
    assert msgspec.json.decode(body, type=bodies.Advertisement).cluster_id == cluster.id
    _, proxied, same = split(fixtures.advertisement_request(cluster, b":AAAA:"))
    assert proxied == {**headers, "Client-Cert": ":AAAA:"}
    assert body == same


def test_each_reservation_has_its_own_key_and_the_same_body():
    numbered = fixtures.reservation_requests(make.request("cpu=500m,memory=1Gi"), "bench-3")
    found = [split(numbered(number)) for number in (0, 1, 123456)]
    line, headers, body = found[0]
    assert line == f"POST {routes.ROUTES_BY_NAME['reserve'].path} HTTP/1.1"
    keys = [each[1][route.IDEMPOTENCY_KEY] for each in found]
    assert keys == ["bench-3-0", "bench-3-1", "bench-3-123456"]
    assert {each[2] for each in found} == {body}
    assert headers["Content-Length"] == str(len(body))
    decoded = msgspec.json.decode(body, type=bodies.ReservationRequest)
    assert decoded.requested_resources == bodies.Quantities("500m", "1Gi")
    assert decoded.duration == "3600s"
