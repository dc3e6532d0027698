"""What the authority issues, with openssl as the second opinion on every certificate."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

import openssl
from certificates import Certificates
from kubelend.core.errors import InvalidIdentity, InvalidSettings
from kubelend.core.lifecycle import Role
from kubelend.pki import files, identity
from kubelend.pki.authority import AUTHORITY_LIFETIME, LEAF_LIFETIME, Authority
from kubelend.pki.keys import Algorithm, PrivateKey

NOW = datetime.now(UTC).replace(microsecond=0)
DAY = timedelta(days=1)
HOLDERS: dict[str, Callable[[], PrivateKey]] = {
    "p256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "p384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "rsa": lambda: rsa.generate_private_key(65537, 2048),
    "ed25519": ed25519.Ed25519PrivateKey.generate,
}


@pytest.fixture
def certificates(tmp_path):
    return Certificates(tmp_path)


@pytest.fixture(params=[Algorithm.P256, Algorithm.RSA], ids=str)
def algorithm(request):
    return request.param


@openssl.needed
@pytest.mark.parametrize(
    "purpose, profile",
    [
        ("sslserver", identity.server_profile()),
        ("sslclient", identity.client_profile("agent-cluster-1")),
        ("sslclient", identity.client_profile("alice", Role.ADMIN)),
    ],
    ids=["server", "cluster", "admin"],
)
def test_openssl_accepts_what_is_issued_for_its_purpose_only(tmp_path, algorithm, purpose, profile):
    authority = Authority.create("test-ca", now=NOW, algorithm=algorithm)
    files.save_credentials(tmp_path, authority.issue(profile, now=NOW, algorithm=algorithm))
    other = {"sslserver": "sslclient", "sslclient": "sslserver"}[purpose]
    verify = ("verify", "-x509_strict", "-CAfile", tmp_path / "ca.crt")

    accepted = openssl.run(*verify, "-purpose", purpose, tmp_path / "tls.crt")
    refused = openssl.run(*verify, "-purpose", other, tmp_path / "tls.crt")

    assert accepted.returncode == 0, accepted.stderr
    assert refused.returncode != 0
    assert "unsuitable certificate purpose" in refused.stderr


@openssl.needed
def test_openssl_refuses_what_another_authority_of_the_same_name_signed(certificates):
    stranger = certificates.stranger("agent-cluster-1")
    verdict = openssl.run("verify", "-CAfile", stranger / "ca.crt", stranger / "tls.crt")
    assert verdict.returncode != 0


@openssl.needed
def test_the_authority_is_marked_as_one_and_may_only_sign(tmp_path, algorithm):
    Authority.create("test-ca", now=NOW, algorithm=algorithm).save(tmp_path)
    text = openssl.described(tmp_path / "ca.crt")
    assert "X509v3 Basic Constraints: critical CA:TRUE" in text
    assert "X509v3 Key Usage: critical Certificate Sign, CRL Sign Signature Algorithm" in text
    assert "X509v3 Subject Key Identifier" in text


@openssl.needed
@pytest.mark.parametrize(
    "algorithm, key, usage",
    [
        (Algorithm.P256, "ASN1 OID: prime256v1", "Digital Signature X509v3"),
        (Algorithm.RSA, "Public-Key: (3072 bit)", "Digital Signature, Key Encipherment X509v3"),
    ],
    ids=["p256", "rsa"],
)
def test_a_leaf_has_the_usage_of_its_key_and_can_sign_nothing(certificates, algorithm, key, usage):
    directory = certificates.write("x", identity.client_profile("x"), algorithm=algorithm)
    text = openssl.described(directory / "tls.crt")
    assert key in text
    assert f"X509v3 Key Usage: critical {usage}" in text
    assert "X509v3 Basic Constraints: critical CA:FALSE" in text
    assert "X509v3 Extended Key Usage: TLS Web Client Authentication" in text
    assert "Signature Algorithm: ecdsa-with-SHA256" in text


@openssl.needed
def test_a_leaf_names_the_key_that_signed_it(certificates):
    leaf = openssl.described(certificates.cluster("agent-cluster-1") / "tls.crt")
    authority = openssl.described(certificates.cluster("agent-cluster-1") / "ca.crt")
    identifier = re.search(r"Subject Key Identifier: (\S+)", authority)
    assert identifier
    assert f"Authority Key Identifier: {identifier[1]}" in leaf


@openssl.needed
def test_the_broker_has_the_names_of_its_service_and_of_loopback(certificates):
    profile = identity.server_profile(
        namespace="lending", names=["broker.example.org", "192.0.2.7", "::1"]
    )
    text = openssl.described(certificates.write("broker", profile) / "tls.crt")
    assert "Subject: O=LiqoResourceBroker, CN=liqo-resource-broker " in text
    assert (
        "X509v3 Subject Alternative Name: DNS:liqo-resource-broker, "
        "DNS:liqo-resource-broker.lending, DNS:liqo-resource-broker.lending.svc, "
        "DNS:liqo-resource-broker.lending.svc.cluster.local, DNS:localhost, "
        "IP Address:127.0.0.1, DNS:broker.example.org, IP Address:192.0.2.7, "
        "IP Address:0:0:0:0:0:0:0:1 "
    ) in text
    assert "X509v3 Extended Key Usage: TLS Web Server Authentication" in text


@openssl.needed
@pytest.mark.parametrize(
    "role, organisation",
    [
        (Role.CLUSTER, "LiqoResourceAgent"),
        (Role.VIEWER, "kubelend:viewer"),
        (Role.ADMIN, "kubelend:admin"),
    ],
    ids=str,
)
def test_the_organisation_says_the_role(certificates, role, organisation):
    directory = certificates.write("x", identity.client_profile("someone", role))
    assert f"Subject: O={organisation}, CN=someone " in openssl.described(directory / "tls.crt")


@openssl.needed
@pytest.mark.parametrize("kind", ["p256", "p384", "rsa", "ed25519"])
def test_openssl_accepts_a_certificate_for_each_kind_of_key_a_holder_may_bring(tmp_path, kind):
    key = HOLDERS[kind]()
    authority = Authority.create("test-ca", now=NOW)
    signed = authority.sign(identity.client_profile("agent-cluster-1"), key.public_key(), now=NOW)
    files.save_credentials(tmp_path, files.Credentials(signed, key, authority.trusted))
    assert openssl.accepts(tmp_path / "tls.crt", tmp_path / "ca.crt")
    assert not openssl.accepts(tmp_path / "tls.crt", tmp_path / "ca.crt", purpose="sslserver")
    assert "CA:FALSE" in openssl.described(tmp_path / "tls.crt")


def test_validity_begins_five_minutes_early_and_lasts_as_asked():
    authority = Authority.create("test-ca", now=NOW)
    leaf = authority.issue(identity.client_profile("a"), now=NOW).certificate
    short = authority.issue(identity.client_profile("a"), timedelta(minutes=1), now=NOW).certificate
    assert authority.certificate.not_valid_before_utc == NOW - timedelta(minutes=5)
    assert authority.certificate.not_valid_after_utc == NOW + AUTHORITY_LIFETIME
    assert leaf.not_valid_before_utc == NOW - timedelta(minutes=5)
    assert leaf.not_valid_after_utc == NOW + LEAF_LIFETIME
    assert short.not_valid_after_utc == NOW + timedelta(minutes=1)


def test_a_leaf_does_not_outlive_its_authority():
    authority = Authority.create("test-ca", 10 * DAY, now=NOW)
    leaf = authority.issue(identity.client_profile("a"), 365 * DAY, now=NOW + 9 * DAY).certificate
    assert leaf.not_valid_after_utc == NOW + 10 * DAY


@pytest.mark.parametrize("ago", [timedelta(0), timedelta(seconds=1), timedelta(minutes=4)], ids=str)
def test_a_leaf_does_not_begin_before_the_moment_its_name_was_revoked(ago):
    authority = Authority.create("test-ca", now=NOW - DAY)
    key = authority.key.public_key()
    leaf = authority.sign(identity.client_profile("a"), key, now=NOW, not_before=NOW - ago)
    assert leaf.not_valid_before_utc == NOW
    assert leaf.not_valid_after_utc == NOW + LEAF_LIFETIME


def test_a_revocation_of_long_ago_changes_nothing():
    authority = Authority.create("test-ca", now=NOW - DAY)
    key = authority.key.public_key()
    leaf = authority.sign(identity.client_profile("a"), key, now=NOW, not_before=NOW - DAY)
    assert leaf.not_valid_before_utc == NOW - timedelta(minutes=5)


def test_an_authority_that_has_ended_issues_nothing():
    authority = Authority.create("test-ca", 10 * DAY, now=NOW)
    with pytest.raises(InvalidSettings, match=r"expired at .*`kubelend ca init`"):
        authority.issue(identity.client_profile("a"), now=NOW + 10 * DAY)


@pytest.mark.parametrize("lifetime", [timedelta(0), -DAY, timedelta.max], ids=str)
def test_impossible_lifetimes_are_refused(lifetime):
    with pytest.raises(InvalidSettings, match="certificate lifetime"):
        Authority.create("test-ca", lifetime, now=NOW)


def test_serial_numbers_are_random_and_fill_twenty_bytes():
    authority = Authority.create("test-ca", now=NOW)
    issued = [authority.issue(identity.client_profile("a"), now=NOW).certificate for _ in range(50)]
    serials = {certificate.serial_number for certificate in issued}
    assert len(serials) == 50
    assert 150 < max(serials).bit_length() <= 159


def test_an_authority_comes_back_from_its_directory_and_issues_the_same(tmp_path, algorithm):
    made = Authority.create("test-ca", now=NOW, algorithm=algorithm)
    made.save(tmp_path)
    loaded = Authority.load(tmp_path)
    issued = loaded.issue(identity.client_profile("agent-cluster-1"), now=NOW)
    issued.certificate.verify_directly_issued_by(made.certificate)
    assert loaded.certificate == made.certificate


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


def test_a_leaf_cannot_be_taken_for_an_authority(tmp_path):
    leaf = Authority.create("test-ca", now=NOW).issue(identity.client_profile("a"), now=NOW)
    files.save_authority(tmp_path, [leaf.certificate], leaf.key)
    with pytest.raises(InvalidSettings, match="is not a CA certificate"):
        Authority.load(tmp_path)


def test_a_holder_that_keeps_its_key_gets_a_certificate_for_it():
    authority = Authority.create("test-ca", now=NOW)
    holder = authority.issue(identity.client_profile("a"), now=NOW)
    renewed = authority.sign(identity.client_profile("a"), holder.key.public_key(), now=NOW)
    assert files.is_certificate_of(renewed, holder.key)
    assert renewed.serial_number != holder.certificate.serial_number


@pytest.mark.parametrize(
    "name",
    [
        "",
        "  ",
        " a",
        "a ",
        "a" * 65,
        "é" * 33,
        "a\nb",
        "a\x00b",
        "a\u202eb",
        "liqo-resource-broker",
    ],
    ids=repr,
)
def test_names_that_the_broker_would_refuse_are_not_issued(name):
    with pytest.raises(InvalidIdentity):
        identity.client_profile(name)


@pytest.mark.parametrize("name", ["a" * 64, "No DNS_label!", "Zürich/1", "é" * 32], ids=repr)
def test_any_other_text_names_a_cluster(name):
    subject = identity.client_profile(name).subject
    assert [name] == [
        each.value for each in subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    ]


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
