"""What the broker issues to newcomers and holders, also through rotations, and what openssl says of it."""

import shutil
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from msgspec.structs import replace

import newcomers
import openssl
import tls_peers
from certificates import Certificates
from clocks import Clock
from kubelend.core.lifecycle import Role
from kubelend.pki import authority, files, identity, tokens
from kubelend.pki.authority import Authority
from kubelend.pki.keys import Algorithm
from kubelend.pki.passphrases import Passphrase
from newcomers import Newcomer

SECOND = timedelta(seconds=1)

pytestmark = pytest.mark.broker("enrolling")


async def joined(broker, directory, name="berlin", role=Role.CLUSTER, **options):
    token = await newcomers.token(broker, name=name, role=role.value)
    return await Newcomer(name, role, **options).join(broker, token, directory)


def certificate_in(directory, file="tls.crt"):
    return x509.load_pem_x509_certificate((directory / file).read_bytes())


# -- as openssl sees it


@openssl.needed
@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize(
    "role, organisation",
    [
        (Role.CLUSTER, "LiqoResourceAgent"),
        (Role.VIEWER, "kubelend:viewer"),
        (Role.ADMIN, "kubelend:admin"),
    ],
)
async def test_openssl_agrees_on_who_it_is_and_what_it_is_for(
    broker, tmp_path, role, organisation, algorithm
):
    directory = await joined(broker, tmp_path / "x", "x", role, algorithm=algorithm)
    leaf, authorities = directory / "tls.crt", directory / "ca.crt"
    assert openssl.accepts(leaf, authorities, purpose="sslclient")
    assert not openssl.accepts(leaf, authorities, purpose="sslserver")
    text = openssl.described(leaf)
    assert f"Subject: O={organisation}, CN=x " in text
    assert "CA:FALSE" in text
    assert "TLS Web Client Authentication" in text
    assert "Digital Signature" in text
    assert "Certificate Sign" not in text
    assert "Subject Alternative Name" not in text


async def test_nothing_that_a_request_adds_is_in_the_certificate(broker, tmp_path):
    """It may ask to be an authority, for other names, for ever: of a request only the key counts."""
    berlin, token = Newcomer("berlin"), await newcomers.token(broker, name="berlin")
    builder = x509.CertificateSigningRequestBuilder(identity.client_profile("berlin").subject)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    builder = builder.add_extension(names, critical=False)
    request = builder.sign(berlin.key, hashes.SHA256())
    answer = await berlin.ask(broker, token, request=pem(request))
    issued = certificate_in(berlin.save(answer, tmp_path / "berlin"))
    assert not issued.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    with pytest.raises(x509.ExtensionNotFound):
        issued.extensions.get_extension_for_class(x509.SubjectAlternativeName)


def pem(request):
    return request.public_bytes(serialization.Encoding.PEM).decode()


async def test_lifetime_is_a_setting(certificates, tmp_path):
    lifetime = timedelta(minutes=30)
    async with newcomers.enrolling(certificates, tmp_path, certificate_lifetime=lifetime) as broker:
        issued = certificate_in(await joined(broker, tmp_path / "berlin"))
        assert abs(issued.not_valid_after_utc - broker.clock() - lifetime) < SECOND


# -- renewal


async def renew(caller, name, role=Role.CLUSTER):
    newcomer = Newcomer(name, role)
    return newcomer, await caller.post("certificates", {"request": newcomer.request})


@pytest.mark.parametrize("role", [Role.CLUSTER, Role.VIEWER, Role.ADMIN])
async def test_anybody_renews_in_its_own_name(broker, tmp_path, role):
    directory = await joined(broker, tmp_path / "x", "x", role)
    newcomer, answer = await renew(broker.holder(directory, "x"), "x", role)
    renewed = newcomer.save(answer, tmp_path / "renewed")
    assert (await broker.holder(renewed, "x").get("version")).status == 200
    listed = (await broker.admin().read("members"))["members"]
    (member,) = [one for one in listed if one["name"] == "x"]
    assert member["certificate"]["serial"] == f"{certificate_in(renewed).serial_number:x}"


async def test_nobody_renews_in_another_name_or_role(broker, tmp_path):
    berlin = broker.holder(await joined(broker, tmp_path / "berlin"), "berlin")
    for name, role in (("paris", Role.CLUSTER), ("berlin", Role.ADMIN)):
        _, answer = await renew(berlin, name, role)
        assert answer.refusal == (403, "Forbidden")


async def test_holder_of_a_certificate_from_elsewhere_renews_here(broker, tmp_path):
    newcomer, answer = await renew(broker.cluster("rome"), "rome")
    rome = broker.holder(newcomer.save(answer, tmp_path / "rome"), "rome")
    assert (await rome.get("version")).status == 200


@pytest.mark.parametrize("request_text", ["", "nonsense", "-----BEGIN CERTIFICATE REQUEST-----"])
async def test_nonsense_is_not_signed(broker, request_text):
    answer = await broker.cluster("rome").post("certificates", {"request": request_text})
    assert answer.refusal == (400, "InvalidInput")


async def test_end_of_each_certificate_is_shown_and_measured(broker, tmp_path):
    directory = await joined(broker, tmp_path / "berlin")
    await broker.holder(directory, "berlin").advertise()
    (cluster,) = (await broker.admin().read("clusters"))["clusters"]
    end = certificate_in(directory).not_valid_after_utc
    assert cluster["status"]["certificateUntil"] == end.isoformat().replace("+00:00", "Z")
    name = "kubelend_cluster_certificate_expiry_timestamp_seconds"
    assert broker.metric(name, cluster="berlin") == end.timestamp()


# -- an authority of one's own for each test, since it changes


@pytest.fixture
def own(tmp_path):
    return Certificates(tmp_path / "own")


@pytest.fixture
def server(own, tmp_path):
    """The broker's own files, which it may write."""
    return shutil.copytree(own.server(), tmp_path / "server")


@pytest.fixture
async def rotating(own, server, tmp_path):
    """A broker whose files may change; it reads them when asked to."""
    async with newcomers.enrolling(
        own, tmp_path, http_cert_path=server, certificate_check_interval=timedelta(hours=1)
    ) as broker:
        yield broker


async def test_rotation_of_the_authority_is_taken_up_without_a_restart_and_refuses_nobody(
    rotating, own, tmp_path
):
    before = rotating.holder(await joined(rotating, tmp_path / "before"), "berlin")
    await before.advertise()
    new = authority.rotate_authority(tmp_path / "authority", now=datetime.now(UTC))
    await rotating.trust.refresh()
    await before.hang_up()
    await before.advertise()  # it has a certificate of the old one, and trusts only that
    directory = await joined(rotating, tmp_path / "after", "paris")
    assert certificate_in(directory).issuer == new.certificate.subject
    assert len(x509.load_pem_x509_certificates((directory / "ca.crt").read_bytes())) == 2
    await rotating.holder(directory, "paris").advertise()
    newcomer, answer = await renew(before, "berlin")
    renewed = newcomer.save(answer, tmp_path / "renewed")
    assert certificate_in(renewed).issuer == new.certificate.subject
    await rotating.holder(renewed, "berlin").advertise()


async def test_after_a_rotation_the_broker_shows_a_certificate_of_the_new_authority(
    rotating, own, server, tmp_path
):
    old = tls_peers.serial_in(server)
    new = authority.rotate_authority(tmp_path / "authority", now=datetime.now(UTC))
    await rotating.trust.refresh()
    assert tls_peers.serial_in(server) != old
    shown = x509.load_pem_x509_certificates((server / "tls.crt").read_bytes())
    assert [each.issuer for each in shown] == [
        new.certificate.subject,
        own.authority.certificate.subject,
    ]
    answer = await rotating.admin().post("tokens", {})
    assert answer.json["caHash"] == tokens.ca_pin(new.certificate)


async def test_finished_rotation_refuses_what_the_old_authority_signed(
    rotating, own, server, tmp_path
):
    before = rotating.holder(await joined(rotating, tmp_path / "before"), "berlin")
    authority.rotate_authority(tmp_path / "authority", now=datetime.now(UTC))
    await rotating.trust.refresh()
    newcomer, answer = await renew(before, "berlin")
    after = rotating.holder(newcomer.save(answer, tmp_path / "after"), "berlin")
    authority.finish_rotation(tmp_path / "authority")
    await rotating.trust.refresh()
    assert await tls_peers.name_of(rotating.port, before.context) == ""
    await after.advertise()
    assert own.authority.certificate not in files.load_certificates(server / "ca.crt")


async def test_files_that_are_not_the_brokers_to_write_are_left_alone(own, tmp_path, log):
    mounted, data = tmp_path / "mounted", tmp_path / "data"
    shutil.copytree(own.server(), data)
    mounted.mkdir()
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (mounted / name).symlink_to(data / name)
    async with newcomers.enrolling(own, tmp_path, http_cert_path=mounted) as broker:
        serial = tls_peers.serial_in(mounted)
        authority.rotate_authority(tmp_path / "authority", now=datetime.now(UTC))
        for _ in range(2):
            await broker.trust.refresh()
        assert tls_peers.serial_in(mounted) == serial
        answer = await broker.admin().post("tokens", {"name": "berlin"})
        assert answer.json["caHash"] == tokens.ca_pin(own.authority.certificate)
        await joined(broker, tmp_path / "paris", "paris")
    assert log.text.count("is managed externally") == 1


async def test_broker_renews_its_own_certificate_in_time(own, tmp_path):
    server = own.write(
        "short", identity.server_profile(names=["broker.example.org"]), lifetime=timedelta(hours=1)
    )
    clock = Clock(datetime.now(UTC))
    async with newcomers.enrolling(own, tmp_path, http_cert_path=server, clock=clock) as broker:
        before = tls_peers.serial_in(server)
        await broker.trust.refresh()
        assert tls_peers.serial_in(server) == before
        clock.pass_time(timedelta(minutes=49))
        await broker.trust.refresh()
        renewed = certificate_in(server)
        assert renewed.serial_number != before
        assert (
            broker.metric("kubelend_certificate_expiry_timestamp_seconds", name="server")
            == renewed.not_valid_after_utc.timestamp()
        )
        names = renewed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert "broker.example.org" in names.get_values_for_type(x509.DNSName)
        assert abs(renewed.not_valid_after_utc - clock() - timedelta(hours=1)) < SECOND


async def test_certificate_of_another_authority_is_never_renewed_here(own, certificates, tmp_path):
    """The broker's from one authority, the clusters' from another: applicants receive both."""
    server = tmp_path / "server"
    shutil.copytree(certificates.server(), server)
    async with newcomers.enrolling(own, tmp_path, http_cert_path=server) as broker:
        serial = tls_peers.serial_in(server)
        await broker.trust.refresh()
        assert tls_peers.serial_in(server) == serial
        broker.certificates = certificates
        token = await newcomers.token(broker, name="berlin")
        answer = await broker.admin().post("tokens", {})
        assert answer.json["caHash"] == tokens.ca_pin(certificates.authority.certificate)
        directory = await Newcomer("berlin").join(broker, token, tmp_path / "berlin")
        assert certificate_in(directory).issuer == own.authority.certificate.subject
        await broker.holder(directory, "berlin").advertise()


async def test_encrypted_authority_is_opened_with_a_passphrase(own, tmp_path):
    secret = tmp_path / "passphrase"
    secret.write_text("correct horse\n")
    secret.chmod(0o600)
    locked = replace(own.authority, passphrase=Passphrase("correct horse"))
    locked.save(tmp_path / "locked")
    async with newcomers.enrolling(
        own, tmp_path, ca_path=str(tmp_path / "locked"), ca_passphrase_file=str(secret)
    ) as broker:
        directory = await joined(broker, tmp_path / "berlin")
        assert (await broker.holder(directory, "berlin").get("version")).status == 200


async def test_authority_that_has_ended_signs_nothing_and_says_so(own, tmp_path):
    short = Authority.create("short", timedelta(minutes=5), now=datetime.now(UTC))
    short.save(tmp_path / "short")
    clock = Clock(datetime.now(UTC))
    async with newcomers.enrolling(
        own, tmp_path, ca_path=str(tmp_path / "short"), clock=clock
    ) as broker:
        token = await newcomers.token(broker, name="berlin")
        clock.pass_time(timedelta(minutes=6))
        answer = await Newcomer("berlin").ask(broker, token)
        assert answer.refusal == (503, "Unavailable")
        assert (await broker.admin().read("members"))["members"] == []
        (listed,) = (await broker.admin().read("tokens"))["tokens"]
        assert listed["usesLeft"] == 1
