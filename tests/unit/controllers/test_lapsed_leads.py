"""A broker that leads no more and has not noticed: its controllers are called all the same."""

import contextlib
from datetime import timedelta

import pytest

import brokers
import make
from kubelend.broker.service import BrokerRules
from kubelend.controllers.advertisements import AdvertisementReconciler
from kubelend.controllers.events import EventRecorder
from kubelend.controllers.reservations import ReservationReconciler
from kubelend.core.errors import NotReady
from kubelend.kube.client import Client
from kubelend.kube.config import KubeConfig
from kubelend.wire.conversion import RequestLimits

TERMS = RequestLimits(make.HOUR, make.HOUR, make.HOUR)


class Lease:
    """Ends as leases do: by the clock, between one line and the next."""

    leader = "broker-1"
    term = 1

    def __init__(self):
        self.checks_left = 1_000_000

    @property
    def is_leader(self):
        self.checks_left -= 1
        return self.checks_left >= 0

    async def wait_for_leadership(self):
        """It has."""

    async def refresh(self):
        """It is as it was."""


@pytest.fixture
def lease():
    return Lease()


@pytest.fixture
async def broker(lease):
    rules = BrokerRules(lost_after=timedelta())
    async with brokers.loaded(rules=rules, leadership=lease) as broker:
        yield broker


@pytest.fixture
async def client():
    """Of a server that nobody calls."""
    async with contextlib.AsyncExitStack() as stack:
        yield await stack.enter_async_context(Client.open(KubeConfig(server="https://127.0.0.1:1")))


async def test_list_in_the_wrong_moment_is_no_end(broker, client, lease):
    recorder = EventRecorder(client, broker.clock)
    reservations = ReservationReconciler(broker, client, "hub", TERMS, recorder)
    lease.checks_left = 0
    with pytest.raises(NotReady):
        broker.current()
    reservations.enqueue_all()


async def test_tick_in_the_wrong_moment_is_no_end(broker, client, lease):
    advertisements = AdvertisementReconciler(
        broker, client, "hub", EventRecorder(client, broker.clock)
    )
    advertisements.enqueue_all()
    lease.checks_left = 1
    advertisements.tick()
    assert lease.checks_left < 0
