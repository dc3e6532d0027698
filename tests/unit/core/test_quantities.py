"""Quantities read and print as Kubernetes does; the tables were checked against its own code."""

import doctest
import re
import string
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubelend.core import errors, quantities
from kubelend.core.quantities import MAX_AMOUNT, Format, Quantity

DECIMAL, BINARY, EXPONENT = Format.DECIMAL_SI, Format.BINARY_SI, Format.DECIMAL_EXPONENT

SUFFIXES = {
    **{
        s: Fraction(1000) ** i
        for s, i in zip("numkMGTPE", [-3, -2, -1, 1, 2, 3, 4, 5, 6], strict=True)
    },
    **{f"{s}i": Fraction(1024) ** i for i, s in enumerate("KMGTPE", start=1)},
}


def exact(quantity):
    return quantity.coefficient * Fraction(10) ** quantity.exponent


def by_hand(text):
    """What a text is worth, read in the most naive way: an oracle that shares nothing with the code."""
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if text.endswith(suffix):
            return Fraction(text.removesuffix(suffix).rstrip(".")) * SUFFIXES[suffix]
    number, _, exponent = text.lower().partition("e")
    return Fraction(number.rstrip(".")) * Fraction(10) ** int(exponent or 0)


def well_formed(text):
    """Whether Kubernetes' own grammar has this text, exponents within our limit."""
    match = re.fullmatch(
        r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?([0-9]+))?", text
    )
    return match is not None and int(match[3] or 0) <= 64


@pytest.mark.parametrize(
    "text, value, format",
    [
        ("0", 0, DECIMAL),
        ("0n", 0, DECIMAL),
        ("0k", 0, DECIMAL),
        ("0Ki", 0, BINARY),
        ("0e5", 0, EXPONENT),
        ("-0", 0, DECIMAL),
        ("1Ki", 1024, BINARY),
        ("7Mi", 7 * 1024**2, BINARY),
        ("6Gi", 6 * 1024**3, BINARY),
        ("5Ti", 5 * 1024**4, BINARY),
        ("4Pi", 4 * 1024**5, BINARY),
        ("3Ei", 3 * 1024**6, BINARY),
        ("5n", Fraction(5, 10**9), DECIMAL),
        ("4u", Fraction(4, 10**6), DECIMAL),
        ("3m", Fraction(3, 1000), DECIMAL),
        ("9", 9, DECIMAL),
        ("50k", 50_000, DECIMAL),
        ("7M", 7 * 10**6, DECIMAL),
        ("6G", 6 * 10**9, DECIMAL),
        ("300T", 3 * 10**14, DECIMAL),
        ("2P", 2 * 10**15, DECIMAL),
        ("1E", 10**18, DECIMAL),
        ("1E3", 1000, EXPONENT),
        ("1E-3", Fraction(1, 1000), EXPONENT),
        ("1.3E+6", 1_300_000, EXPONENT),
        ("0.5e-2", Fraction(5, 1000), EXPONENT),
        ("1e03", 1000, EXPONENT),
        ("100.035k", 100_035, DECIMAL),
        ("0.00050k", Fraction(1, 2), DECIMAL),
        ("1.01E", 101 * 10**16, DECIMAL),
        ("100.035Ki", Fraction(10243584, 100), BINARY),
        ("0.05Gi", Fraction(536870912, 10), BINARY),
        ("0.9n", Fraction(9, 10**10), DECIMAL),
        (".001", Fraction(1, 1000), DECIMAL),
        ("1.", 1, DECIMAL),
        ("1.G", 10**9, DECIMAL),
        ("+5", 5, DECIMAL),
        ("-1.5Ki", -1536, BINARY),
        ("9223372036854775807", MAX_AMOUNT, DECIMAL),
        ("-9223372036854775807", -MAX_AMOUNT, DECIMAL),
    ],
)
def test_every_form_has_its_exact_value_and_its_format(text, value, format):
    quantity = Quantity.parse(text)
    assert exact(quantity) == value
    assert quantity.format is format


@pytest.mark.parametrize(
    "text, canonical",
    [
        ("00", "0"),
        ("-0", "0"),
        ("0Mi", "0"),
        ("+5", "5"),
        ("001", "1"),
        ("1.", "1"),
        ("1.5", "1500m"),
        ("1.500", "1500m"),
        ("-1.5", "-1500m"),
        ("9.01", "9010m"),
        ("1000m", "1"),
        ("1080000000n", "1080m"),
        ("1000", "1k"),
        ("1000M", "1G"),
        ("0.001T", "1G"),
        ("1234567M", "1234567M"),
        ("10.035M", "10035k"),
        ("1000P", "1E"),
        ("1.5Gi", "1536Mi"),
        ("1Ki", "1Ki"),
        ("-1Ki", "-1Ki"),
        ("1024Mi", "1Gi"),
        ("307200Ki", "300Mi"),
        ("1025024Mi", "1001Gi"),
        ("1024Pi", "1Ei"),
        ("0.5Ki", "512"),
        ("-0.5Ki", "-512"),
        ("1.5Ki", "1536"),
        ("1025.5Ki", "1050112"),
        (".001Ki", "1024m"),
        ("100.035Ki", "102435840m"),
        (".000001Ki", "1024u"),
        ("7.9Ei", "9108079886394091110400m"),
        ("12e6", "12e6"),
        ("1e3", "1e3"),
        ("1E+3", "1e3"),
        ("1e4", "10e3"),
        ("1e1", "10"),
        ("5e0", "5"),
        (".001e12", "1e9"),
        ("0.001e0", "1e-3"),
        ("1000e-12", "1e-9"),
        ("80e-3", "80e-3"),
        ("9223372036854775807", "9223372036854775807"),
    ],
)
def test_prints_the_canonical_text_of_kubernetes(text, canonical):
    assert str(Quantity.parse(text)) == canonical


@pytest.mark.parametrize(
    "text, canonical",
    [
        ("3.001n", "4n"),
        ("-3.001n", "-4n"),
        ("0.0000000001", "1n"),
        ("0.00000012345", "124n"),
        ("1.1E-9", "2e-9"),
        ("0.000000000001Ki", "2n"),
        ("2047.9999999999999", "2048"),
        ("1.99999999999999999Ki", "2Ki"),
        ("0.9999999999", "1"),
    ],
)
def test_finer_than_nano_stays_exact_and_prints_rounded_away_from_zero(text, canonical):
    quantity = Quantity.parse(text)
    assert exact(quantity) == by_hand(text)
    assert str(quantity) == canonical


@pytest.mark.parametrize(
    "amount, places, format, canonical",
    [
        (0, 3, DECIMAL, "0"),
        (0, 0, BINARY, "0"),
        (5950, 3, DECIMAL, "5950m"),
        (8000, 3, DECIMAL, "8"),
        (-50, 3, DECIMAL, "-50m"),
        (7779729408, 0, BINARY, "7597392Ki"),
        (1023, 0, BINARY, "1023"),
        (1025, 0, BINARY, "1025"),
        (-2048, 0, BINARY, "-2Ki"),
        (2**70, 0, BINARY, "1024Ei"),
        (10**21, 0, DECIMAL, "1e21"),
        (1_000_000, 3, EXPONENT, "1e3"),
    ],
)
def test_amounts_print_canonically(amount, places, format, canonical):
    assert str(Quantity.of(amount, places, format)) == canonical


@pytest.mark.parametrize(
    "text, places, down, up",
    [
        ("500m", 3, 500, 500),
        ("0.1", 3, 100, 100),
        ("1n", 3, 0, 1),
        ("1500u", 3, 1, 2),
        ("9.01", 0, 9, 10),
        ("-9.01", 0, -10, -9),
        ("0.05Gi", 0, 53687091, 53687092),
        ("2k", 3, 2_000_000, 2_000_000),
        ("1e-64", 0, 0, 1),
        ("1234", -3, 1, 2),
    ],
)
def test_rounding_goes_up_or_down_and_never_to_the_nearest(text, places, down, up):
    quantity = Quantity.parse(text)
    assert (quantity.rounded_down(places), quantity.rounded_up(places)) == (down, up)


@pytest.mark.parametrize(
    "one, other", [("1", "1000m"), ("1Gi", "1024Mi"), ("1e3", "10e2"), ("0", "0m")]
)
def test_equal_values_of_one_format_are_equal(one, other):
    assert Quantity.parse(one) == Quantity.parse(other)
    assert hash(Quantity.parse(one)) == hash(Quantity.parse(other))


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "is not a quantity"),
        (" ", "is not a quantity"),
        (" 1", "is not a quantity"),
        ("1 ", "unknown suffix ' '"),
        ("1\n", r"unknown suffix '\n'"),
        ("1\x00", r"unknown suffix '\x00'"),
        (".", "is not a quantity"),
        ("-", "is not a quantity"),
        ("Ki", "is not a quantity"),
        ("e3", "is not a quantity"),
        ("--1", "is not a quantity"),
        ("1.1.M", "is not a quantity"),
        ("1+1.0M", "is not a quantity"),
        ("1e1.5", "is not a quantity"),
        ("-3.01e-", "is not a quantity"),
        ("0x10", "is not a quantity"),
        ("1_000", "is not a quantity"),
        ("1,5", "is not a quantity"),
        ("NaN", "is not a quantity"),
        ("inf", "is not a quantity"),
        ("-Infinity", "is not a quantity"),
        ("١٢", "is not a quantity"),
        ("1²", "unknown suffix '²'"),
        ("1e٣", "unknown suffix 'e٣'"),
        ("1e", "unknown suffix 'e'"),
        ("1K", "unknown suffix 'K'"),
        ("1i", "unknown suffix 'i'"),
        ("0.1mi", "unknown suffix 'mi'"),
        ("1GB", "unknown suffix 'GB'"),
        ("4 GiB", "unknown suffix ' GiB'"),
        ("aoeu", "is not a quantity"),
        ("9223372036854775808", "over 9223372036854775807"),
        ("-9223372036854775808", "over 9223372036854775807"),
        ("9223372036854775807.000000000001", "over 9223372036854775807"),
        ("9223372036854775807n9", "is not a quantity"),
        ("9223372036854775807Ki", "over 9223372036854775807"),
        ("8Ei", "over 9223372036854775807"),
        ("10E", "over 9223372036854775807"),
        ("1e19", "over 9223372036854775807"),
        ("1e64", "over 9223372036854775807"),
        ("1e65", "exponent is beyond 64"),
        ("1e-65", "exponent is beyond 64"),
        ("1e1000000000", "exponent is beyond 64"),
        ("1e-1000000000", "exponent is beyond 64"),
        ("0e1000000000", "exponent is beyond 64"),
        ("1e" + "9" * 62, "exponent is beyond 64"),
        ("1" * 65, "has 65 characters, more than 64"),
        ("0." + "0" * 63, "has 65 characters, more than 64"),
    ],
)
def test_anything_else_is_refused_with_what_is_wrong_and_an_example(text, problem):
    with pytest.raises(errors.InvalidQuantity) as caught:
        Quantity.parse(text)
    assert problem in caught.value.message
    assert "for example 1.5, 500m or 256Mi" in caught.value.hint


@pytest.mark.parametrize(
    "text", ["1" * 2**20, "." * 2**20, "1e" + "1" * 2**20, "1" + "i" * 2**20, "\N{SNOWMAN}" * 2**20]
)
@pytest.mark.timeout(1)
def test_a_megabyte_is_refused_at_once_in_one_short_line(text):
    with pytest.raises(errors.InvalidQuantity, match="more than 64") as caught:
        Quantity.parse(text)
    assert len(str(caught.value)) < 250


@pytest.mark.timeout(1)
def test_the_costliest_texts_that_are_short_enough_cost_little():
    for text in ["1e" + "9" * 62, "9" * 61 + "e64", "1" + "." * 63] * 1000:
        with pytest.raises(errors.InvalidQuantity):
            Quantity.parse(text)


def test_the_hint_names_every_suffix():
    with pytest.raises(errors.InvalidQuantity) as caught:
        Quantity.parse("1K")
    assert set(SUFFIXES) <= set(caught.value.hint.replace(",", "").split())


digits = st.text(string.digits, min_size=1, max_size=12)
numbers = st.one_of(
    digits,
    digits.map("{}.".format),
    digits.map(".{}".format),
    st.tuples(digits, digits).map(".".join),
)
exponents = st.builds(
    "{}{}{}".format, st.sampled_from("eE"), st.sampled_from(["", "+", "-"]), st.integers(0, 20)
)
texts = st.builds(
    "{}{}{}".format,
    st.sampled_from(["", "+", "-"]),
    numbers,
    st.one_of(st.just(""), st.sampled_from(sorted(SUFFIXES)), exponents),
)


@given(texts)
def test_agrees_with_the_naive_reading_of_any_well_formed_text(text):
    value = by_hand(text)
    if abs(value) > MAX_AMOUNT:
        with pytest.raises(errors.InvalidQuantity, match="out of range"):
            Quantity.parse(text)
    else:
        assert exact(Quantity.parse(text)) == value


@given(texts, st.integers(-3, 12))
def test_the_exact_value_lies_between_its_roundings(text, places):
    if abs(by_hand(text)) > MAX_AMOUNT:
        return
    quantity, unit = Quantity.parse(text), Fraction(1, 10) ** places
    down, up = quantity.rounded_down(places), quantity.rounded_up(places)
    assert down * unit <= exact(quantity) <= up * unit
    assert up - down == (0 if exact(quantity) % unit == 0 else 1)


@given(st.integers(-MAX_AMOUNT * 10**9, MAX_AMOUNT * 10**9), st.sampled_from(Format))
def test_printing_and_parsing_give_the_same_value(nanos, format):
    quantity = Quantity.of(nanos, 9, format)
    again = Quantity.parse(str(quantity))
    assert exact(again) == exact(quantity) == Fraction(nanos, 10**9)
    # As in Kubernetes, 5000 bytes are printed as "5000", which is no binary text when it is read.
    if again.format is format:
        assert str(again) == str(quantity)


@given(st.integers(1, MAX_AMOUNT), st.integers(0, 9), st.sampled_from(Format))
def test_the_canonical_text_has_no_fraction_and_the_largest_suffix(amount, places, format):
    text = str(Quantity.of(amount, places, format))
    number = text.rstrip("numkKMGTPEi").partition("e")[0]
    in_binary = format is BINARY and amount % 10**places == 0 and amount >= 1024 * 10**places
    assert number.isdecimal()
    assert int(number) % (1024 if in_binary else 1000) != 0
    assert str(Quantity.of(-amount, places, format)) == f"-{text}"


@given(st.text("0123456789.+-eEKMGimunk \N{MICRO SIGN}\N{ARABIC-INDIC DIGIT ONE}", max_size=8))
def test_any_text_is_worth_what_it_says_or_is_refused(text):
    try:
        quantity = Quantity.parse(text)
    except errors.InvalidQuantity:
        assert not well_formed(text) or abs(by_hand(text)) > MAX_AMOUNT
    else:
        assert exact(quantity) == by_hand(text)


def test_the_examples_in_the_documentation_hold():
    result = doctest.testmod(quantities)
    assert result.failed == 0 < result.attempted
