"""The short cuts for common amounts say what the whole road says, or leave it to that."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubelend.core import quantities
from kubelend.core.quantities import MAX_AMOUNT, Format, Quantity

PLACES = [0, 3, 9]
WHERE_THE_SUFFIX_CHANGES = [
    some * thousand**power * 1000**places + more
    for thousand in (1000, 1024)
    for power in range(6)
    for places in range(3)
    for some in (1, 2, 77, 999, 1000, 1023, 1024)
    for more in (-1, 0, 1)
]
"""Amounts that no dice would roll: next to a power of 1000 or 1024, in units of any size."""


@given(
    st.integers(0, 10**18).map(str),
    st.sampled_from(["", "m", "u", "k", "Ki", "Mi", "Gi", "Ti", "e3", ".5"]),
)
@pytest.mark.parametrize("places", [0, 3])
def test_the_short_cut_says_the_same_or_nothing(places, number, suffix):
    amount = quantities.parse_plain_amount(number + suffix, places)
    if amount is not None:
        exact = Quantity.parse(number + suffix)
        assert amount == exact.rounded_up(places) == exact.rounded_down(places)


@given(st.integers(-(10**6), MAX_AMOUNT))
@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("places", PLACES)
def test_the_short_cut_back_says_the_same_or_nothing(places, format, amount):
    text = quantities.format_plain_amount(amount, places, format)
    assert text in (None, str(Quantity.of(amount, places, format)))


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("places", PLACES)
def test_so_it_does_where_the_suffix_changes(places, format):
    for amount in WHERE_THE_SUFFIX_CHANGES:
        text = quantities.format_plain_amount(amount, places, format)
        assert text in (None, str(Quantity.of(amount, places, format))), amount


@pytest.mark.parametrize(
    "amount, places, format, text",
    [
        (0, 3, Format.DECIMAL_SI, "0"),
        (5950, 3, Format.DECIMAL_SI, "5950m"),
        (64000, 3, Format.DECIMAL_SI, "64"),
        (8, 0, Format.DECIMAL_SI, "8"),
        (77 << 30, 0, Format.BINARY_SI, "77Gi"),
    ],
)
def test_the_short_cut_back_is_taken_for_what_is_common(amount, places, format, text):
    assert quantities.format_plain_amount(amount, places, format) == text


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "+1", "1.5", "1e3", "9" * 16, "999999999999999Gi", " 1", "1 "]
)
def test_the_short_cut_leaves_the_rest_to_the_whole_road(text):
    assert quantities.parse_plain_amount(text, 0) is None
