"""Certificates that the broker issues: what is in them, the client that joins or renews, and impostors."""

import asyncio
import contextlib
import shutil
import ssl
import stat
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from msgspec.structs import replace

import applicants
import openssl
import waiting
from applicants import Applicant
from certificates import Certificates
from issuers import due
from kubelend.apps import join, renewal
from kubelend.apps.join import JoinParameters
from kubelend.core.errors import (
    BrokerUnreachable,
    InvalidInput,
    InvalidSettings,
    Revoked,
    TokenRefused,
    Unavailable,
    UnexpectedAnswer,
)
from kubelend.core.lifecycle import Role
from kubelend.kits import backoff
from kubelend.pki import authority, files, identity, keys, tokens
from kubelend.pki import x509 as pki_x509
from kubelend.pki.identity import Profile
from kubelend.pki.keys import Algorithm
from kubelend.transports import tls
from kubelend.transports.client import BrokerClient
from kubelend.wire.admin_bodies import JoinPending
from waiting import PATIENCE, until

pytestmark = pytest.mark.broker("enrolling")


async def joined(broker, directory, name="berlin", role=Role.CLUSTER, **options):
    token = await applicants.token(broker, name=name, role=role.value)
    return await Applicant(name, role, **options).join(broker, token, directory)


def certificate_in(directory, file="tls.crt"):
    return x509.load_pem_x509_certificate((directory / file).read_bytes())


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
    berlin, token = Applicant("berlin"), await applicants.token(broker, name="berlin")
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


@pytest.mark.broker("enrolling", certificate_lifetime=timedelta(minutes=30))
async def test_lifetime_is_a_setting(broker, tmp_path):
    issued = certificate_in(await joined(broker, tmp_path / "berlin"))
    end = broker.clock() + timedelta(minutes=30)
    assert abs(issued.not_valid_after_utc - end) < timedelta(seconds=1)


async def renew(caller, name, role=Role.CLUSTER):
    applicant = Applicant(name, role)
    return applicant, await caller.post("certificates", {"request": applicant.request})


@pytest.mark.parametrize("role", [Role.CLUSTER, Role.VIEWER, Role.ADMIN])
async def test_anybody_renews_in_its_own_name(broker, tmp_path, role):
    directory = await joined(broker, tmp_path / "x", "x", role)
    applicant, answer = await renew(broker.holder(directory, "x"), "x", role)
    renewed = applicant.save(answer, tmp_path / "renewed")
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
    applicant, answer = await renew(broker.cluster("rome"), "rome")
    rome = broker.holder(applicant.save(answer, tmp_path / "rome"), "rome")
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


SOON = timedelta(seconds=PATIENCE)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    brief = {"first": timedelta(milliseconds=5), "longest": timedelta(milliseconds=9)}
    monkeypatch.setattr(join, "APPROVAL_BACKOFF", backoff.Backoff(retries=2**31, **brief))


def url_of(broker):
    return f"https://localhost:{broker.process.ports['enrol']}"


async def invitation(broker, name="berlin", role=Role.CLUSTER, *, bound=True, url=""):
    token = await applicants.token(broker, role=role.value, **({"name": name} if bound else {}))
    pin = tokens.ca_pin(broker.certificates.authority.certificate)
    return JoinParameters(url or url_of(broker), token, pin, name, role)


@pytest.mark.parametrize("algorithm", Algorithm)
async def test_joined_cluster_has_three_files_and_is_served(broker, tmp_path, algorithm):
    directory = tmp_path / "certs" / "berlin"
    welcome = await join.join_broker(
        await invitation(broker), directory, wait=SOON, algorithm=algorithm
    )
    assert welcome.port == broker.port
    assert sorted(path.name for path in directory.iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
    assert stat.S_IMODE((directory / "tls.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    await broker.holder(directory, "berlin").advertise()
    with pytest.raises(InvalidSettings, match="already exists"):
        await join.join_broker(await invitation(broker, "paris"), directory, wait=SOON)
    assert files.load_credentials(directory).certificate == welcome.credentials.certificate


@pytest.mark.parametrize("decision", ["accept", "reject"])
async def test_waiting_one_is_notified_once_and_learns_the_decision(broker, tmp_path, decision):
    pending: list[JoinPending] = []
    wanted = await invitation(broker, bound=False)
    waiting = asyncio.create_task(
        join.join_broker(wanted, tmp_path / "berlin", wait=SOON, on_pending=pending.append)
    )
    await until(lambda: bool(pending))
    await broker.admin().post("members", "cluster", "berlin", decision, {"key": pending[0].key})
    if decision == "reject":
        with pytest.raises(TokenRefused, match="no uses left"):
            await waiting
        return
    await waiting
    assert len(pending) == 1
    await broker.holder(tmp_path / "berlin", "berlin").advertise()


async def test_who_gives_up_waiting_goes_on_later_with_the_same_key(broker, tmp_path):
    wanted, directory = await invitation(broker, bound=False), tmp_path / "berlin"
    with pytest.raises(Unavailable, match="berlin has not been accepted yet; ask an admin"):
        await join.join_broker(wanted, directory, wait=timedelta(milliseconds=50))
    key = (directory / "tls.key").read_bytes()
    assert sorted(path.name for path in directory.iterdir()) == ["tls.key"]
    await broker.admin().post("members", "cluster", "berlin", "accept")
    await join.join_broker(wanted, directory, wait=SOON)
    assert (directory / "tls.key").read_bytes() == key


def authority_with_its_key(directory, other):
    other.authority.save(directory)


def authorities_of_another(directory, other):
    directory.mkdir()
    (directory / "ca.crt").write_bytes(files.to_pem(other.authority.trusted))


@pytest.mark.parametrize("fill", [authority_with_its_key, authorities_of_another])
async def test_files_of_another_authority_are_left_alone(broker, other, tmp_path, fill):
    directory = tmp_path / "there"
    fill(directory, other)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(InvalidSettings, match="contains files of another CA"):
        await join.join_broker(await invitation(broker), directory, wait=SOON)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


async def test_authorities_that_an_earlier_try_left_are_no_hindrance(
    broker, other, certificates, tmp_path
):
    directory = tmp_path / "there"
    directory.mkdir()
    left = [*other.authority.trusted, *certificates.authority.trusted]
    (directory / "ca.crt").write_bytes(files.to_pem(left))
    await join.join_broker(await invitation(broker), directory, wait=SOON)
    assert files.load_credentials(directory).authorities == certificates.authority.trusted


async def test_key_that_others_can_read_gets_no_certificate(broker, tmp_path):
    directory = tmp_path / "there"
    files.make_private_directory(directory)
    (directory / "tls.key").write_bytes(keys.to_pem(keys.generate(Algorithm.P256)))
    (directory / "tls.key").chmod(0o644)
    with pytest.raises(InvalidSettings, match="other users can access it"):
        await join.join_broker(await invitation(broker), directory, wait=SOON)


@pytest.mark.parametrize(
    "change, error",
    [
        ({"name": "paris"}, TokenRefused),
        ({"role": Role.VIEWER}, TokenRefused),
        ({"name": " "}, InvalidInput),
        ({"token": "kl1.nonsense"}, InvalidInput),
    ],
    ids=["name", "role", "no-name", "no-token"],
)
async def test_refusals_are_raised_as_what_they_are(broker, tmp_path, change, error):
    wanted = replace(await invitation(broker), **change)
    with pytest.raises(error):
        await join.join_broker(wanted, tmp_path / "berlin", wait=SOON)


async def test_an_address_where_no_broker_is_says_so(broker, tmp_path):
    for port, text in ((1, "connection refused"), (broker.port, "closed the connection")):
        wanted = await invitation(broker, url=f"https://localhost:{port}")
        with pytest.raises(BrokerUnreachable, match=text):
            await join.join_broker(wanted, tmp_path / str(port), wait=SOON)


def test_an_invitation_prints_without_its_token():
    wanted = JoinParameters(
        "https://b:8444", "kl1.a.secret", tokens.parse_ca_pin("sha256:" + "0" * 64), "x"
    )
    assert "secret" not in repr(wanted)


class Impostor:
    """Answers as a broker would, with certificates of its own, and notes all that it is sent."""

    def __init__(self, certificates, shown):
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        directory = certificates.server()
        self.context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
        self.shown = shown
        self.received = b""
        self.handshakes = 0

    @contextlib.asynccontextmanager
    async def listening(self):
        server = await asyncio.start_server(self.answer, "127.0.0.1", 0, ssl=self.context)
        async with server:
            yield f"https://localhost:{server.sockets[0].getsockname()[1]}"

    async def answer(self, reader, writer):
        self.handshakes += 1
        with contextlib.suppress(ssl.SSLError, ConnectionError, asyncio.IncompleteReadError):
            self.received += await reader.readuntil(b"\r\n\r\n")
            body = self.shown
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            self.received += await reader.read()
        writer.close()


@pytest.fixture
def other(tmp_path):
    return Certificates(tmp_path / "other")


async def test_another_authority_is_told_nothing(broker, other, tmp_path):
    impostor = Impostor(other, files.to_pem(other.authority.trusted))
    async with impostor.listening() as url:
        wanted = await invitation(broker, url=url)
        shown = tokens.ca_pin(other.authority.certificate)
        with pytest.raises(InvalidInput) as refused:
            await join.join_broker(wanted, tmp_path / "berlin", wait=SOON)
    assert refused.value.message == (
        f"the broker at {url} presents a CA with hash {shown}, not {wanted.pin};"
        " the token was not sent"
    )
    assert wanted.token.encode() not in impostor.received
    assert b"POST" not in impostor.received


async def test_who_shows_our_authority_without_its_certificate_is_told_nothing(
    broker, other, certificates, tmp_path
):
    """The authority's certificate is public; that it vouches for who shows it is not."""
    impostor = Impostor(
        other, files.to_pem([*other.authority.trusted, *certificates.authority.trusted])
    )
    async with impostor.listening() as url:
        wanted = await invitation(broker, url=url)
        with pytest.raises(BrokerUnreachable, match="is not signed by the CA with that hash"):
            await join.join_broker(wanted, tmp_path / "berlin", wait=SOON)
    assert impostor.handshakes == 1
    assert b"kl1" not in impostor.received


ELSEWHERE = Profile(
    identity.server_profile().subject,
    ExtendedKeyUsageOID.SERVER_AUTH,
    (x509.DNSName("elsewhere.example.org"),),
)


@pytest.mark.parametrize(
    "profile", [identity.client_profile("localhost"), ELSEWHERE], ids=["cluster", "host"]
)
async def test_other_certificate_of_our_authority_is_told_nothing(
    broker, certificates, tmp_path, profile
):
    """A cluster's must not do for a broker's, nor that of a server elsewhere."""
    impostor = Impostor(certificates, files.to_pem(certificates.authority.trusted))
    directory = certificates.write(f"impostor-{profile.usage.dotted_string}", profile)
    impostor.context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    async with impostor.listening() as url:
        with pytest.raises(BrokerUnreachable):
            await join.join_broker(
                await invitation(broker, url=url), tmp_path / "berlin", wait=SOON
            )
    assert b"kl1" not in impostor.received


async def test_answers_without_end_are_not_read(broker, certificates, tmp_path):
    late = b"\n" * (1 << 20) + files.to_pem(certificates.authority.trusted)
    impostor = Impostor(certificates, late)
    async with impostor.listening() as url:
        wanted = await invitation(broker, url=url)
        with pytest.raises(UnexpectedAnswer, match="presents no CA certificate"):
            await join.join_broker(wanted, tmp_path / "berlin", wait=SOON)


TIMEOUT = timedelta(seconds=PATIENCE)


def now():
    return datetime.now(UTC)


class Scene:
    """A broker with an authority that can be rotated, and the clients that renew there."""

    def __init__(self, root, certificates, broker):
        self.root = root
        self.certificates = certificates
        self.broker = broker
        self.url = f"https://localhost:{broker.port}"

    def holder(self, name="a"):
        """A directory whose certificate has a tenth of its life left."""
        return shutil.copytree(due(self.certificates, name), self.root / f"live-{name}")

    def client(self, directory):
        return BrokerClient(self.url, directory, backoff=backoff.NO_RETRIES)

    async def renew_if_due(self, client, directory, *, force=False):
        return await renewal.renew_with_client(
            client, self.url, directory, TIMEOUT, now(), force=force
        )

    async def renew(self, directory):
        async with self.client(directory) as client:
            renewed = await self.renew_if_due(client, directory, force=True)
            assert renewed is not None
            await client.refresh()
            await client.version()
        return files.load_credentials(directory)


@pytest.fixture
async def scene(tmp_path):
    certificates = Certificates(tmp_path / "certificates")
    server = shutil.copytree(certificates.server(), tmp_path / "server")
    async with applicants.enrolling(
        certificates,
        tmp_path,
        certificate_check_interval=timedelta(milliseconds=10),
        http_cert_path=server,
    ) as broker:
        yield Scene(tmp_path, certificates, broker)


async def test_a_client_that_lives_on_calls_with_its_new_certificate(scene):
    directory = scene.holder()
    old = tls.own_certificate(directory)
    async with scene.client(directory) as client:
        await client.version()
        renewed = await scene.renew_if_due(client, directory)
        assert renewed is not None
        assert await client.refresh()
        await client.version()
        assert await scene.renew_if_due(client, directory) is None
    new = files.load_credentials(directory)
    assert new.certificate == renewed.certificate != old
    assert identity.caller_from_certificate(new.certificate) == identity.caller_from_certificate(
        old
    )
    assert pki_x509.is_issued_by(new.certificate, scene.certificates.authority.certificate)


async def test_who_was_not_let_in_here_gets_no_longer_life_however_often_it_renews(scene):
    hour = timedelta(hours=1)
    profile = identity.client_profile("temp", Role.ADMIN)
    made = scene.certificates.write("temp", profile, at=now(), lifetime=hour)
    directory = shutil.copytree(made, scene.root / "live-temp")
    for _ in range(2):
        credentials = await scene.renew(directory)
        assert pki_x509.lifetime_of(credentials.certificate) == hour
    async with scene.client(scene.certificates.admin("alice")) as admin:
        await admin.members.approve(Role.ADMIN, "temp")
    credentials = await scene.renew(directory)
    assert pki_x509.lifetime_of(credentials.certificate) == timedelta(days=365)


async def test_many_renewers_of_one_directory_make_one_certificate(scene):
    directory = scene.holder()
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(scene.client(directory)) for _ in range(8)]
        done = await asyncio.gather(*(scene.renew_if_due(each, directory) for each in clients))
    (renewed,) = (each for each in done if each is not None)
    assert tls.own_certificate(directory) == renewed.certificate


async def test_holders_follow_a_new_authority_and_drop_the_old_one_when_all_have_moved(scene):
    directory, other = scene.holder("a"), scene.holder("b")
    first = scene.certificates.authority.certificate
    successor = authority.rotate_authority(scene.root / "authority", now=now())

    async def is_followed(each):
        found = await scene.renew(each)
        return pki_x509.is_issued_by(found.certificate, successor.certificate)

    await waiting.until(lambda: is_followed(directory))
    moved = files.load_credentials(directory)
    assert set(moved.authorities) == {first, successor.certificate}
    async with scene.client(other) as client:
        await client.version()

    assert await is_followed(other)
    finished, dropped = authority.finish_rotation(scene.root / "authority")
    assert dropped == (first,)

    async def is_alone():
        return (await scene.renew(directory)).authorities == finished.trusted

    await waiting.until(is_alone)
    assert (await scene.renew(other)).authorities == (successor.certificate,)


async def test_who_was_revoked_gets_no_successor_and_keeps_its_files(scene):
    directory = scene.holder()
    before = files.load_credentials(directory).certificate
    async with scene.client(scene.certificates.admin("alice")) as admin:
        await admin.members.revoke(Role.CLUSTER, "a", release=False)
    async with scene.client(directory) as client:
        with pytest.raises(Revoked):
            await scene.renew_if_due(client, directory)
    assert files.load_credentials(directory).certificate == before
