"""Who gets in and who does not, over real sockets with a throw-away authority."""

import asyncio
import ssl
import warnings

import pytest
import uvloop
from cryptography import x509

import tls_peers
from certificates import Certificates
from kubelend.pki import files, identity, keys
from kubelend.pki.authority import Authority
from kubelend.transports import tls


@pytest.fixture
def certificates(tmp_path):
    return Certificates(tmp_path)


@pytest.fixture
def server(certificates):
    return tls.server_context(certificates.server())


@pytest.fixture
def cluster(certificates):
    return tls.client_context(certificates.cluster("agent-cluster-1"))


def bare_client(certificates):
    """A client that trusts our authority and has no certificate."""
    return ssl.create_default_context(cafile=certificates.server() / "ca.crt")


def of_version(context, version, ciphers="DEFAULT:@SECLEVEL=0"):
    """The same context, held to one version; the library calls the old ones deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = version
    context.set_ciphers(ciphers)
    return context


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "liqo-resource-broker.default.svc"])
def test_a_cluster_with_our_certificate_is_let_in_by_name(server, cluster, host):
    seen = tls_peers.shake_hands(server, cluster, host=host)
    assert (seen.server_error, seen.client_error) == ("", "")
    assert seen.caller == "agent-cluster-1"
    assert seen.version == "TLSv1.3"
    assert seen.protocol == "http/1.1"


@pytest.mark.parametrize(
    "directory, reason",
    [
        (lambda made: made.stranger("agent-cluster-1"), "unable to get local issuer certificate"),
        (lambda made: made.expired("agent-cluster-1"), "certificate has expired"),
        (lambda made: made.early("agent-cluster-1"), "certificate is not yet valid"),
        (lambda made: made.server(), "unsuitable certificate purpose"),
    ],
    ids=["wrong authority of the same name", "expired", "not yet valid", "the broker's own"],
)
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=str)
def test_any_other_certificate_is_refused(certificates, server, version, directory, reason):
    client = tls.client_context(directory(certificates))
    client.minimum_version = client.maximum_version = version
    seen = tls_peers.shake_hands(server, client)
    assert reason in seen.server_error
    assert seen.client_error
    assert seen.caller == ""


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=str)
def test_no_certificate_is_refused(certificates, server, version):
    client = bare_client(certificates)
    client.minimum_version = client.maximum_version = version
    seen = tls_peers.shake_hands(server, client)
    assert "peer did not return a certificate" in seen.server_error
    assert seen.caller == ""


def test_an_unknown_authority_is_refused(tmp_path, certificates, server):
    elsewhere = Certificates(tmp_path / "elsewhere", authority="another-ca")
    directory = elsewhere.cluster("agent-cluster-1")
    (directory / "ca.crt").write_bytes((certificates.server() / "ca.crt").read_bytes())
    seen = tls_peers.shake_hands(server, tls.client_context(directory))
    assert "unable to get local issuer certificate" in seen.server_error


def test_tls_1_1_is_refused(certificates, server, cluster):
    old = of_version(cluster, ssl.TLSVersion.TLSv1_1)
    # That this client can speak at all is shown by a server which lets it.
    lax = of_version(tls.server_context(certificates.server()), ssl.TLSVersion.TLSv1_1)
    assert tls_peers.shake_hands(lax, old).version == "TLSv1.1"

    seen = tls_peers.shake_hands(server, old)
    assert "UNSUPPORTED_PROTOCOL" in seen.server_error
    assert seen.caller == ""


def test_tls_1_2_is_accepted_with_forward_secrecy_and_authenticated_encryption(server, cluster):
    seen = tls_peers.shake_hands(server, of_version(cluster, ssl.TLSVersion.TLSv1_2))
    assert (seen.version, seen.caller) == ("TLSv1.2", "agent-cluster-1")
    assert seen.cipher.startswith("ECDHE-")
    assert "GCM" in seen.cipher or "CHACHA20" in seen.cipher


def test_older_ciphers_are_refused(server, cluster):
    client = of_version(cluster, ssl.TLSVersion.TLSv1_2, "ECDHE-ECDSA-AES128-SHA256")
    assert "NO_SHARED_CIPHER" in tls_peers.shake_hands(server, client).server_error


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=str)
def test_no_ticket_is_given_with_which_a_session_could_outlive_its_certificate(
    server, cluster, version
):
    cluster.minimum_version = cluster.maximum_version = version
    session = tls_peers.shake_hands(server, cluster).session
    assert session is None or not session.has_ticket


@pytest.mark.parametrize(
    "host, reason",
    [
        ("broker.example.org", "Hostname mismatch"),
        ("127.0.0.2", "IP address mismatch"),
    ],
)
def test_a_client_refuses_a_server_of_another_name(server, cluster, host, reason):
    assert reason in tls_peers.shake_hands(server, cluster, host=host).client_error


def test_a_server_has_the_names_that_it_was_given(certificates, cluster):
    directory = certificates.server("broker.example.org", "127.0.0.2", directory="named")
    server = tls.server_context(directory)
    for host in ("broker.example.org", "127.0.0.2"):
        assert tls_peers.shake_hands(server, cluster, host=host).caller == "agent-cluster-1"


def test_a_client_refuses_a_server_of_another_authority(tmp_path, certificates, cluster):
    elsewhere = Certificates(tmp_path / "elsewhere", authority="another-ca")
    seen = tls_peers.shake_hands(tls.server_context(elsewhere.server()), cluster)
    assert "CERTIFICATE_VERIFY_FAILED" in seen.client_error


def test_a_client_refuses_a_cluster_that_plays_the_broker(certificates, cluster):
    names = identity.server_profile().names
    profile = identity.client_profile("agent-cluster-2")
    directory = certificates.write(
        "imposter", identity.Profile(profile.subject, profile.usage, names)
    )
    seen = tls_peers.shake_hands(tls.server_context(directory), cluster)
    assert "unsuitable certificate purpose" in seen.client_error


def test_an_intermediate_authority_in_the_file_is_trusted_without_its_root(certificates, cluster):
    root = Authority.create("root", now=certificates.now)
    name = certificates.authority.certificate.subject
    middle = (
        x509.CertificateBuilder(
            issuer_name=root.certificate.subject,
            subject_name=name,
            public_key=certificates.authority.key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=certificates.now,
            not_valid_after=certificates.now.replace(year=certificates.now.year + 1),
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(root.key, keys.digest_for(root.key))
    )
    issued = files.load_credentials(certificates.server())
    credentials = files.Credentials(issued.certificate, issued.key, (middle,))
    files.save_credentials(certificates.root / "middle", credentials)
    server = tls.server_context(certificates.root / "middle")
    assert tls_peers.shake_hands(server, cluster).caller == "agent-cluster-1"


@pytest.mark.parametrize(
    "loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def test_the_server_never_hears_of_whom_it_refuses(certificates, server, cluster, loop):
    refused = [
        bare_client(certificates),
        tls.client_context(certificates.stranger("agent-cluster-1")),
        tls.client_context(certificates.expired("agent-cluster-1")),
        tls.client_context(certificates.server()),
    ]

    async def names():
        async with tls_peers.serving(server) as port:
            return [await tls_peers.name_of(port, client) for client in [*refused, cluster]]

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(names()) == ["", "", "", "", "agent-cluster-1"]
