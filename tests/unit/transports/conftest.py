"""A client of the scripted broker that retries at once."""

from datetime import timedelta

import pytest

from kubelend.kits.backoff import Backoff
from kubelend.transports.client import BrokerClient

QUICK = Backoff(retries=2, first=timedelta(milliseconds=1))


@pytest.fixture
async def client(broker, certificates):
    async with BrokerClient(broker.url, certificates.cluster("a"), backoff=QUICK) as client:
        yield client
