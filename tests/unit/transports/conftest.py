"""A broker that says what it is told to, and a client of it that tries again at once."""

from datetime import timedelta

import pytest

from certificates import Certificates
from kubelend.kits.backoff import Backoff
from kubelend.transports.client import BrokerClient

QUICK = Backoff(retries=2, first=timedelta(milliseconds=1))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("pki"))


@pytest.fixture
async def client(broker, certificates):
    async with BrokerClient(broker.url, certificates.cluster("a"), backoff=QUICK) as client:
        yield client
