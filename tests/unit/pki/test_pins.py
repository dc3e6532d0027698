"""Pins, as openssl computes them."""

import hashlib
from datetime import UTC, datetime

import pytest

import openssl
from kubelend.core.errors import InvalidInput
from kubelend.pki import tokens
from kubelend.pki.authority import Authority
from kubelend.pki.keys import Algorithm

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


def test_a_pin_stays_when_the_certificate_is_renewed_with_its_key():
    authority = Authority.create("test-ca", now=NOW)
    renewed = authority.successor(now=NOW)
    (cross,) = renewed.chain
    assert (
        tokens.ca_pin(cross)
        == tokens.ca_pin(renewed.certificate)
        != tokens.ca_pin(authority.certificate)
    )


@pytest.mark.parametrize(
    "text", [f"sha256:{HEX}", f" sha256:{HEX}\n", f"SHA256:{HEX.upper()}"], ids=repr
)
def test_a_pasted_pin_is_understood(text):
    assert tokens.parse_ca_pin(text) == f"sha256:{HEX}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        HEX,
        "sha256:",
        f"sha256:{HEX[1:]}",
        f"sha256:{HEX}0",
        f"sha256:{HEX[1:]}g",
        f"sha256:{HEX[1:]}\u0661",
        f"sha1:{HEX}",
    ],
    ids=repr,
)
def test_what_is_no_pin_is_refused_with_where_to_get_one(text):
    with pytest.raises(InvalidInput, match="64 hex digits; copy it from"):
        tokens.parse_ca_pin(text)


def test_of_many_certificates_only_those_with_the_pinned_key_are_to_be_trusted():
    ours, theirs = (Authority.create("test-ca", now=NOW).certificate for _ in range(2))
    wanted = tokens.parse_ca_pin(tokens.ca_pin(ours))
    assert tokens.matches_pin(ours, wanted)
    assert not tokens.matches_pin(theirs, wanted)
    assert tokens.pinned_certificates([theirs, ours], wanted) == (ours,)
    assert tokens.pinned_certificates([theirs], wanted) == ()
