"""Tokens and members through the client: each call goes to its route, and gives its body."""

from datetime import UTC, datetime

import pytest

from certificates import Certificates
from kubelend.core.errors import BrokerUnreachable
from kubelend.kits import backoff
from kubelend.transports.http_client import BrokerClient
from kubelend.wire import membership_bodies as bodies
from kubelend.wire import route, routes
from kubelend.wire.tables import membership
from scripted_broker import ScriptedBroker, body, hang_up, raw

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MEMBER = bodies.Member("cluster", "a/b", "Accepted", NOW)
TOKEN = bodies.Token("abc", "Valid", "cluster", 1, NOW, "alice", NOW)
NEW = bodies.NewToken("kl1.abc.x", "abc", "cluster", NOW, 1, 8444, "sha256:0", "8760h")

CALLS = {
    "create_token": (lambda c: c.tokens.create(bodies.TokenRequest()), "/tokens", NEW, NEW),
    "list_tokens": (
        lambda c: c.tokens.all(),
        "/tokens",
        bodies.TokenList([TOKEN]),
        [TOKEN],
    ),
    "list_members": (
        lambda c: c.members.all(standing="Pending"),
        "/members",
        bodies.MemberList([MEMBER]),
        [MEMBER],
    ),
    "accept_member": (
        lambda c: c.members.accept("cluster", "a/b"),
        "/members/cluster/a%2Fb/accept",
        MEMBER,
        MEMBER,
    ),
    "revoke_member": (
        lambda c: c.members.revoke("viewer", "v", release=True, reason="left"),
        "/members/viewer/v/revoke",
        bodies.Revocation(MEMBER, True),
        bodies.Revocation(MEMBER, True),
    ),
    "remove_member": (
        lambda c: c.members.remove("cluster", "a"),
        "/members/cluster/a",
        bodies.Removal(False),
        bodies.Removal(False),
    ),
}
WITHOUT_A_BODY = {
    "delete_token": (lambda c: c.tokens.delete("abc"), "/tokens/abc"),
    "reject_member": (lambda c: c.members.reject("cluster", "a"), "/members/cluster/a/reject"),
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("pki"))


@pytest.fixture
async def broker(certificates):
    async with ScriptedBroker(certificates.server()) as broker:
        yield broker


@pytest.fixture
async def client(broker, certificates):
    async with BrokerClient(broker.url, certificates.admin("a"), backoff=backoff.NONE) as client:
        yield client


def test_every_route_has_a_method():
    known = {found.name for found in membership.ROUTES} - {"renew_certificate"}
    assert CALLS.keys() | WITHOUT_A_BODY.keys() == known


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_goes_to_its_route_and_gives_its_body(broker, client, name):
    call, path, content, expected = CALLS[name]
    broker.answers.append(body(content, min(routes.BY_NAME[name].answers)))
    assert await call(client) == expected
    assert broker.seen[0].path == route.API + path
    assert broker.seen[0].method == routes.BY_NAME[name].method


@pytest.mark.parametrize("name", WITHOUT_A_BODY)
async def test_an_answer_without_a_body_is_enough_where_there_is_none(broker, client, name):
    call, path = WITHOUT_A_BODY[name]
    broker.answers.append(raw(b"", 204))
    await call(client)
    assert broker.seen[0].path == route.API + path


async def test_all_pages_of_members_are_read(broker, client):
    broker.answers += [body(bodies.MemberList([MEMBER], "x")), body(bodies.MemberList([MEMBER]))]
    assert await client.members.all() == [MEMBER, MEMBER]
    assert broker.seen[1].query == {"continue": "x"}


async def test_a_token_is_not_made_twice_when_the_answer_is_lost(broker, certificates):
    patient = BrokerClient(broker.url, certificates.admin("a"))
    async with patient as client:
        broker.answers.append(hang_up)
        with pytest.raises(BrokerUnreachable):
            await client.tokens.create(bodies.TokenRequest())
    assert len(broker.seen) == 1
