"""TLS: who gets in and who does not, which versions and ciphers, by our contexts and by openssl."""

import asyncio
import re
import shutil
import ssl
import subprocess

import pytest
from msgspec.structs import replace

import tls_peers
from certificates import Certificates, intermediate
from kubelend.pki import files, identity
from kubelend.pki.authority import Authority
from kubelend.transports import tls
from waiting import PATIENCE


@pytest.fixture
def server(certificates):
    return tls.server_context(certificates.server())


@pytest.fixture
def cluster(certificates):
    return tls.client_context(certificates.cluster("agent-cluster-1"))


def bare_client(certificates):
    """A client that trusts our authority and has no certificate."""
    return ssl.create_default_context(cafile=certificates.server() / "ca.crt")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "liqo-resource-broker.default.svc"])
def test_a_cluster_with_our_certificate_is_let_in_by_name(server, cluster, host):
    seen = tls_peers.shake_hands(server, cluster, host=host)
    assert (seen.server_error, seen.client_error) == ("", "")
    assert seen.caller == "agent-cluster-1"
    assert seen.version == "TLSv1.3"
    assert seen.protocol == "http/1.1"


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("stranger", "unable to get local issuer certificate"),
        ("expired", "certificate has expired"),
        ("early", "certificate is not yet valid"),
        ("server", "unsuitable certificate purpose"),
        ("none", "peer did not return a certificate"),
    ],
)
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=str)
def test_any_other_certificate_is_refused_and_none_too(certificates, server, version, kind, reason):
    if kind == "none":
        client = bare_client(certificates)
    else:
        client = tls.client_context(getattr(certificates, kind)(*() if kind == "server" else "a"))
    client.minimum_version = client.maximum_version = version
    seen = tls_peers.shake_hands(server, client)
    assert reason in seen.server_error
    assert seen.client_error
    assert seen.caller == ""


@pytest.mark.parametrize(
    "host, reason",
    [("broker.example.org", "Hostname mismatch"), ("127.0.0.2", "IP address mismatch")],
)
def test_a_client_refuses_a_server_of_another_name(server, cluster, host, reason):
    assert reason in tls_peers.shake_hands(server, cluster, host=host).client_error


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=str)
def test_no_session_could_outlive_its_certificate_by_a_ticket(server, cluster, version):
    cluster.minimum_version = cluster.maximum_version = version
    session = tls_peers.shake_hands(server, cluster).session
    assert session is None or not session.has_ticket


def test_a_client_refuses_a_server_of_another_authority(tmp_path, certificates, cluster):
    elsewhere = Certificates(tmp_path / "elsewhere", authority="another-ca")
    seen = tls_peers.shake_hands(tls.server_context(elsewhere.server()), cluster)
    assert "CERTIFICATE_VERIFY_FAILED" in seen.client_error


def test_a_client_refuses_a_cluster_that_plays_the_broker(certificates, cluster):
    names = identity.server_profile().names
    profile = replace(identity.client_profile("agent-cluster-2"), names=names)
    directory = certificates.write("impostor", profile)
    seen = tls_peers.shake_hands(tls.server_context(directory), cluster)
    assert "unsuitable certificate purpose" in seen.client_error


def test_an_intermediate_authority_in_the_file_is_trusted_without_its_root(certificates, tmp_path):
    root = Authority.create("root", now=certificates.now)
    middle = intermediate(root, "middle", certificates.now)
    for name, profile in (
        ("server", identity.server_profile()),
        ("client", identity.client_profile("agent-cluster-1")),
    ):
        issued = middle.issue(profile, now=certificates.now)
        credentials = files.Credentials(issued.certificate, issued.key, middle.chain)
        files.save_credentials(tmp_path / name, credentials)
    server, client = (
        tls.server_context(tmp_path / "server"),
        tls.client_context(tmp_path / "client"),
    )
    assert tls_peers.shake_hands(server, client).caller == "agent-cluster-1"


# All that the library knows: what is refused is refused by the broker.
ANY = "ALL:COMPLEMENTOFALL"


@pytest.fixture
def talk(broker, certificates):
    """Connect with these flags, say something, and give all that openssl prints."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl: apt-get install openssl")
    directory = certificates.cluster("openssl")

    def run(*flags, said=b""):
        return subprocess.run(
            [
                *("openssl", "s_client", "-connect", f"127.0.0.1:{broker.port}"),
                *("-servername", "localhost", "-verify_return_error"),
                *("-CAfile", directory / "ca.crt", "-cert", directory / "tls.crt"),
                *("-key", directory / "tls.key", *flags),
            ],
            input=said,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )

    async def talk(*flags, said=b""):
        done = await asyncio.to_thread(run, *flags, said=said)
        return (done.stdout + done.stderr).decode(errors="replace")

    return talk


def chosen(text):
    """Version and cipher; None if there was no agreement."""
    (found,) = re.findall(r"^New, (\S+), Cipher is (\S+)$", text, re.MULTILINE)
    return None if found[1] == "(NONE)" else found


async def test_newest_version_is_chosen_where_both_can(talk):
    text = await talk()
    assert chosen(text)[0] == "TLSv1.3"
    assert "Verify return code: 0 (ok)" in text


async def test_version_1_2_is_agreed_to_with_a_modern_cipher(talk):
    version, cipher = chosen(await talk("-tls1_2", "-cipher", f"{ANY}:@SECLEVEL=0"))
    assert version == "TLSv1.2"
    assert re.fullmatch(r"ECDHE-(ECDSA|RSA)-(AES\d+-GCM-SHA\d+|CHACHA20-POLY1305)", cipher)


@pytest.mark.parametrize(
    "version, ciphers, reason",
    [
        pytest.param("-tls1_1", ANY, "UNSUPPORTED_PROTOCOL", id="TLS 1.1"),
        pytest.param("-tls1", ANY, "UNSUPPORTED_PROTOCOL", id="TLS 1.0"),
        pytest.param("-tls1_2", "ECDHE+AES:!AESGCM:!AESCCM", "NO_SHARED_CIPHER", id="CBC"),
        pytest.param("-tls1_2", "kRSA", "NO_SHARED_CIPHER", id="no forward secrecy"),
        pytest.param("-tls1_2", "DHE", "NO_SHARED_CIPHER", id="finite field"),
        pytest.param("-tls1_2", "ECDHE+AESCCM", "NO_SHARED_CIPHER", id="CCM"),
        pytest.param("-tls1_2", "aNULL:eNULL", "NO_SHARED_CIPHER", id="none"),
    ],
)
async def test_older_versions_and_ciphers_are_refused(talk, log, version, ciphers, reason):
    assert chosen(await talk(version, "-cipher", f"{ciphers}:@SECLEVEL=0")) is None
    assert [line["reason"] for line in log.lines("TLS handshake rejected")] == [reason]


async def test_nothing_is_compressed(talk):
    for flags in ((), ("-tls1_2", "-comp")):
        text = await talk(*flags)
        assert chosen(text) is not None
        assert re.findall(r"^Compression: (.*)$", text, re.MULTILINE) == ["NONE"]
        assert re.findall(r"^Expansion: (.*)$", text, re.MULTILINE) == ["NONE"]


async def test_client_cannot_begin_anew_within_a_connection(talk):
    """By an R openssl begins a renegotiation."""
    _, asked, answered = (await talk("-tls1_2", said=b"R\n")).partition("RENEGOTIATING")
    assert asked
    assert "no renegotiation" in answered
    assert "verify return" not in answered


async def test_only_http_1_1_is_agreed_to_as_the_protocol(talk):
    assert "ALPN protocol: http/1.1" in await talk("-alpn", "h2,http/1.1")
    assert "No ALPN negotiated" in await talk("-alpn", "h2")
