"""A proxy that is put out takes all with it that came through it, and is named where it was part."""

import asyncio
from contextlib import asynccontextmanager

import pytest

import make
from callers import Stream, address
from kubelend.api import instructions
from kubelend.core.events import MemberChanged
from kubelend.core.lifecycle import Role
from kubelend.core.members import Member, MembershipStatus
from kubelend.pki import identity
from mtls_headers import passed_on
from waiting import PATIENCE

pytestmark = pytest.mark.broker(since_now=True, trust_proxies=True)


@pytest.fixture
def edge(broker, certificates):
    return broker.holder(
        certificates.write("proxy-edge", identity.client_profile("edge", Role.PROXY)), "edge"
    )


async def revoke(broker, role, name):
    assert (await broker.admin().post("members", role, name, "revoke", {})).status == 200


@asynccontextmanager
async def streaming(proxy, certificates, name):
    """A cluster's stream through a proxy."""
    headers = passed_on(certificates.cluster(name))
    url = address("instructions", "stream")
    async with proxy.session.get(url, headers=headers) as response:
        stream = Stream(response)
        await stream.event()
        yield stream


async def test_streams_through_a_revoked_proxy_end_at_once_and_others_go_on(
    broker, edge, certificates
):
    async with (
        streaming(edge, certificates, "berlin") as through,
        broker.cluster("berlin").stream() as past,
    ):
        await past.event()
        await revoke(broker, "proxy", "edge")
        assert {event.comment for event in await through.rest()} <= {"open", "alive"}
        assert broker.service.streams.count("berlin") == 1


@pytest.mark.parametrize(
    "role, name", [(Role.PROXY, "edge"), (Role.CLUSTER, "berlin")], ids=["proxy", "cluster"]
)
async def test_stream_asks_at_each_turn_whether_it_may_go_on(
    broker, edge, certificates, monkeypatch, role, name
):
    """Also where nobody closes it: here the registry knows without an event."""
    monkeypatch.setattr(instructions, "KEEP_ALIVE_SECONDS", 0.02)
    async with streaming(edge, certificates, "berlin") as stream:
        gone = Member(
            role, name, MembershipStatus.REVOKED, broker.clock(), revoked_at=broker.clock()
        )
        broker.service.members.apply(MemberChanged(broker.clock(), gone), 1)
        async with asyncio.timeout(PATIENCE):
            await stream.rest()
        assert broker.service.streams.count("berlin") == 0


async def test_stream_through_a_proxy_ends_with_the_proxys_certificate(
    broker, certificates, monkeypatch
):
    monkeypatch.setattr(instructions, "KEEP_ALIVE_SECONDS", 0.02)
    profile = identity.client_profile("brief", Role.PROXY)
    brief = certificates.write("brief", profile, lifetime=make.HOUR)
    async with streaming(broker.holder(brief, "brief"), certificates, "berlin") as stream:
        broker.clock.pass_time(2 * make.HOUR)
        async with asyncio.timeout(PATIENCE):
            await stream.rest()
        assert broker.service.streams.count("berlin") == 0


async def test_journal_and_log_name_the_proxy_of_a_call(broker, edge, certificates, log):
    answer = await edge.call(
        "POST",
        "clusters",
        "berlin",
        "cordon",
        content=b"{}",
        headers=passed_on(certificates.cluster("berlin")),
    )
    assert answer.refusal == (403, "Forbidden")
    (line,) = (await broker.admin().read("audit", actor="berlin"))["lines"]
    assert (line["actor"]["role"], line["actor"]["via"]) == ("cluster", "edge")
    assert [line["via"] for line in log.lines("Request rejected")] == ["edge"]
    await broker.cluster("berlin").post("clusters", "berlin", "cordon", {})
    (direct, _) = (await broker.admin().read("audit", actor="berlin"))["lines"]
    assert "via" not in direct["actor"]


async def test_refusal_of_a_revoked_proxy_names_the_proxy(broker, edge, certificates, log):
    await revoke(broker, "proxy", "edge")
    headers = passed_on(certificates.cluster("berlin"))
    answer = await edge.call("GET", "version", headers=headers)
    assert answer.refusal == (403, "Revoked")
    (line,) = (await broker.admin().read("audit", refused="true"))["lines"]
    assert (line["actor"]["name"], line["actor"]["role"]) == ("edge", "proxy")
    assert [line["caller"] for line in log.lines("Request rejected")] == ["edge"]
