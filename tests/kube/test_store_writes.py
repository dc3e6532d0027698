"""How often the store writes: the API server and its etcd are not ours alone."""

from contextlib import closing

import pytest
from msgspec.structs import replace

import kube_stores
import make
from kube_stores import Place
from kubelend.core.events import Archived
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import ClusterId, ReservationId

HELD = make.reservation("rsv-1", phase=Phase.RESERVED, target=ClusterId("a"), reserved_at=make.T0)
OVER = replace(HELD, phase=Phase.RELEASED, reason=Reason.EXPIRED, finished_at=make.T0)


class Counter:
    def __init__(self):
        self.writes = 0

    async def around(self, write):
        self.writes += 1
        return await write


@pytest.mark.parametrize(
    "changes, writes",
    [
        pytest.param([], 1, id="nothing"),
        pytest.param([HELD], 3, id="a new reservation"),
        pytest.param([replace(HELD, id=f"rsv-{n}") for n in range(10, 20)], 21, id="ten of them"),
        pytest.param([make.cluster("a", cordon="why")], 2, id="a status"),
        pytest.param([make.cluster("a", "cpu=9,memory=9Gi")], 3, id="an advertisement"),
        pytest.param([Archived(ReservationId("rsv-2"))], 2, id="one for the archive"),
    ],
)
def test_commit_writes_no_more_than_it_must(kube, changes, writes):
    counter = Counter()
    with closing(Place(kube).open(kube_stores.connecting(counter.around))) as store:
        store.commit([make.cluster("a"), replace(OVER, id=ReservationId("rsv-2"))], 1)
        counter.writes = 0
        store.commit(changes, 2)
    assert counter.writes == writes


def test_store_that_is_loaded_again_writes_nothing_but_its_epoch(kube):
    place, counter = Place(kube), Counter()
    with closing(place.open()) as store:
        store.commit([make.cluster("a"), HELD, OVER], 1)
    with closing(place.open(kube_stores.connecting(counter.around))) as store:
        store.load()
        store.load()
    assert counter.writes == 1
