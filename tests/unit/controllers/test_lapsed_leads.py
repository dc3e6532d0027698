"""A broker that leads no more and has not noticed: its controllers are called all the same."""

import contextlib
from datetime import timedelta

import pytest

import brokers
import make
from kubelend.broker.service import Rules
from kubelend.controllers.advertisements import Advertisements
from kubelend.controllers.happenings import Teller
from kubelend.controllers.reservations import Reservations
from kubelend.core.errors import NotReady
from kubelend.kube.access import Access
from kubelend.kube.client import Client
from kubelend.wire.conversion import Terms

TERMS = Terms(make.HOUR, make.HOUR, make.HOUR)


class Lease:
    """Ends as leases do: by the clock, between one line and the next."""

    leader = "broker-1"
    term = 1

    def __init__(self):
        self.looks_left = 1_000_000

    @property
    def leads(self):
        self.looks_left -= 1
        return self.looks_left >= 0

    async def won(self):
        """It has."""

    async def look(self):
        """It is as it was."""


@pytest.fixture
def lease():
    return Lease()


@pytest.fixture
async def broker(lease):
    rules = Rules(lost_after=timedelta())
    async with brokers.loaded(rules=rules, leadership=lease) as broker:
        yield broker


@pytest.fixture
async def client():
    """Of a server that nobody calls."""
    async with contextlib.AsyncExitStack() as stack:
        yield await stack.enter_async_context(Client.open(Access(server="https://127.0.0.1:1")))


async def test_list_in_the_wrong_moment_is_no_end(broker, client, lease):
    teller = Teller(client, broker.clock)
    reservations = Reservations(broker, client, "hub", TERMS, teller)
    lease.looks_left = 0
    with pytest.raises(NotReady):
        broker.present()
    reservations.look_at_all()


async def test_tick_in_the_wrong_moment_is_no_end(broker, client, lease):
    advertisements = Advertisements(broker, client, "hub", Teller(client, broker.clock))
    advertisements.look_at_all()
    lease.looks_left = 1
    advertisements.tick()
    assert lease.looks_left < 0
