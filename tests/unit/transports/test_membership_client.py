"""Tokens and members through the client, beside what `test_client_routes` says of every call."""

from datetime import UTC, datetime

import pytest

from kubelend.core.errors import BrokerUnreachable
from kubelend.kits import backoff
from kubelend.transports.client import BrokerClient
from kubelend.wire import admin_bodies
from scripted_broker import body, hang_up

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MEMBER = admin_bodies.Member("cluster", "a/b", "Accepted", NOW)

pytestmark = pytest.mark.broker("scripted")


@pytest.fixture
async def client(broker, certificates):
    async with BrokerClient(
        broker.url, certificates.admin("a"), backoff=backoff.NO_RETRIES
    ) as client:
        yield client


async def test_all_pages_of_members_are_read(broker, client):
    broker.responses += [
        body(admin_bodies.MemberList([MEMBER], "x")),
        body(admin_bodies.MemberList([MEMBER])),
    ]
    assert await client.members.all() == [MEMBER, MEMBER]
    assert broker.seen[1].query == {"continue": "x"}


async def test_a_token_is_not_made_twice_when_the_answer_is_lost(broker, certificates):
    patient = BrokerClient(broker.url, certificates.admin("a"))
    async with patient as client:
        broker.responses.append(hang_up)
        with pytest.raises(BrokerUnreachable):
            await client.tokens.create(admin_bodies.TokenRequest())
    assert len(broker.seen) == 1
