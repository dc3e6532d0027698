"""Rotation of the authority: nobody is refused in between, and at its end what the old one signed is."""

import itertools
import shutil
import ssl
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest
from cryptography import x509
from msgspec.structs import replace

import applicants
import raw_connections
import tls_peers
import waiting
from applicants import Applicant
from certificates import Certificates
from clocks import Clock
from kubelend.core.lifecycle import Role
from kubelend.pki import authority, files, identity, tokens
from kubelend.pki.authority import Authority
from kubelend.pki.passphrases import Passphrase
from kubelend.transports import tls
from mtls_headers import passed_on
from proofs import rotation


@pytest.mark.timeout(120)
async def test_certificates_and_their_authority_rotate_without_a_failed_request(tmp_path):
    plan = rotation.Plan(
        lifetime=timedelta(minutes=10),
        duration=timedelta(seconds=5),
        clusters=3,
        workers=3,
        renew_every=timedelta(seconds=0.5),
    )
    report = await rotation.prove(plan, tmp_path)
    assert report.failures == []
    assert report.steps == ["rotate", "sign", "drop"]
    assert len(report.renewals) == 4
    assert min(report.renewals.values()) >= 2
    assert report.calls > 30
    assert report.events > 10


NOW = datetime.now(UTC)

DAY = timedelta(days=1)


SERVER = identity.server_profile()


class Side(NamedTuple):
    """What a server or a client has in its directory."""

    leaf: str
    trusts: str

    def accepts(self, other):
        """Who trusts both refuses nobody."""
        return self.trusts in ("both", other.leaf)


SIDES = [Side(*pair) for pair in itertools.product(["old", "new"], ["old", "both", "new"])]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A server's and a client's directory for each side that there can be."""
    root = tmp_path_factory.mktemp("rotation")
    old = Authority.create("kubelend", now=NOW - DAY)
    old.save(root / "ca")
    authority.start_rotation(root / "ca", now=NOW)
    authority.finish_rotation(root / "ca")
    new = Authority.load(root / "ca")
    signers = {"old": old, "new": new}
    bundles = {"old": [old.certificate], "both": new.trusted, "new": [new.certificate]}
    for (leaf, trusts), end in itertools.product(SIDES, ["server", "client"]):
        profile = SERVER if end == "server" else identity.client_profile("agent-cluster-1")
        directory = root / f"{end}-{leaf}-{trusts}"
        files.save_credentials(directory, signers[leaf].issue(profile, now=NOW))
        (directory / "ca.crt").write_bytes(files.to_pem(bundles[trusts]))
    return root


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=str)
@pytest.mark.parametrize("client", SIDES, ids="{0.leaf} client trusts {0.trusts}".format)
@pytest.mark.parametrize("server", SIDES, ids="{0.leaf} server trusts {0.trusts}".format)
def test_both_sides_let_each_other_in_while_they_trust_both(directories, server, client, version):
    context = tls.client_context(directories / f"client-{client.leaf}-{client.trusts}")
    context.minimum_version = context.maximum_version = version
    own = tls.server_context(directories / f"server-{server.leaf}-{server.trusts}")
    seen = tls_peers.shake_hands(own, context)
    if server.accepts(client) and client.accepts(server):
        assert (seen.server_error, seen.client_error, seen.caller) == ("", "", "agent-cluster-1")
    else:
        assert "certificate" in seen.server_error + seen.client_error.lower()
        assert seen.caller == "" or not client.accepts(server)


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
    rarely = {"certificate_check_interval": timedelta(hours=1)}
    return applicants.enrolling(own, tmp_path, http_cert_path=server, **rarely, **settings)


async def add(broker, tmp_path):
    """The first step: the new authority is trusted, and signs nothing."""
    new = authority.start_rotation(tmp_path / "authority", now=datetime.now(UTC))
    await broker.trust.refresh()
    return new


async def sign(broker, tmp_path):
    """The second step, when all clients trust both: those that the test makes from now on do."""
    own = broker.certificates
    trusted = files.load_certificates(tmp_path / "authority" / "ca.crt")
    own.authority = replace(own.authority, trusted=trusted)
    broker.admin().context.load_verify_locations(tmp_path / "authority" / "ca.crt")
    authority.finish_rotation(tmp_path / "authority")
    await broker.trust.refresh()


async def drop(broker, tmp_path, old, *passphrase):
    """The third step."""
    authority.drop_authority(tmp_path / "authority", tokens.ca_pin(old), *passphrase)
    await broker.trust.refresh()


@pytest.fixture
def mounted(server, tmp_path):
    """The same files, which are not the broker's to write."""
    found = tmp_path / "mounted"
    found.mkdir()
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (found / name).symlink_to(server / name)
    return found


async def test_rotation_of_the_authority_is_taken_up_without_a_restart_and_refuses_nobody(
    own, server, tmp_path
):
    old = own.authority.certificate
    async with started(own, server, tmp_path) as broker:
        before = broker.holder(await applicants.joined(broker, tmp_path / "before"), "berlin")
        await before.advertise()
        new = await add(broker, tmp_path)
        await before.hang_up()
        await before.advertise()  # it trusts only the old one, which still signs
        assert applicants.certificate_in(server).issuer == old.subject
        assert set(files.load_certificates(server / "ca.crt")) == {old, new}
        renewed = await applicants.renewed(before, tmp_path / "renewed")
        assert set(files.load_certificates(renewed / "ca.crt")) == {old, new}
        after = broker.holder(renewed, "berlin")
        await sign(broker, tmp_path)
        await after.advertise()  # its certificate is of the old one, and it trusts both
        assert applicants.certificate_in(server).issuer == new.subject
        answer = await broker.admin().post("tokens", {})
        assert answer.json["caHash"] == tokens.ca_pin(new)
        directory = await applicants.joined(broker, tmp_path / "after", "paris")
        paris = broker.holder(directory, "paris")
        await paris.advertise()
        await drop(broker, tmp_path, old)
        assert await tls_peers.name_of(broker.port, after.context) == ""
        await paris.advertise()
        assert files.load_certificates(server / "ca.crt") == (new,)


async def test_files_that_are_not_the_brokers_to_write_are_left_alone(own, mounted, tmp_path, log):
    old = own.authority.certificate
    async with applicants.enrolling(own, tmp_path, http_cert_path=mounted) as broker:
        serial = tls_peers.serial_in(mounted)
        await add(broker, tmp_path)
        await sign(broker, tmp_path)
        assert tls_peers.serial_in(mounted) == serial
        answer = await broker.admin().post("tokens", {"name": "berlin"})
        assert answer.json["caHash"] == tokens.ca_pin(old)
        await applicants.joined(broker, tmp_path / "paris", "paris")
        await drop(broker, tmp_path, old)  # in effect although the broker's own ca.crt has it
        assert await tls_peers.name_of(broker.port, broker.cluster("berlin").context) == ""
    assert log.text.count("is managed externally") == 1


async def test_broker_renews_its_own_certificate_in_time(own, tmp_path):
    profile = identity.server_profile(names=["broker.example.org"])
    server = own.write("short", profile, lifetime=timedelta(hours=1))
    clock = Clock(datetime.now(UTC))
    async with applicants.enrolling(own, tmp_path, http_cert_path=server, clock=clock) as broker:
        before = tls_peers.serial_in(server)
        await broker.trust.refresh()
        assert tls_peers.serial_in(server) == before
        clock.pass_time(timedelta(minutes=49))
        await broker.trust.refresh()
        renewed = applicants.certificate_in(server)
        assert renewed.serial_number != before
        end = renewed.not_valid_after_utc
        shown = broker.metric("kubelend_certificate_expiry_timestamp_seconds", name="server")
        assert shown == end.timestamp()
        names = renewed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert "broker.example.org" in names.get_values_for_type(x509.DNSName)
        assert abs(end - clock() - timedelta(hours=1)) < timedelta(seconds=1)


async def test_certificate_of_another_authority_is_never_renewed_here(own, certificates, tmp_path):
    """The broker's from one authority, the clusters' from another: applicants receive both."""
    server = tmp_path / "server"
    shutil.copytree(certificates.server(), server)
    async with applicants.enrolling(own, tmp_path, http_cert_path=server) as broker:
        serial = tls_peers.serial_in(server)
        await broker.trust.refresh()
        assert tls_peers.serial_in(server) == serial
        broker.certificates = certificates
        token = await applicants.token(broker, name="berlin")
        answer = await broker.admin().post("tokens", {})
        assert answer.json["caHash"] == tokens.ca_pin(certificates.authority.certificate)
        directory = await Applicant("berlin").join(broker, token, tmp_path / "berlin")
        assert applicants.certificate_in(directory).issuer == own.authority.certificate.subject
        await broker.holder(directory, "berlin").advertise()


async def test_authority_that_has_ended_signs_nothing_and_says_so(own, tmp_path):
    short = Authority.create("short", timedelta(minutes=5), now=datetime.now(UTC))
    short.save(tmp_path / "short")
    clock = Clock(datetime.now(UTC))
    signs = {"ca_path": str(tmp_path / "short")}
    async with applicants.enrolling(own, tmp_path, clock=clock, **signs) as broker:
        token = await applicants.token(broker, name="berlin")
        clock.pass_time(timedelta(minutes=6))
        answer = await Applicant("berlin").ask(broker, token)
        assert answer.refusal == (503, "Unavailable")
        assert (await broker.admin().read("members"))["members"] == []
        (listed,) = (await broker.admin().read("tokens"))["tokens"]
        assert listed["usesLeft"] == 1


async def test_rotation_that_was_finished_while_the_broker_was_down_is_finished_at_its_start(
    own, server, tmp_path
):
    old = own.authority.certificate
    async with started(own, server, tmp_path) as broker:
        new = await add(broker, tmp_path)
        await sign(broker, tmp_path)
    assert old in files.load_certificates(server / "ca.crt")
    authority.drop_authority(tmp_path / "authority", tokens.ca_pin(old))
    async with started(own, server, tmp_path) as broker:
        assert await tls_peers.name_of(broker.port, broker.cluster("berlin").context) == ""
        await waiting.until(lambda: files.load_certificates(server / "ca.crt") == (new,))


@pytest.fixture
async def rotated(own, server, tmp_path):
    async with started(own, server, tmp_path, trust_proxies=True) as broker:
        await add(broker, tmp_path)
        await sign(broker, tmp_path)
        yield broker


@pytest.fixture
def finish(rotated, own, tmp_path):
    return lambda: drop(rotated, tmp_path, own.authority.certificate)


async def test_open_connection_of_the_dropped_authority_is_refused_and_ends(rotated, finish):
    async with raw_connections.connected(rotated.cluster("berlin")) as (reader, writer):
        writer.write(raw_connections.GET)
        assert (await raw_connections.answer_of(reader)).startswith(b"HTTP/1.1 200 ")
        await finish()
        writer.write(raw_connections.GET)
        rest = await raw_connections.end_of(reader)
    assert b"HTTP/1.1 503 " in rest
    assert b"the trusted CAs have changed" in rest


async def test_stream_of_the_dropped_authority_ends_at_once_and_others_go_on(
    rotated, finish, tmp_path
):
    renewed = await applicants.renewed(rotated.cluster("paris"), tmp_path / "paris")
    paris = rotated.holder(renewed, "paris")
    async with rotated.cluster("berlin").stream() as stream, paris.stream() as other:
        await stream.event()
        await other.event()
        await finish()
        assert {event.comment for event in await stream.rest()} <= {"open", "alive"}
        assert rotated.service.streams.count("paris") == 1


async def test_proxy_of_the_dropped_authority_is_refused_and_passes_nobody_on(
    rotated, own, finish, tmp_path
):
    path = own.write("edge", identity.client_profile("edge", Role.PROXY))
    new = passed_on(await applicants.renewed(rotated.cluster("berlin"), tmp_path / "berlin"))
    proxy = rotated.holder(path, "edge")
    assert (await proxy.call("GET", "version", headers=new)).status == 200
    await finish()
    answer = await proxy.call("GET", "version", headers=new)
    assert answer.refusal == (503, "Unavailable")
    assert await tls_peers.name_of(rotated.port, proxy.context) == ""


async def test_new_passphrase_is_taken_up_from_its_file(own, server, tmp_path):
    secret = tmp_path / "passphrase"
    secret.write_text("old\n")
    secret.chmod(0o600)
    replace(own.authority, passphrase=Passphrase("old")).save(tmp_path / "authority")
    async with started(own, server, tmp_path, ca_passphrase_file=str(secret)) as broker:
        new = authority.start_rotation(
            tmp_path / "authority",
            now=datetime.now(UTC),
            passphrase=Passphrase("old"),
            new_passphrase=Passphrase("new"),
        )
        secret.write_text("new\n")
        await sign(broker, tmp_path)
        issued = await applicants.renewed(broker.cluster("berlin"), tmp_path / "b")
        assert applicants.certificate_in(issued).issuer == new.subject


async def test_nothing_is_signed_while_the_key_on_disk_cannot_be_read(own, server, tmp_path, log):
    async with started(own, server, tmp_path) as broker:
        secret = Passphrase("new")
        now = datetime.now(UTC)
        authority.start_rotation(tmp_path / "authority", now=now, new_passphrase=secret)
        await sign(broker, tmp_path)
        await broker.trust.refresh()
        body = {"request": Applicant("berlin").request}
        answer = await broker.cluster("berlin").post("certificates", body)
        assert answer.refusal == (503, "Unavailable")
        assert "the CA on disk cannot be loaded" in answer.problem.error
        token = await applicants.token(broker, name="paris")
        assert (await Applicant("paris").ask(broker, token)).status == 503
        # Whom to trust can be read without the key.
        await drop(broker, tmp_path, own.authority.certificate, secret)
        assert (await broker.cluster("berlin").get("version")).refusal == (503, "Unavailable")
    assert len(log.lines("CA reload failed, not issuing certificates")) == 1
