"""The newcomer's side: its key stays with it, and its token goes to nobody but the broker of the pin."""

import asyncio
import contextlib
import ssl
import stat
from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from msgspec.structs import replace

import newcomers
from certificates import Certificates
from kubelend.apps import join
from kubelend.apps.join import JoinParameters
from kubelend.core.errors import (
    BrokerUnreachable,
    InvalidInput,
    InvalidSettings,
    TokenRefused,
    Unavailable,
    UnexpectedAnswer,
)
from kubelend.core.lifecycle import Role
from kubelend.kits.backoff import Backoff
from kubelend.pki import files, identity, keys, tokens
from kubelend.pki.identity import Profile
from kubelend.pki.keys import Algorithm
from kubelend.wire.admin_bodies import JoinPending
from waiting import PATIENCE, until

SOON = timedelta(seconds=PATIENCE)


@pytest.fixture
async def broker(certificates, tmp_path, monkeypatch):
    quick = Backoff(
        retries=2**31, first=timedelta(milliseconds=5), longest=timedelta(milliseconds=9)
    )
    monkeypatch.setattr(join, "APPROVAL_BACKOFF", quick)
    async with newcomers.enrolling(certificates, tmp_path) as broker:
        yield broker


def url_of(broker):
    return f"https://localhost:{broker.process.ports['enrol']}"


async def invitation(broker, name="berlin", role=Role.CLUSTER, *, bound=True, url=""):
    token = await newcomers.token(broker, role=role.value, **({"name": name} if bound else {}))
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
    assert files.load_credentials(directory).certificate == welcome.credentials.certificate
    await broker.holder(directory, "berlin").advertise()


async def test_waiting_one_is_notified_once_and_goes_on_when_it_is_accepted(broker, tmp_path):
    pending: list[JoinPending] = []
    wanted = await invitation(broker, bound=False)
    waiting = asyncio.create_task(
        join.join_broker(wanted, tmp_path / "berlin", wait=SOON, on_pending=pending.append)
    )
    await until(lambda: bool(pending))
    await broker.admin().post("members", "cluster", "berlin", "accept", {"key": pending[0].key})
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


async def test_rejected_one_gets_an_error(broker, tmp_path):
    pending: list[JoinPending] = []
    wanted = await invitation(broker, bound=False)
    waiting = asyncio.create_task(
        join.join_broker(wanted, tmp_path / "berlin", wait=SOON, on_pending=pending.append)
    )
    await until(lambda: bool(pending))
    await broker.admin().post("members", "cluster", "berlin", "reject")
    with pytest.raises(TokenRefused, match="no uses left"):
        await waiting


async def test_certificate_that_is_there_is_not_replaced(broker, tmp_path):
    directory = tmp_path / "berlin"
    await join.join_broker(await invitation(broker), directory, wait=SOON)
    before = (directory / "tls.crt").read_bytes()
    with pytest.raises(InvalidSettings, match="already exists"):
        await join.join_broker(await invitation(broker, "paris"), directory, wait=SOON)
    assert (directory / "tls.crt").read_bytes() == before


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


# -- somebody in between


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
    impostor = Impostor(certificates, b"x" * (3 << 20))
    async with impostor.listening() as url:
        wanted = await invitation(broker, url=url)
        with pytest.raises(UnexpectedAnswer, match="presents no CA certificate"):
            await join.join_broker(wanted, tmp_path / "berlin", wait=SOON)
