"""Tokens, pins and grants: unguessable, verifiable by others, and never repeated by an error."""

import base64
import hashlib
import json
import re
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

import make
import openssl
from kubelend.core.errors import InvalidGrant, InvalidInput, InvalidSettings
from kubelend.core.grants import GRANT_ISSUER, Grant
from kubelend.pki import tokens
from kubelend.pki.authority import Authority
from kubelend.pki.grants import GrantKeys, verify_grant
from kubelend.pki.keys import Algorithm, to_pem

REFUSAL = (
    "not a valid token: expected kl1.ID.SECRET, with 10 and 32 letters or digits;"
    " copy the complete output of `kubelend create token`"
)

TOKEN = "kl1.abcdefghij.abcdefghijklmnopqrstuvwxyz234567"


def test_a_new_token_has_an_id_and_160_random_bits():
    text, name, digest = tokens.new_token()
    assert re.fullmatch(r"kl1\.[a-z2-7]{10}\.[a-z2-7]{32}", text)
    assert tokens.parse_token(text) == (name, text.rpartition(".")[2])
    assert tokens.parse_token(f"  {text}\n").id == name, "pasted with white space"
    assert digest == hashlib.sha256(text.rpartition(".")[2].encode()).hexdigest()


def test_no_two_tokens_share_anything():
    made = [tokens.new_token() for _ in range(200)]
    assert len({token.id for token in made}) == len({token.digest for token in made}) == 200
    # Each place of the secret takes many values: none of its bits is fixed.
    secrets = [tokens.parse_token(token.text).secret for token in made]
    assert all(len(set(letters)) > 20 for letters in zip(*secrets, strict=True))


@pytest.mark.parametrize(
    "text",
    [
        *("", "kl1", TOKEN[:-1], TOKEN + "a", TOKEN.upper(), TOKEN.replace("kl1", "kl2")),
        *(TOKEN.replace("abcdefghij.", "abcdefghi.", 1), TOKEN.replace("a", "1")),
        *(TOKEN.replace("kl1.", ""), TOKEN + "\x00", f"{TOKEN}\n{TOKEN}"),
        *(TOKEN + " " * 1000, TOKEN * 100_000),
    ],
    ids=lambda text: repr(text)[:70],
)
def test_what_is_no_token_is_refused(text):
    with pytest.raises(InvalidInput, match="not a valid token"):
        tokens.parse_token(text)


LETTERS = "abcdefghijklmnopqrstuvwxyz23456789"
NEARLY = st.builds(
    "kl{}.{}.{}{}".format,
    st.integers(0, 9),
    st.text(LETTERS, min_size=9, max_size=11),
    st.text(LETTERS, min_size=30, max_size=34),
    st.sampled_from(["", "\n"]),
)


@settings(max_examples=2 * settings().max_examples)
@given(st.text(max_size=60) | NEARLY)
@example(TOKEN)
@example("\ud800")
def test_any_text_is_a_token_or_refused_without_a_word_of_it(text):
    try:
        parts = tokens.parse_token(text)
    except InvalidInput as refusal:
        said = str(refusal)
    else:
        assert f"kl1.{parts.id}.{parts.secret}" == text.strip()
        return
    assert said == REFUSAL


def test_no_secret_is_shown_by_what_prints_a_token():
    made = tokens.new_token()
    parts = tokens.parse_token(made.text)
    shown = f"{made} {made!r} {parts} {parts!r} {[made, parts]}"
    assert made.id in shown
    assert parts.secret not in shown


# -- pins

NOW = datetime.now(UTC)
HEX = "0123456789abcdef" * 4


@openssl.needed
@pytest.mark.parametrize("algorithm", Algorithm)
def test_a_pin_is_the_hash_of_the_public_key_that_openssl_prints(tmp_path, algorithm):
    authority = Authority.create("test-ca", now=NOW, algorithm=algorithm)
    authority.save(tmp_path)
    public = openssl.said("x509", "-in", tmp_path / "ca.crt", "-noout", "-pubkey")
    openssl.said("pkey", "-pubin", "-outform", "der", "-out", tmp_path / "der", text=public)
    expected = hashlib.sha256((tmp_path / "der").read_bytes()).hexdigest()
    assert tokens.ca_pin(authority.certificate) == f"sha256:{expected}"


def test_the_digest_of_a_bundle_depends_on_its_keys_and_not_on_their_order():
    one, other = (Authority.create(name, now=NOW).certificate for name in ("one", "other"))
    assert tokens.bundle_digest([one, other]) == tokens.bundle_digest([other, one])
    assert tokens.bundle_digest([one]) != tokens.bundle_digest([one, other])


@pytest.mark.parametrize(
    "text", [f"sha256:{HEX}", f" sha256:{HEX}\n", f"SHA256:{HEX.upper()}"], ids=repr
)
def test_a_pasted_pin_is_understood(text):
    assert tokens.parse_ca_pin(text) == f"sha256:{HEX}"


@pytest.mark.parametrize(
    "text",
    ["", HEX, "sha256:", f"sha1:{HEX}"]
    + [f"sha256:{wrong}" for wrong in (HEX[1:], f"{HEX}0", f"{HEX[1:]}g", f"{HEX[1:]}\u0661")],
    ids=repr,
)
def test_what_is_no_pin_is_refused_with_where_to_get_one(text):
    with pytest.raises(InvalidInput, match="64 hex digits; copy it from"):
        tokens.parse_ca_pin(text)


def test_of_many_certificates_only_those_with_the_pinned_key_are_to_be_trusted():
    ours, theirs = (Authority.create("test-ca", now=NOW).certificate for _ in range(2))
    wanted = tokens.parse_ca_pin(tokens.ca_pin(ours))
    assert tokens.pinned_certificates([theirs, ours], wanted) == (ours,)
    assert tokens.pinned_certificates([theirs], wanted) == ()


# -- grants

T0_SECONDS = int(make.T0.timestamp())

GRANT = Grant(
    iss=GRANT_ISSUER,
    jti="rsv-paris-1",
    sub="paris",
    aud="berlin",
    nbf=T0_SECONDS,
    exp=T0_SECONDS + 3600,
    resources={"cpu": "4", "memory": "8Gi"},
)


@pytest.fixture(scope="module")
def keys():
    return GrantKeys.create()


def part(value):
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def unpacked(text):
    return json.loads(base64.urlsafe_b64decode(text + "=="))


def test_it_is_a_jws_as_others_read_it(keys):
    """Checked with the library itself, not with our reader: RFC 7515, RFC 8037."""
    header, claims, signature = keys.sign(GRANT).split(".")
    (key,) = keys.public.keys
    assert unpacked(header) == {"alg": "EdDSA", "kid": key.kid, "typ": "kubelend-grant+jws"}
    assert unpacked(claims)["sub"] == "paris"
    assert unpacked(claims)["exp"] == T0_SECONDS + 3600
    assert len(base64.urlsafe_b64decode(signature + "==")) == 64
    assert (key.kty, key.crv, key.alg, key.use) == ("OKP", "Ed25519", "EdDSA", "sig")


@pytest.mark.parametrize(
    "change",
    [
        {"sub": "mallory"},
        {"aud": "rome"},
        {"exp": T0_SECONDS + 10**9},
        {"resources": {"cpu": "400"}},
    ],
    ids=["requester", "provider", "end", "amount"],
)
def test_changed_grant_is_not_what_was_signed(keys, change):
    header, claims, signature = keys.sign(GRANT).split(".")
    forged = f"{header}.{part(unpacked(claims) | change)}.{signature}"
    with pytest.raises(InvalidGrant, match="invalid signature"):
        verify_grant(forged, keys.public.keys)


@pytest.mark.parametrize(
    "header",
    [{"alg": "none"}, {"alg": "HS256"}, {"typ": "JWT"}],
    ids=["no algorithm", "another algorithm", "another kind of text"],
)
def test_header_does_not_choose_how_it_is_checked(keys, header):
    good, claims, signature = keys.sign(GRANT).split(".")
    named = unpacked(good) | header
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
    for moment in (make.T0 - make.SECOND, make.T0 + make.HOUR - make.SECOND):
        GRANT.check(provider="berlin", now=moment)  # of a clock that is a little behind


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


OF_ANOTHER_KIND = to_pem(ec.generate_private_key(ec.SECP256R1()))
RIGHT = to_pem(Ed25519PrivateKey.generate())


@pytest.mark.parametrize(
    "content, mode, problem",
    [
        (RIGHT, 0o644, "mode 0644"),
        (b"no key", 0o600, "contains no"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA\n", 0o600, "contains no"),
        (OF_ANOTHER_KIND, 0o600, "contains no Ed25519 key"),
        (RIGHT + OF_ANOTHER_KIND, 0o600, "contains no Ed25519 key"),
        (RIGHT + b"-----BEGIN PRIVATE KEY-----\nAAAA\n", 0o600, "text after its last private key"),
    ],
    ids=[
        "others can read it",
        "no key",
        "corrupt",
        "another kind",
        "another kind beside it",
        "rest",
    ],
)
def test_file_with_anything_else_than_private_keys_of_this_kind_is_refused(
    tmp_path, content, mode, problem
):
    path = tmp_path / "grants.key"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(InvalidSettings, match=problem):
        GrantKeys.load(path)


def test_thumbprint_is_that_of_rfc_8037():
    """Appendix A.3 of RFC 8037: the key of A.1 has this thumbprint."""
    secret = "nWGxne_9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A"
    raw = base64.urlsafe_b64decode(secret + "=")
    keys = GrantKeys([Ed25519PrivateKey.from_private_bytes(raw)])
    assert keys.public.keys[0].kid == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"
