"""What callers see of a ledger: read in one stretch, in order, and no more than was asked for."""

import pytest

import make
from kubelend.broker import service
from kubelend.broker.streams import Subscription
from kubelend.core.models import ClusterId

A, R = ClusterId("a"), ClusterId("r")


@pytest.fixture
def desk():
    return make.desk(a="cpu=8,memory=8Gi", b="cpu=4,memory=8Gi")


def opening(desk, cluster, after):
    return service.start_stream(
        desk.ledger, Subscription(ClusterId(cluster), desk.ledger.revision), after
    )


def ids(news):
    return [found.id for found in news]


def test_cluster_is_shown_with_what_is_reserved_and_how_many_it_serves(desk):
    for _ in range(2):
        desk.reserve("cpu=1,memory=1Gi", pinned="a")
    view = service.cluster_view(desk.ledger, desk.ledger.cluster(A))
    assert view.reserved == make.resources("cpu=2,memory=2Gi")
    assert view.reservation_count == 2


def test_holds_are_what_is_reserved_there_and_not_in_use_oldest_first(desk):
    first, second, third, _ = [
        desk.reserve("cpu=1,memory=1Gi", pinned=target) for target in ("a", "a", "a", "b")
    ]
    desk.activate(second)
    assert ids(service.held_reservations(desk.ledger, A)) == [first, third]
    desk.release(first)
    assert ids(service.held_reservations(desk.ledger, A)) == [third]
    assert service.held_reservations(desk.ledger, ClusterId("nobody")) == []


@pytest.mark.parametrize("cluster", [None, R], ids=["all", "one cluster's"])
def test_pages_follow_each_other_without_gap_or_repetition(desk, cluster):
    made = [desk.reserve("cpu=1m,memory=1Mi") for _ in range(10)]
    desk.renew(made[0], 9 * make.HOUR)
    desk.release(made[5])
    seen, after = [], 0
    while page := service.reservations_page(
        desk.ledger, lambda _: True, cluster, service.PageRequest(after, 3)
    ):
        assert len(page) <= 3
        seen += ids(page)
        after = page[-1].ticket
    assert seen == made


def test_page_holds_only_what_is_wanted(desk):
    made = [desk.reserve("cpu=1m,memory=1Mi") for _ in range(6)]
    wanted = set(made[::2])
    page = service.reservations_page(
        desk.ledger, lambda found: found.id in wanted, None, service.PageRequest(0, 2)
    )
    assert ids(page) == made[:4:2]


def test_stream_opens_with_all_that_is_open(desk):
    kept, used, over = (desk.reserve("cpu=1,memory=1Gi", pinned="a") for _ in range(3))
    waiting = desk.reserve("cpu=99,memory=1Gi", wait=make.HOUR)
    desk.activate(used)
    desk.release(over)
    opened = opening(desk, "r", None)
    assert not opened.resumed
    assert ids(opened.changes) == [kept, waiting, used]
    assert ids(opening(desk, "a", None).changes) == [kept, used]


def test_resumed_stream_tells_all_since_in_order_of_revision(desk):
    first, second = (desk.reserve("cpu=1,memory=1Gi", pinned="a") for _ in range(2))
    seen = desk.ledger.revision
    third = desk.reserve("cpu=1,memory=1Gi", pinned="a")
    desk.release(first)
    opened = opening(desk, "a", seen)
    assert opened.resumed
    assert ids(opened.changes) == [third, first]
    assert second not in ids(opened.changes)


def test_resumed_where_nothing_happened_it_tells_nothing(desk):
    desk.reserve("cpu=1,memory=1Gi")
    opened = opening(desk, "r", desk.ledger.revision)
    assert (opened.resumed, opened.changes) == (True, [])


def test_stream_cannot_be_resumed_from_the_future_or_from_before_what_is_forgotten(desk):
    over = desk.reserve("cpu=1,memory=1Gi")
    desk.release(over)
    ended = desk.ledger.revision
    assert opening(desk, "r", ended + 1).resumed is False
    assert opening(desk, "r", ended - 1).resumed is True
    desk.pass_time(make.RETENTION + make.SECOND)
    desk.expire()
    assert opening(desk, "r", ended - 1).resumed is False
    assert opening(desk, "r", ended).resumed is True


def test_refused_reservation_concerns_the_provider_that_refused_when_it_resumes(desk):
    made = desk.reserve("cpu=1,memory=1Gi", pinned=None)
    provider = desk.target(made)
    seen = desk.ledger.revision
    desk.refuse(made, provider)
    assert ids(opening(desk, provider, seen).changes) == [made]
