"""When a certificate is renewed: computed from the certificate alone, at the right part of its life."""

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from hypothesis import given, settings
from hypothesis import strategies as st

from kubelend.core.errors import InvalidSettings
from kubelend.pki import identity
from kubelend.pki import x509 as pki_x509
from kubelend.pki.authority import Authority

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SECOND, MINUTE, DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(days=1)
AUTHORITY = Authority.create("test-ca", 40_000 * DAY, now=NOW - 1000 * DAY)
KEY = AUTHORITY.key.public_key()


def issued(lifetime, now=NOW, not_before=None):
    return AUTHORITY.sign(
        identity.client_profile("a"), KEY, lifetime, now=now, not_before=not_before
    )


@pytest.mark.parametrize(
    "lifetime, start",
    [(SECOND, SECOND), (MINUTE, MINUTE), (5 * MINUTE, 5 * MINUTE), (DAY, 5 * MINUTE)],
    ids=str,
)
def test_a_short_life_is_backdated_by_no_more_than_itself(lifetime, start):
    certificate = issued(lifetime)
    assert certificate.not_valid_before_utc == NOW - start
    assert certificate.not_valid_after_utc == NOW + lifetime


@settings(max_examples=200)
@given(
    lifetime=st.integers(1, 3650 * 86400).map(lambda seconds: timedelta(seconds=seconds)),
    fraction=st.timedeltas(min_value=timedelta(0), max_value=SECOND),
    revoked=st.none() | st.timedeltas(min_value=timedelta(0), max_value=10 * MINUTE),
)
def test_a_certificate_tells_how_long_it_was_to_live_to_the_second(lifetime, fraction, revoked):
    now = NOW + fraction
    # A life of one second could end before it begins.
    not_before = None if revoked is None or lifetime == SECOND else now - revoked
    certificate = issued(lifetime, now, not_before)
    assert abs(pki_x509.lifetime_of(certificate) - lifetime) <= SECOND
    assert not_before is None or certificate.not_valid_before_utc >= not_before


@pytest.mark.parametrize("lifetime", [MINUTE, 9 * MINUTE, 11 * MINUTE, DAY, 365 * DAY], ids=str)
@pytest.mark.parametrize("revoked", [False, True], ids=["usual", "after a revocation"])
def test_it_is_renewed_when_20_to_25_percent_of_its_life_is_left(lifetime, revoked):
    seen = []
    for _ in range(200):
        certificate = issued(lifetime, not_before=NOW if revoked else None)
        left = certificate.not_valid_after_utc - pki_x509.renewal_time(certificate)
        seen.append(left / lifetime)
    assert 0.20 <= min(seen) < 0.21
    assert 0.24 < max(seen) <= 0.25


def test_the_moment_is_the_same_whenever_one_asks_and_another_for_each_certificate():
    one, other = issued(365 * DAY), issued(365 * DAY)
    assert pki_x509.renewal_time(one) == pki_x509.renewal_time(one)
    assert pki_x509.renewal_time(one) != pki_x509.renewal_time(other)


def test_a_certificate_cut_short_by_its_authoritys_end_counts_the_life_it_has():
    authority = Authority.create("test-ca", DAY, now=NOW)
    late = NOW + DAY - 10 * MINUTE
    certificate = authority.sign(identity.client_profile("a"), KEY, 365 * DAY, now=late)
    assert pki_x509.lifetime_of(certificate) == 10 * MINUTE


@pytest.mark.parametrize("serial", range(1, 9))
def test_of_another_issuer_the_moment_is_right_where_lives_are_long(serial):
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "elsewhere")])
    certificate = (x509.CertificateBuilder(name, name, KEY, serial, NOW, NOW + 90 * DAY)).sign(
        AUTHORITY.key, hashes.SHA256()
    )
    left = certificate.not_valid_after_utc - pki_x509.renewal_time(certificate)
    assert 0.1999 < left / (90 * DAY) < 0.2501


@pytest.mark.parametrize(
    "moment, start",
    [
        (NOW - 5 * MINUTE, NOW - 5 * MINUTE),
        (NOW - 5 * MINUTE + SECOND, NOW),
        (NOW, NOW),
        (NOW + SECOND / 4, NOW + SECOND),
        (NOW + MINUTE, NOW + MINUTE),
    ],
    ids=["long ago", "just now", "now", "later in this second", "by a clock ahead"],
)
def test_a_validity_begins_early_or_else_not_before_the_given_moment(moment, start):
    validity = pki_x509.validity_period(DAY, NOW + SECOND / 2, not_before=moment)
    assert validity == (start, NOW + DAY, start < NOW)


def test_a_validity_cannot_begin_after_its_end():
    with pytest.raises(InvalidSettings, match="after its end at"):
        pki_x509.validity_period(MINUTE, NOW, not_before=NOW + MINUTE)


def test_less_than_a_second_is_no_life():
    with pytest.raises(InvalidSettings, match=r"lifetime 0:00:00\.9.*; use 1s or more"):
        pki_x509.validity_period(timedelta(milliseconds=900), NOW)
