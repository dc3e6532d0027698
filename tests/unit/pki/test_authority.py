"""Authorities: what ours and others' issue, how long it lives, with openssl as the second opinion."""

import functools
import re
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

import openssl
from certificates import Certificates
from issuers import key_of
from kubelend.core.errors import InvalidIdentity, InvalidSettings
from kubelend.core.lifecycle import Role
from kubelend.pki import files, identity, keys
from kubelend.pki import x509 as pki_x509
from kubelend.pki.authority import AUTHORITY_LIFETIME, LEAF_LIFETIME, Authority
from kubelend.pki.keys import Algorithm

NOW = datetime.now(UTC).replace(microsecond=0)

DAY = timedelta(days=1)

PURPOSES = ("sslserver", "sslclient")


@functools.cache
def authority_of(algorithm):
    """Made once, and not while tests are collected: keys of RSA take long to make."""
    return Authority.create("test-ca", now=NOW, algorithm=algorithm)


@pytest.fixture
def certificates(tmp_path):
    return Certificates(tmp_path)


@openssl.needed
@pytest.mark.parametrize(
    "algorithm, kind",
    [("p256", "p256"), ("p256", "p384"), ("p256", "rsa"), ("p256", "ed25519"), ("rsa", "p256")],
)
@pytest.mark.parametrize(
    "profile, subject, purposes",
    [
        (identity.server_profile(), "O=LiqoResourceBroker, CN=liqo-resource-broker", PURPOSES),
        (identity.client_profile("a"), "O=LiqoResourceAgent, CN=a", PURPOSES[::-1]),
    ],
    ids=["server", "cluster"],
)
def test_openssl_accepts_what_is_issued_for_its_purpose_only_whatever_key_the_holder_has(
    tmp_path, algorithm, kind, profile, subject, purposes
):
    purpose, other = purposes
    authority, key = authority_of(Algorithm(algorithm)), key_of(kind)
    signed = authority.sign(profile, key.public_key(), now=NOW)
    files.save_credentials(tmp_path, files.Credentials(signed, key, authority.trusted))
    assert openssl.accepts(tmp_path / "tls.crt", tmp_path / "ca.crt", purpose=purpose)
    assert not openssl.accepts(tmp_path / "tls.crt", tmp_path / "ca.crt", purpose=other)
    text = openssl.described(tmp_path / "tls.crt")
    assert f"Subject: {subject} " in text
    assert "X509v3 Basic Constraints: critical CA:FALSE" in text


@openssl.needed
@pytest.mark.parametrize("algorithm", Algorithm)
def test_an_authority_is_marked_as_one_may_only_sign_and_comes_back_from_its_directory(
    tmp_path, algorithm
):
    authority_of(algorithm).save(tmp_path)
    loaded = Authority.load(tmp_path)
    assert loaded.certificate == authority_of(algorithm).certificate
    issued = loaded.issue(identity.client_profile("a"), now=NOW)
    issued.certificate.verify_directly_issued_by(loaded.certificate)
    text = openssl.described(tmp_path / "ca.crt")
    assert "X509v3 Basic Constraints: critical CA:TRUE" in text
    assert "X509v3 Key Usage: critical Certificate Sign, CRL Sign Signature Algorithm" in text


@openssl.needed
@pytest.mark.parametrize(
    "kind, key, usage",
    [
        ("p256", "ASN1 OID: prime256v1", "Digital Signature X509v3"),
        ("rsa", "Public-Key: (3072 bit)", "Digital Signature, Key Encipherment X509v3"),
    ],
)
def test_a_leaf_has_the_usage_of_its_key_and_names_the_key_that_signed_it(
    certificates, tmp_path, kind, key, usage
):
    profile, public = identity.client_profile("x"), key_of(kind).public_key()
    signed = certificates.authority.sign(profile, public, now=NOW)
    (tmp_path / "x.crt").write_bytes(files.to_pem([signed]))
    text = openssl.described(tmp_path / "x.crt")
    assert key in text
    assert f"X509v3 Key Usage: critical {usage}" in text
    assert "X509v3 Extended Key Usage: TLS Web Client Authentication" in text
    assert "Signature Algorithm: ecdsa-with-SHA256" in text
    authority = openssl.described(certificates.server() / "ca.crt")
    identifier = re.search(r"Subject Key Identifier: (\S+)", authority)
    assert identifier
    assert f"Authority Key Identifier: {identifier[1]}" in text


@openssl.needed
def test_the_broker_has_the_names_of_its_service_and_of_loopback(certificates):
    names = ["broker.example.org", "192.0.2.7", "::1"]
    profile = identity.server_profile(namespace="lending", names=names)
    text = openssl.described(certificates.write("broker", profile) / "tls.crt")
    assert (
        "X509v3 Subject Alternative Name: DNS:liqo-resource-broker, "
        "DNS:liqo-resource-broker.lending, DNS:liqo-resource-broker.lending.svc, "
        "DNS:liqo-resource-broker.lending.svc.cluster.local, DNS:localhost, "
        "IP Address:127.0.0.1, DNS:broker.example.org, IP Address:192.0.2.7, "
        "IP Address:0:0:0:0:0:0:0:1 "
    ) in text
    assert "X509v3 Extended Key Usage: TLS Web Server Authentication" in text


@openssl.needed
@pytest.mark.parametrize("role", [Role.VIEWER, Role.ADMIN])
def test_the_organisation_of_a_person_says_the_role(certificates, role):
    directory = certificates.write("x", identity.client_profile("someone", role))
    assert f"Subject: O=kubelend:{role}, CN=someone " in openssl.described(directory / "tls.crt")


def test_validity_begins_five_minutes_early_and_has_a_default():
    authority = Authority.create("test-ca", now=NOW)
    leaf = authority.issue(identity.client_profile("a"), now=NOW).certificate
    for made, lifetime in ((authority.certificate, AUTHORITY_LIFETIME), (leaf, LEAF_LIFETIME)):
        assert made.not_valid_before_utc == NOW - timedelta(minutes=5)
        assert made.not_valid_after_utc == NOW + lifetime


@pytest.mark.parametrize(
    "lifetime", [timedelta(0), -DAY, timedelta.max, timedelta(milliseconds=900)], ids=str
)
def test_impossible_lifetimes_are_refused(lifetime):
    with pytest.raises(InvalidSettings, match="certificate lifetime"):
        Authority.create("test-ca", lifetime, now=NOW)


def test_an_authority_that_has_ended_issues_nothing():
    authority = Authority.create("test-ca", 10 * DAY, now=NOW)
    with pytest.raises(InvalidSettings, match=r"expired at .*`kubelend ca init`"):
        authority.issue(identity.client_profile("a"), now=NOW + 10 * DAY)


def test_serial_numbers_are_random_and_fill_twenty_bytes():
    authority = Authority.create("test-ca", now=NOW)
    issued = [authority.issue(identity.client_profile("a"), now=NOW).certificate for _ in range(50)]
    serials = {certificate.serial_number for certificate in issued}
    assert len(serials) == 50
    assert 150 < max(serials).bit_length() <= 159


def test_a_bundle_is_handed_on_and_its_matching_certificate_signs(tmp_path):
    old, new = (Authority.create("test-ca", now=NOW) for _ in range(2))
    files.save_authority(tmp_path, [old.certificate, new.certificate], new.key)
    issued = Authority.load(tmp_path).issue(identity.client_profile("a"), now=NOW)
    issued.certificate.verify_directly_issued_by(new.certificate)
    assert set(issued.authorities) == {old.certificate, new.certificate}


@openssl.needed
def test_an_authority_made_by_openssl_can_be_used(tmp_path):
    made = openssl.run(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=elsewhere"),
        *("-days", "10", "-keyout", tmp_path / "ca.key", "-out", tmp_path / "ca.crt"),
    )
    assert made.returncode == 0, made.stderr
    (tmp_path / "ca.key").chmod(0o600)
    issued = Authority.load(tmp_path).issue(identity.client_profile("a"), now=NOW)
    files.save_credentials(tmp_path, issued)
    verdict = openssl.run("verify", "-CAfile", tmp_path / "ca.crt", tmp_path / "tls.crt")
    assert verdict.returncode == 0, verdict.stderr


@pytest.mark.parametrize(
    "name", ["", " a", "a" * 65, "é" * 33, "a\nb", "liqo-resource-broker"], ids=repr
)
def test_names_that_the_broker_would_refuse_are_not_issued(name):
    with pytest.raises(InvalidIdentity):
        identity.client_profile(name)


@pytest.mark.parametrize("name", ["a" * 64, "No DNS_label!", "Zürich/1", "é" * 32], ids=repr)
def test_any_other_text_names_a_cluster(name):
    subject = identity.client_profile(name).subject
    (found,) = subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    assert found.value == name


@pytest.mark.parametrize(
    "name",
    ["", "a b", "https://a", "a:8443", "a..b", "-a", "10.0.0.0/8", "ü.example", "a" * 254],
    ids=lambda name: repr(name)[:20],
)
def test_what_is_no_host_is_refused_as_a_name_of_the_broker(name):
    with pytest.raises(InvalidSettings, match="neither a host name nor an IP address"):
        identity.server_profile(names=[name])


@pytest.mark.parametrize("namespace", ["", "A", "a.b", "-a", "a" * 64])
def test_what_is_no_namespace_is_refused(namespace):
    with pytest.raises(InvalidSettings, match="not a valid Kubernetes namespace"):
        identity.server_profile(namespace=namespace)


@pytest.mark.parametrize("name", ["", "a" * 65], ids=["empty", "long"])
def test_what_cannot_name_an_authority_is_refused(name):
    with pytest.raises(InvalidSettings, match="is not a valid name of an authority"):
        Authority.create(name, now=NOW)


CLIENT = identity.client_profile("agent-cluster-1")
SIGNING = x509.KeyUsage(True, False, False, False, False, True, True, False, False)


def authority(name, signer=None):
    """A certificate and its key, signed by another pair or by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    issuer, issuer_key = (subject, key) if signer is None else (signer[0].subject, signer[1])
    builder = x509.CertificateBuilder(
        issuer, subject, key.public_key(), x509.random_serial_number(), NOW, NOW + timedelta(9)
    )
    builder = builder.add_extension(x509.BasicConstraints(True, None), critical=True)
    # As cert-manager has them: openssl's strict mode asks for both.
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    above = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    for extension, is_critical in ((own, False), (above, False), (SIGNING, True)):
        builder = builder.add_extension(extension, critical=is_critical)
    return builder.sign(issuer_key, hashes.SHA256()), key


ROOT = authority("root")
UPPER = authority("upper", ROOT)
LOWER = authority("lower", UPPER)
STRANGER = authority("stranger")

# Files, ours or cert-manager's, with the authority that signs first; who is trusted; intermediates.
MIXED = [LOWER, ROOT, STRANGER, UPPER]
LAYOUTS = {
    "root": ({"ca_crt": [ROOT]}, [ROOT], []),
    "intermediate": ({"ca_crt": [UPPER, ROOT]}, [UPPER, ROOT], [UPPER]),
    "intermediate alone": ({"ca_crt": [UPPER]}, [UPPER], [UPPER]),
    "chain in any order": ({"ca_crt": MIXED}, MIXED, [LOWER, UPPER]),
    "cm, root": ({"tls_crt": [ROOT], "ca_crt": [ROOT]}, [ROOT], []),
    "cm, intermediate": ({"tls_crt": [UPPER], "ca_crt": [ROOT]}, [UPPER, ROOT], [UPPER]),
    "cm, chain": ({"tls_crt": [LOWER, UPPER], "ca_crt": [ROOT]}, [LOWER, ROOT], [LOWER, UPPER]),
    "cm, no ca.crt": ({"tls_crt": [UPPER, ROOT]}, [UPPER, ROOT], [UPPER]),
    "cm, no root": ({"tls_crt": [UPPER]}, [UPPER], [UPPER]),
}


@openssl.needed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_trusts_only_the_root_verifies_what_is_issued_below_it(tmp_path, layout):
    """Openssl is given one certificate and what the holder presents, and none of our help."""
    bundles, trusted, chain = LAYOUTS[layout]
    (name, [signer, *_]), *_ = bundles.items()
    contents = {file: [pair[0] for pair in pairs] for file, pairs in bundles.items()}
    write(tmp_path / "ca", **contents, **{name.replace("crt", "key"): signer[1]})
    made = issued(tmp_path / "ca", tmp_path / "out")
    assert made.authorities == tuple(pair[0] for pair in trusted)
    assert made.chain == tuple(pair[0] for pair in chain)
    assert files.load_credentials(tmp_path / "out").chain == made.chain
    assert files.load_certificates(tmp_path / "out" / "tls.crt")[1:] == made.chain
    (tmp_path / "root.crt").write_bytes(files.to_pem([ROOT[0]]))
    assert openssl.accepts(tmp_path / "out" / "tls.crt", tmp_path / "root.crt")


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


def test_cert_managers_key_formats_can_be_read(tmp_path):
    ca = write(tmp_path / "ca", tls_crt=[ROOT[0]], tls_key=ROOT[1], ca_crt=[ROOT[0]])
    form, plain = serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    sec1 = ROOT[1].private_bytes(serialization.Encoding.PEM, form, plain)
    assert b"BEGIN EC PRIVATE KEY" in sec1
    (ca / "tls.key").write_bytes(sec1)
    assert issued(ca, tmp_path / "out").authorities == (ROOT[0],)


def test_a_brokers_or_clusters_directory_is_not_taken_for_an_authoritys(tmp_path):
    made = Authority.create("test-ca", now=NOW).issue(identity.server_profile(), now=NOW)
    files.save_credentials(tmp_path / "broker", made)
    with pytest.raises(InvalidSettings, match=r"broker/tls\.crt is not a CA certificate"):
        Authority.load(tmp_path / "broker")


def test_cert_managers_key_that_others_can_read_is_refused(tmp_path):
    ca = write(tmp_path / "ca", tls_crt=[ROOT[0]], tls_key=ROOT[1], ca_crt=[ROOT[0]])
    (ca / "tls.key").chmod(0o644)
    with pytest.raises(InvalidSettings, match=r"mode 0644.*secret volume's defaultMode"):
        Authority.load(ca)


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SECOND, MINUTE = timedelta(seconds=1), timedelta(minutes=1)
AUTHORITY = Authority.create("test-ca", 40_000 * DAY, now=NOON - 1000 * DAY)
KEY = AUTHORITY.key.public_key()


def signed_for(lifetime, now=NOON, not_before=None):
    return AUTHORITY.sign(CLIENT, KEY, lifetime, now=now, not_before=not_before)


@pytest.mark.parametrize(
    "lifetime, start",
    [(SECOND, SECOND), (MINUTE, MINUTE), (5 * MINUTE, 5 * MINUTE), (DAY, 5 * MINUTE)],
    ids=str,
)
def test_a_short_life_is_backdated_by_no_more_than_itself(lifetime, start):
    certificate = signed_for(lifetime)
    assert certificate.not_valid_before_utc == NOON - start
    assert certificate.not_valid_after_utc == NOON + lifetime


@given(
    lifetime=st.integers(1, 3650 * 86400).map(lambda seconds: timedelta(seconds=seconds)),
    fraction=st.timedeltas(min_value=timedelta(0), max_value=SECOND),
    revoked=st.none() | st.timedeltas(min_value=timedelta(0), max_value=10 * MINUTE),
)
def test_a_certificate_tells_how_long_it_was_to_live_to_the_second(lifetime, fraction, revoked):
    now = NOON + fraction
    # A life of one second could end before it begins.
    not_before = None if revoked is None or lifetime == SECOND else now - revoked
    certificate = signed_for(lifetime, now, not_before)
    assert abs(pki_x509.lifetime_of(certificate) - lifetime) <= SECOND
    assert not_before is None or certificate.not_valid_before_utc >= not_before


@pytest.mark.parametrize("lifetime", [MINUTE, 9 * MINUTE, 11 * MINUTE, DAY, 365 * DAY], ids=str)
@pytest.mark.parametrize("revoked", [False, True], ids=["usual", "after a revocation"])
def test_it_is_renewed_when_20_to_25_percent_of_its_life_is_left(lifetime, revoked):
    seen = []
    for _ in range(200):
        certificate = signed_for(lifetime, not_before=NOON if revoked else None)
        left = certificate.not_valid_after_utc - pki_x509.renewal_time(certificate)
        seen.append(left / lifetime)
    assert 0.20 <= min(seen) < 0.21
    assert 0.24 < max(seen) <= 0.25


def test_the_moment_is_the_same_whenever_one_asks_and_another_for_each_certificate():
    one, other = signed_for(365 * DAY), signed_for(365 * DAY)
    assert pki_x509.renewal_time(one) == pki_x509.renewal_time(one)
    assert pki_x509.renewal_time(one) != pki_x509.renewal_time(other)


def test_a_certificate_cut_short_by_its_authoritys_end_counts_the_life_it_has():
    authority = Authority.create("test-ca", DAY, now=NOON)
    late = NOON + DAY - 10 * MINUTE
    certificate = authority.sign(identity.client_profile("a"), KEY, 365 * DAY, now=late)
    assert certificate.not_valid_after_utc == NOON + DAY
    assert pki_x509.lifetime_of(certificate) == 10 * MINUTE


@pytest.mark.parametrize("serial", range(1, 9))
def test_of_another_issuer_the_moment_is_right_where_lives_are_long(serial):
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "elsewhere")])
    builder = x509.CertificateBuilder(name, name, KEY, serial, NOON, NOON + 90 * DAY)
    certificate = builder.sign(AUTHORITY.key, hashes.SHA256())
    left = certificate.not_valid_after_utc - pki_x509.renewal_time(certificate)
    assert 0.1999 < left / (90 * DAY) < 0.2501


@pytest.mark.parametrize(
    "moment, start",
    [
        (NOON - 5 * MINUTE, NOON - 5 * MINUTE),
        (NOON - 5 * MINUTE + SECOND, NOON),
        (NOON, NOON),
        (NOON + SECOND / 4, NOON + SECOND),
        (NOON + MINUTE, NOON + MINUTE),
    ],
    ids=["long ago", "just now", "now", "later in this second", "by a clock ahead"],
)
def test_a_validity_begins_early_or_else_not_before_the_given_moment(moment, start):
    validity = pki_x509.validity_period(DAY, NOON + SECOND / 2, not_before=moment)
    assert validity == (start, NOON + DAY, start < NOON)


def test_a_validity_cannot_begin_after_its_end():
    with pytest.raises(InvalidSettings, match="after its end at"):
        pki_x509.validity_period(MINUTE, NOON, not_before=NOON + MINUTE)
