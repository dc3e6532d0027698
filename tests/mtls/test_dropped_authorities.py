"""Who was let in by an authority that a rotation has dropped is not believed any more."""

import shutil
from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

import bare
import brokers
import newcomers
import tls_peers
import waiting
from callers import Caller
from certificates import Certificates
from kubelend.core.lifecycle import Role
from kubelend.pki import authority, files, identity
from kubelend.pki.authority import Authority
from kubelend.pki.passphrases import Passphrase
from mtls_headers import passed_on
from newcomers import Newcomer


@pytest.fixture
def own(tmp_path):
    """An authority of one's own for each test, since it changes."""
    return Certificates(tmp_path / "own")


@pytest.fixture
def server(own, tmp_path):
    """The broker's own files, which it may write."""
    return shutil.copytree(own.server(), tmp_path / "server")


def started(own, server, tmp_path, **settings):
    """A broker that reads its files when it starts, and when asked to."""
    hour = timedelta(hours=1)
    return newcomers.enrolling(
        own, tmp_path, http_cert_path=server, certificate_check_interval=hour, **settings
    )


def rotate(tmp_path, **parameters):
    return authority.rotate_authority(tmp_path / "authority", now=datetime.now(UTC), **parameters)


def new_admin(tmp_path, name="alice"):
    """Somebody whom the new authority vouches for."""
    profile = identity.client_profile(name, Role.ADMIN)
    credentials = Authority.load(tmp_path / "authority").issue(profile, now=datetime.now(UTC))
    files.save_credentials(tmp_path / f"new-{name}", credentials)
    return tmp_path / f"new-{name}"


async def renew(caller, name="berlin"):
    newcomer = Newcomer(name)
    return newcomer, await caller.post("certificates", {"request": newcomer.request})


# -- while the broker is down


async def rotated_by_the_broker(own, server, tmp_path):
    async with started(own, server, tmp_path) as broker:
        rotate(tmp_path)
        await broker.trust.refresh()
    assert own.authority.certificate in files.load_certificates(server / "ca.crt")


async def test_rotation_that_was_finished_while_the_broker_was_down_is_finished_at_its_start(
    own, server, tmp_path, log
):
    await rotated_by_the_broker(own, server, tmp_path)
    authority.finish_rotation(tmp_path / "authority")
    async with started(own, server, tmp_path) as broker:
        assert await tls_peers.name_of(broker.port, broker.cluster("berlin").context) == ""
        await waiting.until(
            lambda: own.authority.certificate not in files.load_certificates(server / "ca.crt")
        )
        alice = broker.holder(new_admin(tmp_path), "alice")
        assert (await alice.get("version")).status == 200
    (line,) = log.lines("Ignoring CA in ca.crt that was dropped by a rotation")
    assert line["ca"] == "CN=test-ca"


async def test_files_that_the_broker_may_not_write_bring_no_dropped_authority_back(
    own, server, tmp_path
):
    await rotated_by_the_broker(own, server, tmp_path)
    authority.finish_rotation(tmp_path / "authority")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (mounted / name).symlink_to(server / name)
    async with started(own, mounted, tmp_path) as broker:
        await broker.trust.refresh()
        assert own.authority.certificate in files.load_certificates(mounted / "ca.crt")
        assert await tls_peers.name_of(broker.port, broker.cluster("berlin").context) == ""


# -- open connections


@pytest.fixture
async def broker(own, server, tmp_path):
    async with started(own, server, tmp_path, trust_proxies=True) as broker:
        rotate(tmp_path)
        await broker.trust.refresh()
        yield broker


async def finish(broker, tmp_path):
    authority.finish_rotation(tmp_path / "authority")
    await broker.trust.refresh()


async def test_open_connection_of_the_dropped_authority_is_refused_and_ends(broker, tmp_path):
    async with bare.connected(broker.cluster("berlin")) as (reader, writer):
        writer.write(bare.GET)
        assert (await bare.answer_of(reader)).startswith(b"HTTP/1.1 200 ")
        await finish(broker, tmp_path)
        writer.write(bare.GET)
        rest = await bare.end_of(reader)
    assert b"HTTP/1.1 403 " in rest
    assert b"the CA of cluster berlin's certificate is no longer trusted" in rest


async def test_nobody_renews_over_an_open_connection_into_the_new_authority(broker, tmp_path):
    berlin = broker.cluster("berlin")
    assert (await berlin.get("version")).status == 200
    await finish(broker, tmp_path)
    _, answer = await renew(berlin)
    assert answer.refusal == (403, "Revoked")


async def test_call_whose_body_was_awaited_meanwhile_is_refused(broker, tmp_path):
    request = b'{"request": ""}'
    head = b"POST /api/v1/certificates HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
    async with bare.connected(broker.cluster("berlin")) as (reader, writer):
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(request))
        assert (await reader.readline()) == b"HTTP/1.1 100 Continue\r\n"
        await finish(broker, tmp_path)
        writer.write(request)
        assert b"HTTP/1.1 403 " in await bare.end_of(reader)


async def test_stream_of_the_dropped_authority_ends_at_once_and_others_go_on(broker, tmp_path):
    newcomer, answer = await renew(broker.cluster("paris"), "paris")
    paris = broker.holder(newcomer.save(answer, tmp_path / "paris"), "paris")
    async with broker.cluster("berlin").stream() as stream, paris.stream() as other:
        await stream.event()
        await other.event()
        await finish(broker, tmp_path)
        assert {event.comment for event in await stream.rest()} <= {"open", "alive"}
        assert broker.service.streams.count("paris") == 1


async def test_connections_of_the_new_authority_go_on(broker, tmp_path):
    newcomer, answer = await renew(broker.cluster("berlin"))
    berlin = broker.holder(newcomer.save(answer, tmp_path / "berlin"), "berlin")
    async with bare.connected(berlin) as (reader, writer):
        for _ in range(2):
            writer.write(bare.GET)
            assert (await bare.answer_of(reader)).startswith(b"HTTP/1.1 200 ")
            if not (tmp_path / "authority" / "dropped.crt").exists():
                await finish(broker, tmp_path)


async def test_holder_below_an_intermediate_is_told_to_connect_again(own, server, tmp_path):
    """Its chain was shown in the handshake, and is not kept."""
    other = Authority.create("other", now=own.now)
    below = other.successor(now=own.now, name="below")
    files.save_credentials(
        tmp_path / "c",
        replace(
            replace(below, trusted=own.authority.trusted).issue(
                identity.client_profile("c"), now=own.now
            ),
            chain=below.chain,
        ),
    )
    friends = [own.authority.certificate, other.certificate]
    (server / "ca.crt").write_bytes(files.to_pem(friends))
    async with started(own, server, tmp_path) as broker:
        rotate(tmp_path)
        await broker.trust.refresh()
        caller = broker.holder(tmp_path / "c", "c")
        assert (await caller.get("version")).status == 200
        await finish(broker, tmp_path)
        assert (await caller.get("version")).refusal == (503, "Unavailable")
        caller.context.load_verify_locations(server / "ca.crt")
        assert (await caller.get("version")).status == 200


async def test_proxy_of_the_dropped_authority_is_refused_and_passes_nobody_on(
    broker, own, tmp_path
):
    path = own.write("edge", identity.client_profile("edge", Role.PROXY))
    newcomer, answer = await renew(broker.cluster("berlin"))
    new = passed_on(newcomer.save(answer, tmp_path / "berlin"))
    proxy = broker.holder(path, "edge")
    assert (await proxy.call("GET", "version", headers=new)).status == 200
    await finish(broker, tmp_path)
    answer = await proxy.call("GET", "version", headers=new)
    assert answer.refusal == (403, "Revoked")


# -- a key that the broker cannot read


async def test_new_passphrase_is_taken_up_from_its_file(own, server, tmp_path):
    secret = tmp_path / "passphrase"
    secret.write_text("old\n")
    secret.chmod(0o600)
    replace(own.authority, passphrase=Passphrase("old")).save(tmp_path / "authority")
    async with started(own, server, tmp_path, ca_passphrase_file=str(secret)) as broker:
        new = rotate(tmp_path, passphrase=Passphrase("old"), new_passphrase=Passphrase("new"))
        secret.write_text("new\n")
        await broker.trust.refresh()
        newcomer, answer = await renew(broker.cluster("berlin"))
        issued = files.load_certificates(newcomer.save(answer, tmp_path / "b") / "tls.crt")
        assert issued[0].issuer == new.certificate.subject


async def test_nothing_is_signed_while_the_key_on_disk_cannot_be_read(own, server, tmp_path, log):
    async with started(own, server, tmp_path) as broker:
        new = rotate(tmp_path, new_passphrase=Passphrase("new"))
        for _ in range(2):
            await broker.trust.refresh()
        _, answer = await renew(broker.cluster("berlin"))
        assert answer.refusal == (503, "Unavailable")
        assert "the CA on disk cannot be loaded" in answer.problem.error
        token = await newcomers.token(broker, name="paris")
        assert (await Newcomer("paris").ask(broker, token)).status == 503
        authority.finish_rotation(tmp_path / "authority", Passphrase("new"))
        await broker.trust.refresh()  # whom to believe can be read without the key
        assert (await broker.cluster("berlin").get("version")).refusal == (403, "Revoked")
        assert new.certificate not in files.load_certificates(server / "ca.crt")
    assert len(log.lines("CA reload failed, not issuing certificates")) == 1


async def test_the_certificate_of_a_caller_is_judged_anew_without_an_authority_too(own, tmp_path):
    """The broker has only `ca.crt`, and somebody has exchanged it."""
    live = shutil.copytree(own.server(), tmp_path / "live")
    friend = Certificates(tmp_path / "friend", authority="friend")
    both = [own.authority.certificate, friend.authority.certificate]
    (live / "ca.crt").write_bytes(files.to_pem(both))
    async with brokers.running(
        own, http_cert_path=live, certificate_check_interval=timedelta(hours=1)
    ) as broker:
        caller = Caller(broker.port, friend.cluster("a"), "a")
        caller.context.load_verify_locations(live / "ca.crt")
        assert (await caller.get("version")).status == 200
        (live / "ca.crt").write_bytes(files.to_pem(both[:1]))
        await broker.trust.refresh()
        assert (await caller.get("version")).refusal == (403, "Revoked")
        await caller.hang_up()
