"""Revocation: who is revoked is refused from the next request on, also behind a proxy that ends TLS."""

import asyncio
import json
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID
from msgspec.structs import replace

import applicants
import make
import raw_connections
from applicants import Applicant
from callers import Stream, address, offer, request_body
from kubelend.api import reservations
from kubelend.core.events import MemberChanged
from kubelend.core.lifecycle import Role
from kubelend.core.members import Member, MembershipStatus
from kubelend.pki import identity
from kubelend.stores.sqlite import SqliteStore
from mtls_headers import HEADER, passed_on
from waiting import PATIENCE

pytestmark = pytest.mark.broker("enrolling", trust_proxies=True)


async def joined(broker, tmp_path, name="berlin"):
    return broker.holder(await applicants.joined(broker, tmp_path / name, name), name)


async def revoke(broker, name="berlin", role="cluster", **fields):
    answer = await broker.admin().post("members", role, name, "revoke", fields)
    assert answer.status == 200, answer
    return answer.json


async def test_next_request_on_an_open_connection_is_refused_and_ends_it(broker, tmp_path):
    berlin = await joined(broker, tmp_path)
    async with raw_connections.connected(berlin) as (reader, writer):
        writer.write(raw_connections.GET)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        done = await revoke(broker, reason="stolen")
        assert (done["member"]["status"], done["member"]["reason"]) == ("Revoked", "stolen")
        writer.write(raw_connections.GET)
        rest = (await raw_connections.end_of(reader)).partition(b"HTTP/1.1 ")[
            2
        ]  # and the broker ends it
        assert rest.startswith(b"403 ")
        assert b"the certificate of cluster berlin was revoked at" in rest
    assert (await berlin.get("version")).refusal == (403, "Revoked")


async def test_calls_of_a_revoked_agent_that_retries_are_logged_once(broker, tmp_path, log):
    berlin = await joined(broker, tmp_path)
    await revoke(broker)
    for path in ("version", "instructions", "version"):
        assert (await berlin.get(path)).refusal == (403, "Revoked")
    assert [line["code"] for line in log.lines("Request rejected")] == ["Revoked"]


async def test_open_stream_ends_at_once_and_does_not_open_again(broker, tmp_path):
    berlin, paris = await joined(broker, tmp_path), await joined(broker, tmp_path, "paris")
    async with berlin.stream() as stream, paris.stream() as other:
        await stream.event()
        await other.event()
        await revoke(broker)
        assert {event.comment for event in await stream.rest()} <= {"open", "alive"}
        assert broker.service.streams.count("berlin") == 0
        assert broker.service.streams.count("paris") == 1
    async with berlin.stream() as stream:
        assert stream.response.status == 403


async def test_call_that_was_still_being_sent_is_refused(broker, tmp_path):
    berlin, paris = await joined(broker, tmp_path), await joined(broker, tmp_path, "paris")
    await paris.advertise()
    text = json.dumps(request_body()).encode()
    async with raw_connections.connected(berlin) as (reader, writer):
        writer.write(
            raw_connections.POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(text)
        )
        assert (await reader.readline()) == b"HTTP/1.1 100 Continue\r\n"
        await revoke(broker)
        writer.write(text)
        assert b"HTTP/1.1 403 " in await raw_connections.end_of(reader)
    assert (await broker.admin().read("reservations"))["reservations"] == []


@pytest.mark.parametrize("role", ["viewer", "admin"])
async def test_person_with_a_certificate_from_elsewhere_is_revoked_without_the_cluster_of_its_name(
    broker, certificates, role
):
    await broker.cluster("bob").advertise()
    bob = broker.holder(getattr(certificates, role)("bob"), "bob")
    assert (await bob.get("clusters")).status == 200
    assert (await revoke(broker, "bob", role))["known"] is False
    assert (await bob.get("clusters")).refusal == (403, "Revoked")
    await broker.cluster("bob").advertise()
    assert (await revoke(broker, "bob"))["known"] is True
    assert (await broker.cluster("bob").get("version")).refusal == (403, "Revoked")


async def test_nobody_revokes_or_removes_itself(broker):
    answer = await broker.admin().post("members", "admin", "alice", "revoke", {})
    assert answer.refusal == (409, "Conflict")
    assert (await broker.admin().delete("members", "admin", "alice")).refusal == (409, "Conflict")


async def test_after_an_accepted_return_the_old_certificate_is_refused_and_the_new_one_is_not(
    broker, tmp_path
):
    old = await joined(broker, tmp_path)
    await old.advertise()
    await revoke(broker)
    again, token = Applicant("berlin"), await applicants.token(broker, name="berlin")
    assert (await again.ask(broker, token)).status == 202  # a token alone is not enough
    assert (await old.get("version")).refusal == (403, "Revoked")
    await broker.admin().post("members", "cluster", "berlin", "approve")
    new = broker.holder(await again.join(broker, token, tmp_path / "again"), "berlin")
    await new.advertise()
    assert (await old.get("version")).refusal == (403, "Revoked")
    (cluster,) = (await broker.admin().read("clusters"))["clusters"]
    assert "cordoned" not in cluster["status"]
    renewed = broker.holder(await applicants.renewed(new, tmp_path / "renewed"), "berlin")
    await renewed.advertise()  # it is no older than the return


@pytest.mark.parametrize("keep", [False, True], ids=["refused", "kept"])
async def test_certificate_of_a_key_that_was_replaced_is_refused_and_its_stream_ends(
    broker, tmp_path, keep
):
    old = await joined(broker, tmp_path)
    second, token = Applicant("berlin"), await applicants.token(broker, name="berlin")
    assert (await second.ask(broker, token)).status == 202
    async with old.stream() as stream:
        await stream.event()
        body = {"keepOld": True} if keep else {}
        answer = await broker.admin().post("members", "cluster", "berlin", "approve", body)
        assert answer.json["status"] == "Approved"
        assert broker.service.streams.count("berlin") == (1 if keep else 0)
    new = broker.holder(await second.join(broker, token, tmp_path / "second"), "berlin")
    await new.advertise()
    assert (await old.get("version")).status == (200 if keep else 403)


async def test_revocation_survives_a_restart(certificates, tmp_path):
    stored = {"open_store": lambda: SqliteStore.open(tmp_path / "kubelend.db")}
    async with applicants.enrolling(certificates, tmp_path, **stored) as broker:
        await joined(broker, tmp_path)
        await revoke(broker)
    async with applicants.enrolling(certificates, tmp_path, **stored) as broker:
        berlin = broker.holder(tmp_path / "berlin", "berlin")
        assert (await berlin.get("version")).refusal == (403, "Revoked")


async def test_removed_member_is_refused_until_its_certificate_has_ended(broker, tmp_path):
    berlin = await joined(broker, tmp_path)
    await berlin.advertise()
    answer = await broker.admin().delete("members", "cluster", "berlin")
    assert answer.json["rejected"] is True
    assert "rejectedUntil" in answer.json
    assert (await broker.admin().read("clusters"))["clusters"] == []
    assert (await berlin.get("version")).refusal == (403, "Revoked")
    broker.clock.pass_time(timedelta(days=366))
    await broker.expire()
    assert not broker.service.members.members


async def test_longer_certificate_from_elsewhere_that_was_renewed_is_not_forgotten(
    broker, certificates, tmp_path
):
    profile, life = identity.client_profile("rome"), timedelta(days=3000)
    path = certificates.write("long", profile, at=datetime.now(UTC), lifetime=life)
    await applicants.renewed(broker.holder(path, "rome"), tmp_path / "renewed")
    answer = await broker.admin().delete("members", "cluster", "rome")
    end = applicants.certificate_in(path).not_valid_after_utc
    assert datetime.fromisoformat(answer.json["rejectedUntil"]) == end


async def test_revocation_is_in_the_audit_log_with_who_and_why(broker, tmp_path):
    berlin = await joined(broker, tmp_path)
    await revoke(broker, reason="stolen")
    await berlin.get("version")
    lines = (await broker.admin().read("audit", subject="member/cluster/berlin"))["lines"]
    (line,) = [line for line in lines if line["action"] == "MemberRevoked"]
    assert (line["actor"]["name"], line["after"]["reason"]) == ("alice", "stolen")
    (refused,) = (await broker.admin().read("audit", actor="berlin", refused="true"))["lines"]
    assert (refused["action"], refused["code"]) == ("version", "Revoked")


@pytest.fixture
def edge(broker, certificates):
    return broker.holder(
        certificates.write("proxy-edge", identity.client_profile("edge", Role.PROXY)), "edge"
    )


async def test_behind_a_proxy_the_revoked_one_is_refused_and_others_share_the_connection(
    broker, edge, tmp_path
):
    await joined(broker, tmp_path)
    await joined(broker, tmp_path, "paris")
    headers = {name: passed_on(tmp_path / name) for name in ("berlin", "paris")}
    assert (await edge.call("GET", "version", headers=headers["berlin"])).status == 200
    await revoke(broker)
    answer = await edge.call("GET", "version", headers=headers["berlin"])
    assert answer.refusal == (403, "Revoked")
    assert answer.headers.get("Connection") != "close"
    assert (await edge.call("GET", "version", headers=headers["paris"])).status == 200
    await revoke(broker, "edge", "proxy")
    answer = await edge.call("GET", "version", headers=headers["paris"])
    assert answer.refusal == (403, "Revoked")


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
        await revoke(broker, "edge", "proxy")
        assert {event.comment for event in await through.rest()} <= {"open", "alive"}
        assert broker.service.streams.count("berlin") == 1


@pytest.mark.parametrize(
    "role, name", [(Role.PROXY, "edge"), (Role.CLUSTER, "berlin")], ids=["proxy", "cluster"]
)
async def test_stream_asks_at_each_turn_whether_it_may_go_on(
    broker, edge, certificates, monkeypatch, role, name
):
    """Also where nobody closes it: here the registry knows without an event."""
    monkeypatch.setattr(reservations, "KEEP_ALIVE_SECONDS", 0.02)
    async with streaming(edge, certificates, "berlin") as stream:
        now = broker.clock()
        gone = Member(role, name, MembershipStatus.REVOKED, now, revoked_at=now)
        broker.service.members.apply(MemberChanged(now, gone), 1)
        async with asyncio.timeout(PATIENCE):
            await stream.rest()
        assert broker.service.streams.count("berlin") == 0


@pytest.mark.parametrize("role", [Role.PROXY, Role.CLUSTER])
async def test_stream_ends_with_the_certificate_of_its_caller_or_proxy(
    broker, certificates, monkeypatch, role
):
    monkeypatch.setattr(reservations, "KEEP_ALIVE_SECONDS", 0.02)
    profile = identity.client_profile("brief", role)
    brief = broker.holder(certificates.write(f"brief-{role}", profile, lifetime=make.HOUR), "brief")
    is_proxy = role is Role.PROXY
    opened = streaming(brief, certificates, "brief") if is_proxy else brief.stream()
    async with opened as stream, asyncio.timeout(PATIENCE):
        broker.clock.pass_time(2 * make.HOUR)
        assert {event.comment for event in await stream.rest()} <= {"", "open", "alive"}
        assert broker.service.streams.count("brief") == 0


async def test_audit_log_and_log_name_the_proxy_of_a_call(broker, edge, certificates, log):
    headers, cordon = passed_on(certificates.cluster("berlin")), ("clusters", "berlin", "cordon")
    answer = await edge.call("POST", *cordon, content=b"{}", headers=headers)
    assert answer.refusal == (403, "Forbidden")
    (line,) = (await broker.admin().read("audit", actor="berlin"))["lines"]
    assert (line["actor"]["role"], line["actor"]["via"]) == ("cluster", "edge")
    assert [line["via"] for line in log.lines("Request rejected")] == ["edge"]
    await broker.cluster("berlin").post(*cordon, {})
    (direct, _) = (await broker.admin().read("audit", actor="berlin"))["lines"]
    assert "via" not in direct["actor"]
    await revoke(broker, "edge", "proxy")
    assert (await edge.call("GET", "version", headers=headers)).refusal == (403, "Revoked")
    line = (await broker.admin().read("audit", refused="true"))["lines"][0]
    assert (line["actor"]["name"], line["actor"]["role"]) == ("edge", "proxy")
    assert log.lines("Request rejected")[-1]["caller"] == "edge"


async def publish(caller, name, headers):
    content = json.dumps(offer(name)).encode()
    return await caller.call("POST", "advertisements", content=content, headers=headers)


async def test_the_passed_on_certificate_names_the_caller(broker, edge, certificates):
    a, b = (passed_on(certificates.cluster(name)) for name in "ab")
    assert (await publish(edge, "a", a)).status == 200
    assert (await publish(edge, "b", b)).status == 200
    assert (await publish(edge, "b", a)).refusal == (403, "Forbidden")
    # The header of anybody else is not read.
    assert (await publish(broker.cluster("b"), "a", a)).refusal == (403, "Forbidden")


@pytest.mark.broker(since_now=True)
async def test_by_default_the_broker_trusts_no_proxy(broker, edge, certificates):
    answer = await publish(edge, "a", passed_on(certificates.cluster("a")))
    assert answer.refusal == (403, "InvalidIdentity")


async def test_what_tls_would_not_let_in_is_passed_on_for_nobody(edge, certificates):
    profile = replace(identity.client_profile("a"), usage=ExtendedKeyUsageOID.SERVER_AUTH)
    for_servers = certificates.write("for-servers", profile)
    for directory, *file in (
        (certificates.stranger("a"),),
        (certificates.expired("a"),),
        (certificates.early("a"),),
        (certificates.root / "proxy-edge",),
        (certificates.server(),),
        (for_servers,),
        (for_servers, "ca.crt"),
    ):
        answer = await publish(edge, "a", passed_on(directory, *file))
        assert answer.refusal == (403, "InvalidIdentity"), directory
        if directory == for_servers:
            assert answer.problem.detail == "Client-Cert: certificate is not a client certificate"
    for text in ("", ":", "::", ":!!!:", ":AAAA:", "AAAA", ":" + "A" * 7000 + ":"):
        answer = await edge.call("GET", "version", headers={HEADER: text})
        assert answer.refusal == (403, "InvalidIdentity"), text


async def test_a_known_certificate_is_refused_once_it_has_ended(broker, edge, certificates):
    headers = passed_on(certificates.cluster("a"))
    assert (await edge.call("GET", "version", headers=headers)).status == 200
    broker.clock.pass_time(timedelta(days=400))
    answer = await edge.call("GET", "version", headers=headers)
    assert answer.refusal == (403, "InvalidIdentity")
