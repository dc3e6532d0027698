"""How often the store writes: the API server and its etcd are not ours alone."""

from contextlib import closing
from typing import Any

import pytest
from msgspec.structs import replace

import kube_stores
import make
from kube_stores import Place
from kubelend.core.events import Archived
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import ClusterId, ReservationId
from kubelend.kube.client import Client
from kubelend.stores.kubernetes.objects import (
    MANAGED_BY,
    MANAGED_BY_BROKER,
    STORED_RESERVATIONS,
    Spec,
    StoredObject,
)
from kubelend.wire.objects import Metadata

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


@pytest.mark.parametrize("count", [1, 10])
def test_new_reservations_cost_one_question_for_all_of_them(kube, count):
    """Whether the head is still this broker's. Whether they are there already, nobody has to ask."""
    asked = []

    class Noting(Client):
        async def find(self, resource: Any, name: str, namespace: str = "") -> Any:
            asked.append(name)
            return await super().find(resource, name, namespace)

    with closing(Place(kube).open(Noting.open)) as store:
        store.load()
        asked.clear()
        store.commit([replace(HELD, id=ReservationId(f"rsv-{n}")) for n in range(count)], 1)
    assert asked == ["head"]


def test_object_that_nobody_has_seen_is_found_when_it_is_to_be_made(kube):
    """Made by a broker that was stopped before it could fill it, after this one had looked."""
    place = Place(kube)
    with closing(place.open()) as store:
        store.load()
        metadata = Metadata(HELD.id, place.namespace, labels={MANAGED_BY: MANAGED_BY_BROKER})
        wanted: Spec = {"requestedResources": {"cpu": "9", "memory": "9Gi"}}
        place.run(lambda client: client.create(STORED_RESERVATIONS, StoredObject(metadata, wanted)))
        store.commit([HELD], 1)
    with closing(place.open()) as again:
        assert again.load().reservations == [HELD]


def test_store_that_is_loaded_again_writes_nothing_but_its_epoch(kube):
    place, counter = Place(kube), Counter()
    with closing(place.open()) as store:
        store.commit([make.cluster("a"), HELD, OVER], 1)
    with closing(place.open(kube_stores.connecting(counter.around))) as store:
        store.load()
        store.load()
    assert counter.writes == 1
