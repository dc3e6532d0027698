"""Grants: whoever has the public keys can tell a real one from any other, without asking."""

import base64
import json

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

import make
import openssl
from kubelend.core.errors import InvalidGrant, InvalidSettings
from kubelend.pki.grants import GRANT_ISSUER, Grant, GrantKeys, verify_grant

NOW = int(make.T0.timestamp())
GRANT = Grant(
    iss=GRANT_ISSUER,
    jti="rsv-paris-1",
    sub="paris",
    aud="berlin",
    nbf=NOW,
    exp=NOW + 3600,
    resources={"cpu": "4", "memory": "8Gi"},
)


@pytest.fixture(scope="module")
def keys():
    return GrantKeys.create()


def part(value):
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def unpacked(text):
    return json.loads(base64.urlsafe_b64decode(text + "=="))


def test_grant_says_what_was_signed(keys):
    assert verify_grant(keys.sign(GRANT), keys.public.keys) == GRANT


def test_it_is_a_jws_as_others_read_it(keys):
    """Checked with the library itself, not with our reader: RFC 7515, RFC 8037."""
    header, claims, signature = keys.sign(GRANT).split(".")
    (key,) = keys.public.keys
    assert unpacked(header) == {"alg": "EdDSA", "kid": key.kid, "typ": "kubelend-grant+jws"}
    assert unpacked(claims)["sub"] == "paris"
    assert unpacked(claims)["exp"] == NOW + 3600
    assert len(base64.urlsafe_b64decode(signature + "==")) == 64
    assert (key.kty, key.crv, key.alg, key.use) == ("OKP", "Ed25519", "EdDSA", "sig")


@pytest.mark.parametrize(
    "change",
    [{"sub": "mallory"}, {"aud": "rome"}, {"exp": NOW + 10**9}, {"resources": {"cpu": "400"}}],
    ids=["requester", "provider", "end", "amount"],
)
def test_changed_grant_is_not_what_was_signed(keys, change):
    header, claims, signature = keys.sign(GRANT).split(".")
    forged = f"{header}.{part(unpacked(claims) | change)}.{signature}"
    with pytest.raises(InvalidGrant, match="invalid signature"):
        verify_grant(forged, keys.public.keys)


@pytest.mark.parametrize(
    "header",
    [
        {"alg": "none", "typ": "kubelend-grant+jws"},
        {"alg": "HS256", "typ": "kubelend-grant+jws"},
        {"alg": "EdDSA", "typ": "JWT"},
    ],
    ids=["no algorithm", "another algorithm", "another kind of text"],
)
def test_header_does_not_choose_how_it_is_checked(keys, header):
    _, claims, signature = keys.sign(GRANT).split(".")
    named = header | {"kid": keys.public.keys[0].kid}
    with pytest.raises(InvalidGrant, match="not signed by a key of this broker"):
        verify_grant(f"{part(named)}.{claims}.{signature}", keys.public.keys)


def test_grant_of_another_broker_is_refused(keys):
    with pytest.raises(InvalidGrant, match="not signed by a key of this broker"):
        verify_grant(GrantKeys.create().sign(GRANT), keys.public.keys)


@pytest.mark.parametrize(
    "text", ["", ".", "..", "a.b.c", "\u00e9.a.b", "e30.e30.e30", "x" * 20_000]
)
def test_garbage_is_no_grant(keys, text):
    with pytest.raises(InvalidGrant):
        verify_grant(text, keys.public.keys)


@pytest.mark.parametrize(
    "provider, at, expected",
    [
        ("rome", make.T0, "for provider 'berlin', not 'rome'"),
        ("berlin", make.T0 + make.HOUR, "has expired"),
        ("berlin", make.T0 - 2 * make.MINUTE, "is not valid yet"),
    ],
)
def test_real_grant_counts_only_there_and_then(provider, at, expected):
    with pytest.raises(InvalidGrant, match=expected):
        GRANT.check(provider=provider, now=at)


def test_clock_that_is_a_little_behind_is_forgiven():
    GRANT.check(provider="berlin", now=make.T0 - make.SECOND)
    GRANT.check(provider="berlin", now=make.T0 + make.HOUR - make.SECOND)


def test_key_is_made_once_for_its_owner_alone_and_found_again(tmp_path):
    path = tmp_path / "made" / "grants.key"
    text = GrantKeys.load_or_create(path).sign(GRANT)
    assert path.stat().st_mode & 0o777 == 0o600
    assert verify_grant(text, GrantKeys.load_or_create(path).public.keys) == GRANT


def test_new_key_before_the_old_one_signs_and_the_old_one_still_counts(tmp_path):
    old, new, both = tmp_path / "old", tmp_path / "new", tmp_path / "both"
    before = GrantKeys.load_or_create(old).sign(GRANT)
    GrantKeys.load_or_create(new)
    both.touch(0o600)
    both.write_bytes(new.read_bytes() + old.read_bytes())
    keys = GrantKeys.load(both)
    assert verify_grant(before, keys.public.keys) == GRANT
    after = keys.sign(GRANT)
    assert verify_grant(after, GrantKeys.load(new).public.keys) == GRANT
    with pytest.raises(InvalidGrant):
        verify_grant(after, GrantKeys.load(old).public.keys)


@openssl.needed
def test_key_of_openssl_is_taken(tmp_path):
    path = tmp_path / "grants.key"
    openssl.said("genpkey", "-algorithm", "ed25519", "-out", path)
    path.chmod(0o600)
    assert verify_grant(GrantKeys.load(path).sign(GRANT), GrantKeys.load(path).public.keys) == GRANT


@openssl.needed
def test_openssl_verifies_the_signature(keys, tmp_path):
    signed, _, signature = keys.sign(GRANT).rpartition(".")
    raw = base64.urlsafe_b64decode(keys.public.keys[0].x + "=")
    public = Ed25519PublicKey.from_public_bytes(raw).public_bytes(
        Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
    )
    files = {"text": signed.encode(), "key": public}
    files["signature"] = base64.urlsafe_b64decode(signature + "==")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    command = ["pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", tmp_path / "key"]
    said = openssl.said(*command, "-in", tmp_path / "text", "-sigfile", tmp_path / "signature")
    assert "Signature Verified Successfully" in said


def test_file_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "grants.key"
    GrantKeys.load_or_create(path)
    path.chmod(0o644)
    with pytest.raises(InvalidSettings, match="mode 0644"):
        GrantKeys.load(path)


@pytest.mark.parametrize("content", [b"no key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n"])
def test_file_without_a_key_is_refused(tmp_path, content):
    path = tmp_path / "grants.key"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(InvalidSettings, match="contains no"):
        GrantKeys.load(path)


def test_key_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "grants.key"
    path.touch(0o600)
    path.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        )
    )
    with pytest.raises(InvalidSettings, match="contains no Ed25519 key"):
        GrantKeys.load(path)


def test_thumbprint_is_that_of_rfc_8037():
    """Appendix A.3 of RFC 8037: the key of A.1 has this thumbprint."""
    secret = "nWGxne_9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A"
    raw = base64.urlsafe_b64decode(secret + "=")
    keys = GrantKeys([Ed25519PrivateKey.from_private_bytes(raw)])
    assert keys.public.keys[0].kid == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"
