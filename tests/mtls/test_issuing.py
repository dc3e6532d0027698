"""Certificates that the broker issues: what is in them, the client that joins or renews, and impostors."""

import asyncio
import contextlib
import shutil
import ssl
import stat
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from msgspec.structs import replace

import applicants
import waiting
from applicants import Applicant
from certificates import Certificates
from issuers import due
from kubelend.apps import join
from kubelend.apps.join import JoinParameters
from kubelend.core.errors import (
    BrokerUnreachable,
    InvalidInput,
    InvalidSettings,
    TokenRefused,
    UnexpectedResponse,
)
from kubelend.core.lifecycle import Role
from kubelend.kits import backoff
from kubelend.pki import authority, files, identity, keys, tokens
from kubelend.pki import x509 as pki_x509
from kubelend.pki.identity import Profile
from kubelend.pki.keys import Algorithm
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies
from kubelend.wire.admin_bodies import JoinPending
from waiting import PATIENCE

pytestmark = pytest.mark.broker("enrolling")


@pytest.mark.broker("enrolling", certificate_lifetime=timedelta(minutes=30))
async def test_lifetime_is_a_setting(broker, tmp_path):
    issued = applicants.certificate_in(await applicants.joined(broker, tmp_path / "berlin"))
    end = broker.clock() + timedelta(minutes=30)
    assert abs(issued.not_valid_after_utc - end) < timedelta(seconds=1)


@pytest.mark.parametrize("role", [Role.CLUSTER, Role.VIEWER, Role.ADMIN])
async def test_anybody_renews_in_its_own_name_and_role_alone(broker, tmp_path, role):
    holder = broker.holder(await applicants.joined(broker, tmp_path / "x", "x", role), "x")
    for other in (Applicant("y", role), Applicant("x", Role.PROXY)):
        answer = await holder.post("certificates", {"request": other.request})
        assert answer.refusal == (403, "Forbidden")
    renewed = await applicants.renewed(holder, tmp_path / "renewed", role)
    assert (await broker.holder(renewed, "x").get("version")).status == 200
    listed = (await broker.admin().read("members"))["members"]
    (member,) = [one for one in listed if one["name"] == "x"]
    serial = applicants.certificate_in(renewed).serial_number
    assert member["certificate"]["serial"] == f"{serial:x}"


async def test_holder_of_a_certificate_from_elsewhere_renews_here_and_signs_no_nonsense(
    broker, tmp_path
):
    rome = broker.cluster("rome")
    for text in ("", "nonsense", "-----BEGIN CERTIFICATE REQUEST-----"):
        answer = await rome.post("certificates", {"request": text})
        assert answer.refusal == (400, "InvalidInput")
    renewed = broker.holder(await applicants.renewed(rome, tmp_path / "rome"), "rome")
    assert (await renewed.get("version")).status == 200


async def test_end_of_each_certificate_is_shown_and_measured(broker, tmp_path):
    directory = await applicants.joined(broker, tmp_path / "berlin")
    await broker.holder(directory, "berlin").advertise()
    (cluster,) = (await broker.admin().read("clusters"))["clusters"]
    end = applicants.certificate_in(directory).not_valid_after_utc
    assert cluster["status"]["certificateUntil"] == end.isoformat().replace("+00:00", "Z")
    name = "kubelend_cluster_certificate_expiry_timestamp_seconds"
    assert broker.metric(name, cluster="berlin") == end.timestamp()


SOON = timedelta(seconds=PATIENCE)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    brief = {"first": timedelta(milliseconds=5), "longest": timedelta(milliseconds=9)}
    monkeypatch.setattr(join, "APPROVAL_BACKOFF", backoff.Backoff(retries=2**31, **brief))


TOKEN = f"kl1.{'a' * 10}.{'b' * 32}"


def invitation(certificates, url="https://localhost:1", token=TOKEN):
    """To join as berlin, by the hash of this authority."""
    pin = tokens.ca_pin(certificates.authority.certificate)
    return JoinParameters(url, token, pin, "berlin")


async def invited(broker, **fields):
    """With a token for berlin, or with these fields."""
    token = await applicants.token(broker, **(fields or {"name": "berlin"}))
    url = f"https://localhost:{broker.process.ports['enrol']}"
    return invitation(broker.certificates, url, token)


@pytest.mark.parametrize("algorithm", Algorithm)
async def test_joined_cluster_has_three_files_and_is_served(broker, tmp_path, algorithm):
    directory, wanted = tmp_path / "certs" / "berlin", await invited(broker)
    welcome = await join.join_broker(wanted, directory, wait=SOON, algorithm=algorithm)
    assert welcome.port == broker.port
    assert sorted(path.name for path in directory.iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
    assert stat.S_IMODE((directory / "tls.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    await broker.holder(directory, "berlin").advertise()
    with pytest.raises(InvalidSettings, match="already exists"):
        await join.join_broker(wanted, directory, wait=SOON)
    assert files.load_credentials(directory).certificate == welcome.credentials.certificate


@pytest.mark.parametrize("decision", ["approve", "deny"])
async def test_waiting_one_is_notified_once_and_learns_the_decision(broker, tmp_path, decision):
    pending: list[JoinPending] = []
    wanted = await invited(broker, uses=1)
    joining = asyncio.create_task(
        join.join_broker(wanted, tmp_path / "berlin", wait=SOON, on_pending=pending.append)
    )
    await waiting.until(lambda: bool(pending))
    await broker.admin().post("members", "cluster", "berlin", decision, {"key": pending[0].key})
    if decision == "deny":
        with pytest.raises(TokenRefused, match="no uses left"):
            await joining
        return
    await joining
    assert len(pending) == 1
    await broker.holder(tmp_path / "berlin", "berlin").advertise()


async def test_authorities_that_an_earlier_try_left_are_no_hindrance(
    broker, other, certificates, tmp_path
):
    directory = tmp_path / "there"
    directory.mkdir()
    left = [*other.authority.trusted, *certificates.authority.trusted]
    (directory / "ca.crt").write_bytes(files.to_pem(left))
    await join.join_broker(await invited(broker), directory, wait=SOON)
    assert files.load_credentials(directory).authorities == certificates.authority.trusted


async def test_an_address_where_no_broker_is_says_so(broker, certificates, tmp_path):
    for port, text in ((1, "connection refused"), (broker.port, "closed the connection")):
        wanted = invitation(certificates, f"https://localhost:{port}")
        with pytest.raises(BrokerUnreachable, match=text):
            await join.join_broker(wanted, tmp_path / str(port), wait=SOON)


# -- without a broker


@pytest.fixture
def other(tmp_path):
    return Certificates(tmp_path / "other")


@pytest.mark.parametrize("change", [{"name": " "}, {"token": "kl1.nonsense"}], ids=str)
async def test_nonsense_is_refused_before_a_key_is_made(other, tmp_path, change):
    with pytest.raises(InvalidInput):
        await join.join_broker(replace(invitation(other), **change), tmp_path / "a", wait=SOON)
    assert not (tmp_path / "a").exists()


def test_an_invitation_prints_without_its_token(other):
    assert TOKEN not in repr(invitation(other))


def authority_with_its_key(directory, other):
    other.authority.save(directory)


def authorities_of_another(directory, other):
    directory.mkdir()
    (directory / "ca.crt").write_bytes(files.to_pem(other.authority.trusted))


def key_that_others_can_read(directory, _):
    files.make_private_directory(directory)
    (directory / "tls.key").write_bytes(keys.to_pem(keys.generate(Algorithm.P256)))
    (directory / "tls.key").chmod(0o644)


@pytest.mark.parametrize(
    "fill, problem",
    [
        (authority_with_its_key, "contains files of another CA"),
        (authorities_of_another, "contains files of another CA"),
        (key_that_others_can_read, "other users can access it"),
    ],
)
async def test_files_that_are_not_its_own_are_left_alone(
    certificates, other, tmp_path, fill, problem
):
    directory = tmp_path / "there"
    fill(directory, other)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(InvalidSettings, match=problem):
        await join.join_broker(invitation(certificates), directory, wait=SOON)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


class Impostor:
    """Answers as a broker would, with this certificate and authorities, and notes all that it is sent."""

    def __init__(self, directory, shown):
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
        self.shown = shown
        self.url = ""
        self.received = b""
        self.handshakes = 0

    async def refuse(self, certificates, directory, error, match=None):
        """Is asked by an applicant, who gives up with this error and has not sent its token."""
        server = await asyncio.start_server(self.answer, "127.0.0.1", 0, ssl=self.context)
        async with server:
            self.url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(error, match=match):
                await join.join_broker(invitation(certificates, self.url), directory, wait=SOON)
        assert b"kl1" not in self.received
        assert b"POST" not in self.received

    async def answer(self, reader, writer):
        self.handshakes += 1
        with contextlib.suppress(ssl.SSLError, ConnectionError, asyncio.IncompleteReadError):
            self.received += await reader.readuntil(b"\r\n\r\n")
            body = self.shown
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            self.received += await reader.read()
        writer.close()


async def test_another_authority_gets_no_token(certificates, other, tmp_path):
    impostor = Impostor(other.server(), files.to_pem(other.authority.trusted))
    shown, wanted = (tokens.ca_pin(each.authority.certificate) for each in (other, certificates))
    problem = f"presents a CA with hash {shown}, not {wanted}; the token was not sent"
    await impostor.refuse(certificates, tmp_path / "berlin", InvalidInput, problem)


async def test_who_shows_our_authority_without_its_certificate_gets_no_token(
    certificates, other, tmp_path
):
    """The authority's certificate is public; that it vouches for who shows it is not."""
    shown = files.to_pem([*other.authority.trusted, *certificates.authority.trusted])
    impostor, problem = Impostor(other.server(), shown), "is not signed by the CA with that hash"
    await impostor.refuse(certificates, tmp_path / "berlin", BrokerUnreachable, problem)
    assert impostor.handshakes == 1


ELSEWHERE = Profile(
    identity.server_profile().subject,
    ExtendedKeyUsageOID.SERVER_AUTH,
    (x509.DNSName("elsewhere.example.org"),),
)


@pytest.mark.parametrize(
    "profile", [identity.client_profile("localhost"), ELSEWHERE], ids=["cluster", "host"]
)
async def test_other_certificate_of_our_authority_gets_no_token(certificates, tmp_path, profile):
    """A cluster's must not do for a broker's, nor that of a server elsewhere."""
    directory = certificates.write(f"impostor-{profile.usage.dotted_string}", profile)
    impostor = Impostor(directory, files.to_pem(certificates.authority.trusted))
    await impostor.refuse(certificates, tmp_path / "berlin", BrokerUnreachable)


async def test_answers_without_end_are_not_read(certificates, tmp_path):
    late = b"\n" * (1 << 20) + files.to_pem(certificates.authority.trusted)
    impostor = Impostor(certificates.server(), late)
    problem = "has more than 1048576 bytes"
    await impostor.refuse(certificates, tmp_path / "berlin", UnexpectedResponse, problem)


# -- renewal


def now():
    return datetime.now(UTC)


class Scene:
    """A broker with an authority that can be rotated, and the clients that renew there."""

    def __init__(self, root, certificates, broker):
        self.root = root
        self.certificates = certificates
        self.url = f"https://localhost:{broker.port}"

    def holder(self, name="a"):
        """A directory whose certificate has a tenth of its life left."""
        return shutil.copytree(due(self.certificates, name), self.root / f"live-{name}")

    def client(self, directory):
        return BrokerClient(self.url, directory, backoff=backoff.NO_RETRIES)

    async def renew_if_due(self, client, directory, **flags):
        return await join.renew_with_client(client, self.url, directory, SOON, now(), **flags)

    async def renew(self, directory):
        async with self.client(directory) as client:
            assert await self.renew_if_due(client, directory, force=True)
            await client.refresh()
            await client.version()
        return files.load_credentials(directory)


@pytest.fixture
async def scene(tmp_path):
    certificates = Certificates(tmp_path / "certificates")
    server = shutil.copytree(certificates.server(), tmp_path / "server")
    follows = {"certificate_check_interval": timedelta(milliseconds=10), "http_cert_path": server}
    async with applicants.enrolling(certificates, tmp_path, **follows) as broker:
        yield Scene(tmp_path, certificates, broker)


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


async def outdated(scene, name="alice"):
    async with scene.client(scene.certificates.admin(name)) as admin:
        return [member.name for member in await admin.members.all(outdated=True)]


async def test_a_rotation_in_three_steps_refuses_nobody_and_says_who_is_behind(scene):
    holders = [scene.holder("a"), scene.holder("b")]
    ca = scene.root / "authority"
    first = scene.certificates.authority.certificate
    async with scene.client(holders[1]) as client:
        await client.publish(
            bodies.Advertisement("b", bodies.Metrics(bodies.Quantities("1", "1Gi")))
        )
    await scene.renew(holders[0])
    assert await outdated(scene) == ["b"]  # the broker has issued it no certificate
    new = authority.start_rotation(ca, now=now())
    ours = scene.certificates
    ours.authority = replace(ours.authority, trusted=(first, new))  # and so does the next admin
    for step, (signer, trusted) in {
        "rotate": (first, {first, new}),
        "sign": (new, {first, new}),
        "drop": (new, {new}),
    }.items():
        if step == "sign":
            authority.finish_rotation(ca)
        elif step == "drop":
            authority.drop_authority(ca, tokens.ca_pin(first))

        async def is_behind():
            return await outdated(scene, "bob") == ["a", "b"]

        if step != "drop":  # bob's own certificate is of the old one
            await waiting.until(is_behind)
        for directory in holders:
            await waiting.until(partial(has_moved, scene, directory, signer, trusted))
        if step != "drop":
            assert await outdated(scene, "bob") == []


async def has_moved(scene, directory, signer, trusted):
    found = await scene.renew(directory)
    is_signed = pki_x509.is_issued_by(found.certificate, signer)
    return is_signed and set(found.authorities) == trusted
