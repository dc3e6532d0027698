"""Nothing is remembered of objects that have gone: a broker runs for months."""

import pytest

import broker_samples as samples
import make
from kubelend.controllers.advertisements import AdvertisementReconciler
from kubelend.controllers.events import EventRecorder
from kubelend.controllers.reservations import ReservationReconciler
from kubelend.kube.client import Client
from kubelend.kube.config import KubeConfig
from kubelend.kube.informer import Deleted, Listed
from kubelend.wire.conversion import RequestLimits
from root_tasks import working
from waiting import until

TERMS = RequestLimits(make.HOUR, make.HOUR, make.HOUR)

pytestmark = pytest.mark.broker("service")


@pytest.fixture
async def client():
    """Of a server that is not there."""
    async with Client.open(KubeConfig(server="https://127.0.0.1:1")) as client:
        yield client


def remembered(whose):
    """All keys of what it keeps: from outside nothing can be seen of it but the memory it takes."""
    return {key for kept in vars(whose).values() if isinstance(kept, dict) for key in kept}


async def test_drift_is_forgotten_with_its_object(broker, client):
    kept = ReservationReconciler(broker, client, "hub", TERMS, EventRecorder(client, broker.clock))
    orphan = samples.wish(labels=samples.OWN)
    async with working(kept.queue):
        kept.cache.handle(Listed([orphan], []))
        drift = vars(kept)["_drift"]
        await until(lambda: "mine" in remembered(drift))
        kept.cache.handle(Deleted(orphan))
        await until(lambda: not kept.cache.tombstones("mine"))
    assert remembered(drift) == set()


async def test_name_of_an_advertisement_goes_with_it(broker, client):
    kept = AdvertisementReconciler(broker, client, "hub", EventRecorder(client, broker.clock))
    found = samples.advertisement(name="any-name")
    async with working(kept.queue):
        kept.cache.handle(Listed([found], []))
        await until(lambda: "lender" in broker.current()[0].clusters)
        await until(lambda: remembered(kept) >= {"lender", found.metadata.uid})
        kept.cache.handle(Deleted(found))
        await until(lambda: not kept.cache.tombstones("any-name"))
    assert "lender" not in broker.current()[0].clusters
    assert remembered(kept) == set()
