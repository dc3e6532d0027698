"""A connection that fails is an error whose message says why and what to do."""

import asyncio
import contextlib
import socket
import ssl
import threading
from datetime import timedelta

import pytest
from cryptography.hazmat.primitives import serialization
from msgspec.structs import replace

from certificates import Certificates
from kubelend.core.errors import (
    BrokerUnreachable,
    CertificateRefused,
    InvalidSettings,
    UnexpectedResponse,
)
from kubelend.kits import backoff
from kubelend.kits.backoff import Backoff
from kubelend.pki import files, identity
from kubelend.pki.keys import Algorithm
from kubelend.transports import tls
from kubelend.transports.client import BrokerClient
from kubelend.transports.errors import BrokerEndpoint
from kubelend.wire import bodies
from scripted_broker import ScriptedBroker, body, hang_up, say_nothing

pytestmark = pytest.mark.broker("scripted", answers=[body(bodies.Version("1"))])

QUICK = Backoff(retries=5, first=timedelta(milliseconds=1))
PATIENT = Backoff(retries=1, first=timedelta(hours=1), longest=timedelta(hours=1))
"""A retry would take longer than a test may."""


async def failure(url, directory, **settings):
    return str(await raised(url, directory, **settings))


async def raised(url, directory, timeout=timedelta(seconds=10), retries=backoff.NO_RETRIES):
    async with BrokerClient(url, directory, timeout=timeout, backoff=retries) as client:
        with pytest.raises(BrokerUnreachable) as caught:
            await client.version()
    return caught.value


@contextlib.asynccontextmanager
async def listener(handle, **options):
    """A server of another kind."""
    server = await asyncio.start_server(handle, "127.0.0.1", 0, **options)
    async with server:
        yield f"https://localhost:{server.sockets[0].getsockname()[1]}"


async def test_the_broker_is_signed_by_another_authority_which_no_retry_changes(broker, tmp_path):
    directory = Certificates(tmp_path, authority="other").cluster("a")
    message = await failure(broker.url, directory, retries=PATIENT)
    assert "is not signed by a CA in" in message
    assert "; copy the ca.crt of this broker there, or check the address" in message


async def test_the_broker_has_another_name(certificates):
    async with ScriptedBroker(certificates.server(), host="127.0.0.2") as broker:
        message = await failure(broker.url, certificates.cluster("a"))
    assert f"the certificate of {broker.url} is not valid for that name; use a name" in message


async def test_the_broker_has_an_expired_certificate(certificates):
    directory = certificates.write(
        "expired-broker",
        identity.server_profile(),
        at=certificates.now - timedelta(days=2),
        lifetime=timedelta(days=1),
    )
    async with ScriptedBroker(directory) as broker:
        message = await failure(broker.url, certificates.cluster("a"))
    assert "is not valid now: certificate has expired; renew the certificate" in message


async def test_the_broker_does_not_know_our_authority(broker, certificates):
    directory = certificates.stranger("a")
    message = await failure(broker.url, directory)
    assert "closed the connection before its first response" in message
    assert f": it may not accept {directory}/tls.crt" in message
    assert "; get a certificate from the CA of this broker" in message


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("stranger", "which no CA in"),
        ("expired", "expired at 2"),
        ("early", "is not valid before"),
        ("server", "its extended key usage lacks clientAuth"),
    ],
)
async def test_what_is_wrong_with_our_own_files_is_the_reason_and_not_tried_again(
    broker, certificates, kind, reason
):
    directory = getattr(certificates, kind)("a")
    error = await raised(broker.url, directory, retries=PATIENT)
    assert type(error) is CertificateRefused
    assert f"{directory}/tls.crt" in str(error)
    assert reason in str(error)


async def test_a_certificate_that_expires_while_it_is_used_is_not_tried_again(
    broker, certificates, monkeypatch
):
    """The first connection that ends may mean a restart; the second is looked into."""
    broker.responses.append(hang_up)
    directory, over = certificates.cluster("a"), "it expired"
    async with BrokerClient(broker.url, directory, backoff=QUICK) as client:
        await client.version()
        monkeypatch.setattr(BrokerEndpoint, "_own_certificate_problem", lambda _: over)
        with pytest.raises(CertificateRefused, match=over):
            await client.version()
    assert len(broker.seen) == 1 + 2 * 2, "the HTTP library repeats each once"


async def test_a_broker_that_hangs_up_for_no_reason_to_be_seen_may_be_restarting(
    broker, certificates
):
    broker.responses[:] = [hang_up]
    error = await raised(broker.url, certificates.cluster("a"))
    assert type(error) is BrokerUnreachable


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=str)
@pytest.mark.parametrize("is_trusted", [True, False], ids=["trusted here", "unknown here"])
async def test_the_alert_of_a_server_is_the_reason(certificates, tmp_path, version, is_trusted):
    """If both authorities are trusted here, nothing is wrong with our own files."""
    directory = certificates.stranger("a")
    if is_trusted:
        directory = Certificates(tmp_path, authority="other").cluster("a")
        with (directory / "ca.crt").open("ab") as trusted:
            trusted.write((certificates.server() / "ca.crt").read_bytes())
    error = await error_at_blocking_server(certificates, version, directory)
    assert type(error) is CertificateRefused
    assert "closed the connection before its first response (" in str(error)
    assert "unknown ca): it may not accept" in str(error)


async def error_at_blocking_server(certificates, version, directory):
    """Servers of other languages send an alert; of Python's, only blocking ones do."""
    context = tls.server_context(certificates.server())
    context.minimum_version = context.maximum_version = version
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=refuse_all, args=(listening, context))
        thread.start()
        url = f"https://localhost:{listening.getsockname()[1]}"
        error = await raised(url, directory, retries=PATIENT)
        listening.shutdown(socket.SHUT_RDWR)
        await asyncio.to_thread(thread.join)
    return error


def refuse_all(listening, context):
    # Until the listener is shut down. The HTTP library tries a second time by itself.
    with contextlib.suppress(OSError):
        while True:
            raw, _ = listening.accept()
            raw.settimeout(10)
            with context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False) as peer:
                refuse_one(peer)


def refuse_one(peer):
    with contextlib.suppress(ssl.SSLError):
        peer.do_handshake()
    # All that the client has sent is read, or a reset would overtake the alert.
    with contextlib.suppress(ConnectionError):
        while socket.socket.recv(peer, 65536):
            pass


async def test_a_server_without_tls_is_no_broker(certificates):
    async def talk(_, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with listener(talk) as url:
        message = await failure(url, certificates.cluster("a"))
    assert "TLS handshake with" in message
    assert "; check address and port" in message


async def test_silence_is_not_waited_for_forever(broker, certificates):
    broker.responses[:] = [say_nothing]
    limit = timedelta(milliseconds=200)
    message = await failure(broker.url, certificates.cluster("a"), timeout=limit)
    assert f"the broker at {broker.url} did not answer within 200ms; try again" in message
    over = asyncio.Event()

    async def wait(_, writer):
        await over.wait()
        writer.close()

    async with listener(wait) as url:
        message = await failure(url, certificates.cluster("a"), timeout=limit)
        over.set()
    assert "did not answer within 200ms" in message


async def test_a_broker_that_knew_us_is_not_said_to_distrust_us(broker, certificates):
    broker.responses.append(hang_up)
    directory, reason = (
        certificates.cluster("a"),
        "closed the connection; the broker may be restarting",
    )
    async with BrokerClient(broker.url, directory, backoff=backoff.NO_RETRIES) as client:
        await client.version()
        with pytest.raises(BrokerUnreachable, match=reason):
            await client.version()


async def test_an_answer_that_is_no_http_is_unexpected(certificates):
    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"220 mail.example.org ESMTP\r\n")
        await writer.drain()
        writer.close()

    context = tls.server_context(certificates.server())
    async with (
        listener(talk, ssl=context) as url,
        BrokerClient(url, certificates.cluster("a")) as client,
    ):
        with pytest.raises(UnexpectedResponse, match="not a response of a broker"):
            await client.version()


@pytest.fixture
def own(tmp_path):
    return Certificates(tmp_path)


def reloading_context(directory):
    return tls.ReloadingServerContext(directory, report=print)


@pytest.fixture(
    params=[tls.server_context, tls.client_context, reloading_context],
    ids=["server", "client", "reloading"],
)
def make_context(request):
    return request.param


@pytest.mark.parametrize("missing", ["tls.crt", "tls.key", "ca.crt"])
def test_a_missing_file_is_named_with_what_to_do(own, make_context, missing):
    directory = own.server()
    (directory / missing).unlink()
    with pytest.raises(InvalidSettings, match=f"{missing} is missing; .*`kubelend ca issue`"):
        make_context(directory)


@pytest.mark.parametrize("algorithm", [Algorithm.P256, Algorithm.RSA], ids=str)
def test_a_certificate_and_a_key_that_do_not_match_are_named(own, make_context, algorithm):
    directory = own.cluster("a")
    other = own.write("b", identity.client_profile("b"), algorithm=algorithm)
    (directory / "tls.key").write_bytes((other / "tls.key").read_bytes())
    with pytest.raises(InvalidSettings, match=r"tls\.crt and .*tls\.key do not match; use the"):
        make_context(directory)


def test_an_encrypted_key_is_an_error_and_not_a_question_on_the_terminal(own, make_context):
    directory = own.cluster("a")
    key = files.load_key(directory / "tls.key")
    secret = serialization.BestAvailableEncryption(b"x")
    pkcs8 = serialization.PrivateFormat.PKCS8
    encrypted = key.private_bytes(serialization.Encoding.PEM, pkcs8, secret)
    (directory / "tls.key").write_bytes(encrypted)
    with pytest.raises(InvalidSettings, match="not a certificate and unencrypted key in PEM form"):
        make_context(directory)


def test_the_end_of_what_is_no_certificate_is_an_error(tmp_path):
    (tmp_path / "tls.crt").write_text("garbage")
    with pytest.raises(InvalidSettings, match=r"tls\.crt: not a certificate in PEM form"):
        tls.own_certificate(tmp_path)


def test_a_key_that_others_can_read_is_a_warning_since_kubernetes_mounts_it_so(own):
    directory = own.server()
    assert tls.key_mode_warning(directory) == ""
    (directory / "tls.key").chmod(0o644)
    assert "mode 0644, so other users can access it; chmod 600" in tls.key_mode_warning(directory)
    tls.server_context(directory)


@pytest.mark.parametrize(
    "profile, problem",
    [
        (identity.client_profile("a"), "no extended key usage serverAuth; create one with"),
        (replace(identity.server_profile(), names=()), "no subject alternative name, by which"),
    ],
    ids=["client", "no name"],
)
def test_server_does_not_start_with_a_certificate_that_clients_reject(own, profile, problem):
    directory = own.write("other", profile)
    with pytest.raises(InvalidSettings, match=problem):
        reloading_context(directory)
