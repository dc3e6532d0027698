"""A broker that says what it is told to, over real TLS."""

import pytest

from certificates import Certificates
from scripted_broker import ScriptedBroker


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("pki"))


@pytest.fixture
async def broker(certificates):
    async with ScriptedBroker(certificates.server()) as broker:
        yield broker
