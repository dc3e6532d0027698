"""Authorities that others made: any ca.crt and ca.key, intermediates, and cert-manager's files."""

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import openssl
from kubelend.core.errors import InvalidSettings
from kubelend.pki import files, identity, keys
from kubelend.pki.authority import Authority
from kubelend.pki.passphrases import Passphrase

NOW = datetime.now(UTC)
CLIENT = identity.client_profile("agent-cluster-1")


def authority(name, signer=None, path_length=None):
    """A certificate and its key, signed by another pair or by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    issuer, issuer_key = (subject, key) if signer is None else (signer[0].subject, signer[1])
    builder = x509.CertificateBuilder(
        issuer, subject, key.public_key(), x509.random_serial_number(), NOW, NOW + timedelta(9)
    )
    builder = builder.add_extension(x509.BasicConstraints(True, path_length), critical=True)
    # As cert-manager has them: openssl's strict mode asks for both.
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = builder.add_extension(identifier, critical=False)
    own = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = builder.add_extension(own, critical=False)
    builder = builder.add_extension(_usage(), critical=True)
    return builder.sign(issuer_key, hashes.SHA256()), key


def _usage():
    return x509.KeyUsage(True, False, False, False, False, True, True, False, False)


@pytest.fixture
def root():
    return authority("root")


@pytest.fixture
def intermediate(root):
    return authority("intermediate", root)


def write(directory, **contents):
    directory.mkdir(exist_ok=True)
    for name, content in contents.items():
        path = directory / name.replace("_", ".")
        is_key = isinstance(content, keys.PrivateKey)
        path.write_bytes(keys.to_pem(content) if is_key else files.to_pem(content))
        path.chmod(0o600)
    return directory


def issued(directory, out, **parameters):
    credentials = Authority.load(directory, **parameters).issue(CLIENT, now=NOW)
    files.save_credentials(out, credentials)
    return credentials


def verified(tmp_path, anchor):
    """Whether openssl verifies what was issued by one certificate, without our help."""
    path = tmp_path / "anchor.crt"
    path.write_bytes(files.to_pem([anchor]))
    return openssl.accepts(tmp_path / "out" / "tls.crt", path)


@openssl.needed
def test_who_trusts_only_the_root_verifies_what_an_intermediate_signed(
    tmp_path, root, intermediate
):
    ca = write(tmp_path / "ca", ca_crt=[intermediate[0], root[0]], ca_key=intermediate[1])
    made = issued(ca, tmp_path / "out")
    assert made.chain == (intermediate[0],)
    assert made.authorities == (intermediate[0], root[0])
    assert files.load_certificates(tmp_path / "out" / "tls.crt")[1:] == (intermediate[0],)
    assert verified(tmp_path, root[0])


@openssl.needed
def test_a_chain_of_several_is_handed_on_in_order_up_to_the_root(tmp_path, root):
    upper = authority("upper", root)
    lower = authority("lower", upper)
    bundle = [root[0], authority("stranger")[0], upper[0], lower[0]]
    ca = write(tmp_path / "ca", ca_crt=bundle, ca_key=lower[1])
    assert issued(ca, tmp_path / "out").chain == (lower[0], upper[0])
    assert verified(tmp_path, root[0])


def test_an_intermediate_without_its_root_is_trusted_itself(tmp_path, intermediate):
    ca = write(tmp_path / "ca", ca_crt=[intermediate[0]], ca_key=intermediate[1])
    made = issued(ca, tmp_path / "out")
    assert made.authorities == (intermediate[0],)


def test_a_root_hands_on_nothing_but_itself(tmp_path, root):
    ca = write(tmp_path / "ca", ca_crt=[root[0]], ca_key=root[1])
    assert issued(ca, tmp_path / "out").chain == ()
    assert len(files.load_certificates(tmp_path / "out" / "tls.crt")) == 1


def test_the_chain_comes_back_with_the_credentials(tmp_path, root, intermediate):
    ca = write(tmp_path / "ca", ca_crt=[intermediate[0], root[0]], ca_key=intermediate[1])
    made = issued(ca, tmp_path / "out")
    assert files.load_credentials(tmp_path / "out").chain == made.chain


@openssl.needed
def test_cert_managers_self_signed_authority_can_be_used(tmp_path, root):
    secret = write(tmp_path / "ca", tls_crt=[root[0]], tls_key=root[1], ca_crt=[root[0]])
    made = issued(secret, tmp_path / "out")
    assert (made.authorities, made.chain) == ((root[0],), ())
    assert verified(tmp_path, root[0])


@openssl.needed
def test_cert_managers_intermediate_authority_can_be_used(tmp_path, root, intermediate):
    ca = tmp_path / "ca"
    write(ca, tls_crt=[intermediate[0]], tls_key=intermediate[1], ca_crt=[root[0]])
    made = issued(ca, tmp_path / "out")
    assert made.authorities == (intermediate[0], root[0])
    assert made.chain == (intermediate[0],)
    assert verified(tmp_path, root[0])


@openssl.needed
def test_cert_managers_longer_chain_can_be_used(tmp_path, root):
    upper = authority("upper", root)
    lower = authority("lower", upper)
    ca = tmp_path / "ca"
    write(ca, tls_crt=[lower[0], upper[0]], tls_key=lower[1], ca_crt=[root[0]])
    made = issued(ca, tmp_path / "out")
    assert made.chain == (lower[0], upper[0])
    assert made.authorities == (lower[0], root[0])
    assert verified(tmp_path, root[0])


@pytest.mark.parametrize("with_root", [True, False])
def test_cert_managers_files_without_a_ca_crt_are_enough(tmp_path, root, intermediate, with_root):
    chain = [intermediate[0], root[0]] if with_root else [intermediate[0]]
    ca = write(tmp_path / "ca", tls_crt=chain, tls_key=intermediate[1])
    made = issued(ca, tmp_path / "out")
    assert made.authorities == tuple(chain)
    assert made.chain == (intermediate[0],)


def test_cert_managers_key_formats_can_be_read(tmp_path, root):
    ca = write(tmp_path / "ca", tls_crt=[root[0]], tls_key=root[1], ca_crt=[root[0]])
    sec1 = root[1].private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    assert b"BEGIN EC PRIVATE KEY" in sec1
    (ca / "tls.key").write_bytes(sec1)
    assert issued(ca, tmp_path / "out").authorities == (root[0],)


def test_a_brokers_or_clusters_directory_is_not_taken_for_an_authoritys(tmp_path):
    made = Authority.create("test-ca", now=NOW).issue(identity.server_profile(), now=NOW)
    files.save_credentials(tmp_path / "broker", made)
    with pytest.raises(InvalidSettings, match=r"broker/tls\.crt is not a CA certificate"):
        Authority.load(tmp_path / "broker")


def test_our_own_files_come_before_cert_managers(tmp_path):
    ours = Authority.create("test-ca", now=NOW)
    ours.save(tmp_path)
    files.save_credentials(tmp_path, ours.issue(identity.server_profile(), now=NOW))
    assert Authority.load(tmp_path).certificate == ours.certificate


def test_a_certificate_and_a_key_of_two_secrets_do_not_match(tmp_path, root, intermediate):
    ca = write(tmp_path / "ca", tls_crt=[root[0]], tls_key=intermediate[1], ca_crt=[root[0]])
    with pytest.raises(InvalidSettings, match=r"tls\.crt and tls\.key in .* do not match"):
        Authority.load(ca)


def test_cert_managers_key_that_others_can_read_is_refused(tmp_path, root):
    ca = write(tmp_path / "ca", tls_crt=[root[0]], tls_key=root[1], ca_crt=[root[0]])
    (ca / "tls.key").chmod(0o644)
    with pytest.raises(InvalidSettings, match=r"mode 0644.*secret volume's defaultMode"):
        Authority.load(ca)


def test_an_encrypted_key_of_another_authority_can_be_used(tmp_path, root):
    ca = write(tmp_path / "ca", ca_crt=[root[0]], ca_key=root[1])
    (ca / "ca.key").write_bytes(keys.to_pem(root[1], Passphrase("x")))
    assert issued(ca, tmp_path / "out", passphrase=Passphrase("x")).authorities == (root[0],)
