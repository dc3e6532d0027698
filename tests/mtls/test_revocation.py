"""Revocation: who is revoked is refused from the next request on, also broker a proxy that ends TLS."""

import asyncio
import json
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID
from msgspec.structs import replace

import brokers
import make
import newcomers
import raw_connections
from callers import Stream, address, offer, wish
from kubelend.api import instructions
from kubelend.core.events import MemberChanged
from kubelend.core.lifecycle import Role
from kubelend.core.members import Member, MembershipStatus
from kubelend.pki import files, identity
from kubelend.stores.sqlite import SqliteStore
from mtls_headers import HEADER, passed_on
from newcomers import Newcomer
from waiting import PATIENCE

pytestmark = pytest.mark.broker("enrolling", trust_proxies=True)


async def joined(broker, tmp_path, name="berlin", directory=""):
    token = await newcomers.token(broker, name=name)
    path = await Newcomer(name).join(broker, token, tmp_path / (directory or name))
    return broker.holder(path, name)


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
        assert (done["member"]["standing"], done["member"]["reason"]) == ("Revoked", "stolen")
        writer.write(raw_connections.GET)
        rest = (await raw_connections.end_of(reader)).partition(b"HTTP/1.1 ")[
            2
        ]  # and the broker ends it
        assert rest.startswith(b"403 ")
        assert b"the certificate of cluster berlin was revoked at" in rest
    assert (await berlin.get("version")).refusal == (403, "Revoked")


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
    text = json.dumps(wish()).encode()
    async with raw_connections.connected(berlin) as (reader, writer):
        writer.write(
            raw_connections.POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(text)
        )
        assert (await reader.readline()) == b"HTTP/1.1 100 Continue\r\n"
        await revoke(broker)
        writer.write(text)
        assert b"HTTP/1.1 403 " in await raw_connections.end_of(reader)
    assert (await broker.admin().read("reservations"))["reservations"] == []


async def test_certificate_from_elsewhere_is_refused_too(broker):
    rome = broker.cluster("rome")
    await rome.advertise()
    done = await revoke(broker, "rome")
    assert done["known"] is True
    assert (await rome.get("version")).refusal == (403, "Revoked")
    assert (await revoke(broker, "nobody"))["known"] is False


async def test_revoked_administrator_does_not_return_with_a_token_it_made(
    broker, certificates, tmp_path
):
    mallory = broker.holder(certificates.admin("mallory"), "mallory")
    made = [
        (await mallory.post("tokens", {"role": "admin", "name": name})).json["token"]
        for name in ("eve", "oscar")
    ]
    await Newcomer("eve", Role.ADMIN).join(broker, made[0], tmp_path / "eve")
    done = await revoke(broker, "mallory", "admin")
    assert sorted(done["tokens"]) == sorted(token.split(".")[1] for token in made)
    assert done["letIn"] == ["admin/eve"]
    answer = await Newcomer("oscar", Role.ADMIN).ask(broker, made[1])
    assert answer.refusal == (403, "TokenRefused")


@pytest.mark.parametrize("role", ["viewer", "admin"])
async def test_person_is_revoked_without_the_cluster_of_its_name(broker, certificates, role):
    await broker.cluster("bob").advertise()
    bob = broker.holder(getattr(certificates, role)("bob"), "bob")
    assert (await bob.get("clusters")).status == 200
    await revoke(broker, "bob", role)
    assert (await bob.get("clusters")).refusal == (403, "Revoked")
    await broker.cluster("bob").advertise()


async def test_nobody_revokes_or_removes_itself(broker):
    answer = await broker.admin().post("members", "admin", "alice", "revoke", {})
    assert answer.refusal == (409, "Conflict")
    assert (await broker.admin().delete("members", "admin", "alice")).refusal == (409, "Conflict")


async def test_broker_a_proxy_the_revoked_one_is_refused_and_others_share_the_connection(
    broker, certificates, tmp_path
):
    await joined(broker, tmp_path)
    await joined(broker, tmp_path, "paris")
    proxy = broker.holder(
        certificates.write("edge", identity.client_profile("envoy", Role.PROXY)), "envoy"
    )
    headers = {name: passed_on(tmp_path / name) for name in ("berlin", "paris")}
    assert (await proxy.call("GET", "version", headers=headers["berlin"])).status == 200
    await revoke(broker)
    answer = await proxy.call("GET", "version", headers=headers["berlin"])
    assert answer.refusal == (403, "Revoked")
    assert answer.headers.get("Connection") != "close"
    assert (await proxy.call("GET", "version", headers=headers["paris"])).status == 200
    await revoke(broker, "envoy", "proxy")
    answer = await proxy.call("GET", "version", headers=headers["paris"])
    assert answer.refusal == (403, "Revoked")


async def test_kept_reservations_stay_and_nothing_new_is_placed_there(broker, tmp_path):
    berlin, paris = await joined(broker, tmp_path), await joined(broker, tmp_path, "paris")
    await berlin.advertise()
    held = await paris.reserve()
    done = await revoke(broker)
    assert "drained" not in done
    assert await paris.phase_of(held["id"]) == "Reserved"
    answer = await paris.post("reservations", wish())
    assert answer.refusal == (409, "NoCapacity")
    (cluster,) = (await broker.admin().read("clusters"))["clusters"]
    assert cluster["status"]["cordonReason"] == "revoked"


async def test_released_reservations_are_given_back_and_moved(broker, tmp_path):
    berlin, paris = await joined(broker, tmp_path), await joined(broker, tmp_path, "paris")
    rome = await joined(broker, tmp_path, "rome")
    await berlin.advertise()
    lent = await paris.reserve()
    await rome.advertise()
    borrowed = await berlin.reserve()
    done = await revoke(broker, release=True)
    assert (done["released"], done["drained"]) == ([borrowed["id"]], [lent["id"]])
    moved = await paris.read("reservations", lent["id"])
    assert (moved["status"]["phase"], moved["targetClusterID"]) == ("Reserved", "rome")
    assert await broker.admin().phase_of(borrowed["id"]) == "Released"


async def test_after_an_accepted_return_the_old_certificate_is_refused_and_the_new_one_is_not(
    broker, tmp_path
):
    old = await joined(broker, tmp_path)
    await old.advertise()
    await revoke(broker)
    again, token = Newcomer("berlin"), await newcomers.token(broker, name="berlin")
    assert (await again.ask(broker, token)).status == 202  # a token alone is not enough
    assert (await old.get("version")).refusal == (403, "Revoked")
    await broker.admin().post("members", "cluster", "berlin", "accept")
    new = broker.holder(await again.join(broker, token, tmp_path / "again"), "berlin")
    await new.advertise()
    assert (await old.get("version")).refusal == (403, "Revoked")
    (cluster,) = (await broker.admin().read("clusters"))["clusters"]
    assert "cordoned" not in cluster["status"]
    fresh = Newcomer("berlin")
    answer = await new.post("certificates", {"request": fresh.request})
    renewed = broker.holder(fresh.save(answer, tmp_path / "renewed"), "berlin")
    await renewed.advertise()  # it is no older than the return


@pytest.mark.parametrize("keep", [False, True], ids=["refused", "kept"])
async def test_certificate_of_a_key_that_was_replaced_is_refused_and_its_stream_ends(
    broker, tmp_path, keep
):
    old = await joined(broker, tmp_path)
    second, token = Newcomer("berlin"), await newcomers.token(broker, name="berlin")
    assert (await second.ask(broker, token)).status == 202
    async with old.stream() as stream:
        await stream.event()
        body = {"keepOld": True} if keep else {}
        answer = await broker.admin().post("members", "cluster", "berlin", "accept", body)
        assert answer.json["standing"] == "Accepted"
        assert broker.service.streams.count("berlin") == (1 if keep else 0)
    new = broker.holder(await second.join(broker, token, tmp_path / "second"), "berlin")
    await new.advertise()
    assert (await old.get("version")).status == (200 if keep else 403)


async def test_revocation_survives_a_restart(certificates, tmp_path):
    path = tmp_path / "kubelend.db"
    for run in (1, 2):
        store = SqliteStore.open(path)
        async with newcomers.enrolling(
            certificates, tmp_path, open_store=brokers.reopening(store)
        ) as broker:
            if run == 1:
                await joined(broker, tmp_path)
                await revoke(broker)
            berlin = broker.holder(tmp_path / "berlin", "berlin")
            assert (await berlin.get("version")).refusal == (403, "Revoked")


async def test_removed_member_is_refused_until_its_certificate_has_ended(broker, tmp_path):
    berlin = await joined(broker, tmp_path)
    await berlin.advertise()
    answer = await broker.admin().delete("members", "cluster", "berlin")
    assert answer.json["refused"] is True
    assert "refusedUntil" in answer.json
    assert (await broker.admin().read("clusters"))["clusters"] == []
    assert (await berlin.get("version")).refusal == (403, "Revoked")
    broker.clock.pass_time(timedelta(days=366))
    await broker.expire()
    assert not broker.service.members.members


async def test_removed_one_that_was_revoked_is_refused_for_good(broker, certificates, tmp_path):
    """With a certificate from elsewhere that the broker never saw, and that outlives all others."""
    berlin = await joined(broker, tmp_path)
    lifetime = timedelta(days=3000)
    profile = identity.client_profile("berlin")
    longer = certificates.write("longer", profile, at=datetime.now(UTC), lifetime=lifetime)
    await revoke(broker)
    answer = await broker.admin().delete("members", "cluster", "berlin")
    assert answer.json == {"refused": True}
    broker.clock.pass_time(timedelta(days=366))
    await broker.expire()
    broker.clock.pass_time(timedelta(days=-366))
    for holder in (berlin, broker.holder(longer, "berlin")):
        assert (await holder.get("version")).refusal == (403, "Revoked")


async def test_longer_certificate_from_elsewhere_that_was_renewed_is_not_forgotten(
    broker, certificates
):
    lifetime = timedelta(days=3000)
    profile = identity.client_profile("rome")
    path = certificates.write("long", profile, at=datetime.now(UTC), lifetime=lifetime)
    rome = broker.holder(path, "rome")
    answer = await rome.post("certificates", {"request": Newcomer("rome").request})
    assert answer.status == 200
    answer = await broker.admin().delete("members", "cluster", "rome")
    end = files.load_credentials(path).certificate.not_valid_after_utc
    assert datetime.fromisoformat(answer.json["refusedUntil"]) == end


async def test_revocation_is_in_the_journal_with_who_and_why(broker, tmp_path):
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
    monkeypatch.setattr(instructions, "KEEP_ALIVE_SECONDS", 0.02)
    async with streaming(edge, certificates, "berlin") as stream:
        gone = Member(
            role, name, MembershipStatus.REVOKED, broker.clock(), revoked_at=broker.clock()
        )
        broker.service.members.apply(MemberChanged(broker.clock(), gone), 1)
        async with asyncio.timeout(PATIENCE):
            await stream.rest()
        assert broker.service.streams.count("berlin") == 0


@pytest.mark.parametrize("role", [Role.PROXY, Role.CLUSTER])
async def test_stream_ends_with_the_certificate_of_its_caller_or_proxy(
    broker, certificates, monkeypatch, role
):
    monkeypatch.setattr(instructions, "KEEP_ALIVE_SECONDS", 0.02)
    profile = identity.client_profile("brief", role)
    brief = broker.holder(certificates.write(f"brief-{role}", profile, lifetime=make.HOUR), "brief")
    is_proxy = role is Role.PROXY
    opened = streaming(brief, certificates, "brief") if is_proxy else brief.stream()
    async with opened as stream, asyncio.timeout(PATIENCE):
        broker.clock.pass_time(2 * make.HOUR)
        assert {event.comment for event in await stream.rest()} <= {"", "open", "alive"}
        assert broker.service.streams.count("brief") == 0


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
    await revoke(broker, "edge", "proxy")
    headers = passed_on(certificates.cluster("berlin"))
    assert (await edge.call("GET", "version", headers=headers)).refusal == (403, "Revoked")
    line = (await broker.admin().read("audit", refused="true"))["lines"][0]
    assert (line["actor"]["name"], line["actor"]["role"]) == ("edge", "proxy")
    assert log.lines("Request rejected")[-1]["caller"] == "edge"


async def publish(caller, name, headers):
    content = json.dumps(offer(name)).encode()
    return await caller.call("POST", "advertisements", content=content, headers=headers)


async def version(caller, headers):
    return await caller.call("GET", "version", headers=headers)


async def test_the_passed_on_certificate_names_the_caller(broker, edge, certificates):
    for name in ("a", "b"):
        headers = passed_on(certificates.cluster(name))
        answer = await publish(edge, name, headers)
        assert answer.status == 200
    headers = passed_on(certificates.cluster("a"))
    answer = await publish(edge, "b", headers)
    assert answer.refusal == (403, "Forbidden")


@pytest.mark.broker(since_now=True)
async def test_without_being_told_to_the_broker_trusts_no_proxy(broker, edge, certificates):
    headers = passed_on(certificates.cluster("a"))
    answer = await publish(edge, "a", headers)
    assert answer.refusal == (403, "InvalidIdentity")


async def test_the_header_of_anybody_else_is_not_read(broker, certificates):
    headers = passed_on(certificates.cluster("a"))
    answer = await publish(broker.cluster("b"), "a", headers)
    assert answer.refusal == (403, "Forbidden")


def for_servers(certificates):
    """Also where its name would be a cluster's: TLS here would not have let it in either."""
    profile = replace(identity.client_profile("a"), usage=ExtendedKeyUsageOID.SERVER_AUTH)
    return certificates.write("for-servers", profile)


NOT_PASSED_ON = {
    "stranger": lambda made: passed_on(made.stranger("a")),
    "expired": lambda made: passed_on(made.expired("a")),
    "early": lambda made: passed_on(made.early("a")),
    "proxy": lambda made: passed_on(made.root / "proxy-edge"),
    "broker": lambda made: passed_on(made.server()),
    "for servers": lambda made: passed_on(for_servers(made)),
    "for signing": lambda made: passed_on(for_servers(made), "ca.crt"),
}


@pytest.mark.parametrize("kind", NOT_PASSED_ON)
async def test_what_tls_would_not_let_in_is_passed_on_for_nobody(edge, certificates, kind):
    answer = await publish(edge, "a", NOT_PASSED_ON[kind](certificates))
    assert answer.refusal == (403, "InvalidIdentity")
    if kind.startswith("for "):
        assert answer.problem.detail == "Client-Cert: certificate is not a client certificate"


@pytest.mark.parametrize(
    "header", ["", ":", "::", ":!!!:", ":AAAA:", "AAAA", ":" + "A" * 7000 + ":"]
)
async def test_what_is_no_certificate_is_refused(edge, header):
    assert (await version(edge, {HEADER: header})).refusal == (403, "InvalidIdentity")


async def test_a_known_certificate_is_refused_once_it_has_ended(broker, edge, certificates):
    headers = passed_on(certificates.cluster("a"))
    assert (await version(edge, headers)).status == 200
    broker.clock.pass_time(timedelta(days=400))
    assert (await version(edge, headers)).refusal == (403, "InvalidIdentity")
