"""Kubernetes quantities and Go durations: exact parsing and canonical texts."""

import doctest
import math
import re
import string
from datetime import timedelta
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kubelend.core import durations, errors, quantities
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


def rows(**groups):
    """Pairs of a text and the name of its group."""
    return [(text, name) for name, texts in groups.items() for text in texts.split()]


@pytest.mark.parametrize(
    "text, format",
    rows(
        DECIMAL_SI="0 0n 0k -0 5n 4u 3m 9 50k 7M 6G 300T 2P 1E 100.035k 0.00050k 1.01E 0.9n .001 1. 1.G"
        " +5 9223372036854775807 -9223372036854775807",
        BINARY_SI="0Ki 1Ki 7Mi 6Gi 5Ti 4Pi 3Ei 100.035Ki 0.05Gi -1.5Ki",
        DECIMAL_EXPONENT="0e5 1E3 1E-3 1.3E+6 0.5e-2 1e03",
    ),
)
def test_every_form_has_its_exact_value_and_its_format(text, format):
    quantity = Quantity.parse(text)
    assert exact(quantity) == by_hand(text)
    assert quantity.format is Format[format]


CANONICAL = """
    00=0 -0=0 0Mi=0 +5=5 001=1 1.=1 1.5=1500m 1.500=1500m -1.5=-1500m 9.01=9010m 1000m=1
    1080000000n=1080m 1000=1k 1000M=1G 0.001T=1G 1234567M=1234567M 10.035M=10035k 1000P=1E
    1.5Gi=1536Mi 1Ki=1Ki -1Ki=-1Ki 1024Mi=1Gi 307200Ki=300Mi 1025024Mi=1001Gi 1024Pi=1Ei 0.5Ki=512
    -0.5Ki=-512 1.5Ki=1536 1025.5Ki=1050112 .001Ki=1024m 100.035Ki=102435840m .000001Ki=1024u
    7.9Ei=9108079886394091110400m 12e6=12e6 1e3=1e3 1E+3=1e3 1e4=10e3 1e1=10 5e0=5 .001e12=1e9
    0.001e0=1e-3 1000e-12=1e-9 80e-3=80e-3 9223372036854775807=9223372036854775807
"""
ROUNDED_TO_NANO = """
    3.001n=4n -3.001n=-4n 0.0000000001=1n 0.00000012345=124n 1.1E-9=2e-9 0.000000000001Ki=2n
    2047.9999999999999=2048 1.99999999999999999Ki=2Ki 0.9999999999=1
"""


@pytest.mark.parametrize("row", [*CANONICAL.split(), *ROUNDED_TO_NANO.split()])
def test_prints_the_canonical_text_of_kubernetes(row):
    text, _, canonical = row.partition("=")
    assert exact(Quantity.parse(text)) == by_hand(text)
    assert str(Quantity.parse(text)) == canonical


MOST = str(MAX_AMOUNT)
NO_NUMBERS = ". - Ki e3 --1 1.1.M 1+1.0M 1e1.5 -3.01e- 0x10 1_000 1,5 NaN inf -Infinity ١٢ aoeu"
NO_QUANTITIES = {
    "is not a quantity": ["", " ", " 1", f"{MOST}n9", *NO_NUMBERS.split()],
    "unknown suffix": [
        *["1 ", "1\n", "1\x00", "1²", "1e٣", "1e", "1K", "1i", "0.1mi", "1GB", "4 GiB"]
    ],
    f"over {MOST}": [
        *[str(MAX_AMOUNT + 1), str(-MAX_AMOUNT - 1), f"{MOST}.000000000001", f"{MOST}Ki"],
        *["8Ei", "10E", "1e19", "1e64"],
    ],
    "exponent is beyond 64": [
        *["1e65", "1e-65", "1e1000000000", "1e-1000000000", "0e1000000000", "1e" + "9" * 62]
    ],
    "has 65 characters, more than 64": ["1" * 65, "0." + "0" * 63],
}


@pytest.mark.parametrize(
    "text, problem", [(text, problem) for problem, texts in NO_QUANTITIES.items() for text in texts]
)
def test_anything_else_is_refused_with_what_is_wrong_and_an_example(text, problem):
    with pytest.raises(errors.InvalidQuantity) as caught:
        Quantity.parse(text)
    assert problem in caught.value.message
    if problem == "unknown suffix":
        assert repr(text.lstrip("0123456789.")) in caught.value.message
    assert "for example 1.5, 500m or 256Mi" in caught.value.hint
    assert set(SUFFIXES) <= set(caught.value.hint.replace(",", "").split())


@pytest.mark.parametrize("parse", [Quantity.parse, durations.parse_duration])
@pytest.mark.parametrize(
    "text",
    ["1" * 2**20, "." * 2**20, "1e" + "1" * 2**20, "1h" * 2**19, "\N{SNOWMAN}" * 2**20],
    ids=lambda text: text[:2],
)
@pytest.mark.timeout(1)
def test_a_megabyte_is_refused_at_once_in_one_short_line(parse, text):
    with pytest.raises(
        (errors.InvalidQuantity, errors.InvalidDuration), match="more than 64"
    ) as no:
        parse(text)
    assert len(str(no.value)) < 250


@pytest.mark.timeout(1)
def test_the_costliest_texts_that_are_short_enough_cost_little():
    for text in ["1e" + "9" * 62, "9" * 61 + "e64", "1" + "." * 63] * 1000:
        with pytest.raises(errors.InvalidQuantity):
            Quantity.parse(text)
    for text in ["1h" * 31 + "1x", "1m" * 31 + "1", "1." * 32, "9" * 64] * 1000:
        with pytest.raises(errors.InvalidDuration):
            durations.parse_duration(text)


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
@example(0)
@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("places", PLACES)
def test_the_short_cut_back_says_the_same_or_nothing(places, format, amount):
    for one in (amount, *(WHERE_THE_SUFFIX_CHANGES if amount == 0 else ())):
        text = quantities.format_plain_amount(one, places, format)
        assert text in (None, str(Quantity.of(one, places, format))), one


@pytest.mark.parametrize(
    "amount, places, format, text",
    [
        (0, 3, DECIMAL, "0"),
        (5950, 3, DECIMAL, "5950m"),
        (64000, 3, DECIMAL, "64"),
        (8, 0, DECIMAL, "8"),
        (77 << 30, 0, BINARY, "77Gi"),
    ],
)
def test_the_short_cut_back_is_taken_for_what_is_common(amount, places, format, text):
    assert quantities.format_plain_amount(amount, places, format) == text


MICROSECOND = timedelta(microseconds=1)
MICRO, MU = "\u00b5", "\u03bc"
UNITS = {
    "h": Fraction(3600),
    "m": Fraction(60),
    "s": Fraction(1),
    "ms": Fraction(1, 10**3),
    "us": Fraction(1, 10**6),
    f"{MICRO}s": Fraction(1, 10**6),
    f"{MU}s": Fraction(1, 10**6),
    "ns": Fraction(1, 10**9),
}


@pytest.mark.parametrize(
    "text, seconds",
    [
        *((text, 0) for text in ("0", "-0", "+0", "0s", "0h0m")),
        *(("1h", 3600), ("1h30m", 5400), ("90s", 90), ("500ms", 0.5), ("1.5h", 5400), (".5s", 0.5)),
        *(("1.s", 1), ("+5s", 5), ("-1.5m", -90), ("1h1h", 7200), ("1s1h", 3601)),
        ("1m1ms", 60.001),
        *((f"12{unit}", 12e-6) for unit in ("us", f"{MICRO}s", f"{MU}s")),
        *(("2000ns", 2e-6), ("720h", 30 * 24 * 3600)),
        # finer than a microsecond is rounded away from zero
        *(("1ns", 1e-6), ("-1ns", -1e-6), ("1001ns", 2e-6), ("0.1us0.1us", 1e-6)),
        *(("0.0000001s", 1e-6), ("0.3us0.7us", 1e-6)),
    ],
)
def test_reads_what_go_reads(text, seconds):
    assert durations.parse_duration(text) == timedelta(seconds=seconds)


LONGEST = "2562047h47m16.854775s"


@pytest.mark.parametrize(
    "seconds, text, short",
    [
        ("0", "0s", ""),
        ("0.000001", f"1{MICRO}s", ""),
        ("0.000999", f"999{MICRO}s", ""),
        ("0.0015", "1.5ms", ""),
        ("0.001001", "1.001ms", ""),
        ("0.5", "500ms", ""),
        ("0.999999", "999.999ms", ""),
        ("1", "1s", ""),
        ("10", "10s", ""),
        ("1.5", "1.5s", ""),
        ("60", "1m0s", "1m"),
        ("90", "1m30s", ""),
        ("600", "10m0s", "10m"),
        ("3600", "1h0m0s", "1h"),
        ("5400", "1h30m0s", "1h30m"),
        ("3605", "1h0m5s", ""),
        ("3600.01", "1h0m0.01s", ""),
        ("36610", "10h10m10s", ""),
        ("2592000", "720h0m0s", "720h"),
        ("-3600", "-1h0m0s", "-1h"),
        ("-0.0015", "-1.5ms", ""),
        ("9223372036.854775", LONGEST, ""),
        ("-9223372036.854775", f"-{LONGEST}", ""),
    ],
)
def test_prints_what_go_prints_and_shorter_for_people(seconds, text, short):
    duration = int(Fraction(seconds) * 10**6) * MICROSECOND
    assert abs(duration) <= durations.MAX_DURATION
    assert durations.format_duration(duration) == text
    assert durations.format_duration_short(duration) == (short or text)
    assert durations.parse_duration(text) == duration
    assert durations.parse_duration(short or text) == duration


NOT_GO = "- s .s --1h 1m-1s 1hm NaN inf P1D 1h30min \N{ARABIC-INDIC DIGIT ONE}h"
NO_DURATIONS = {
    "is not a duration": ["", " ", " 1h", "1h ", *NOT_GO.split()],
    "number without a unit": ["3", "1h30", "00", "1.2.3s"],
    "unknown unit 'd'": ["1d"],
    "unknown unit ' h'": ["1 h"],
    "unknown unit 'H'": ["1H"],
    "unknown unit 'e'": ["1e3s"],
    r"unknown unit 'x\n'": ["1x\n"],
    "over 292 years": [
        *["2562048h", "-2562048h", "2562047h47m16.854775001s", f"{2**63}ns", "9" * 63 + "h"]
    ],
    "has 66 characters, more than 64": ["1h" * 33],
}


@pytest.mark.parametrize(
    "text, problem", [(text, problem) for problem, texts in NO_DURATIONS.items() for text in texts]
)
def test_anything_else_is_no_duration_and_says_why(text, problem):
    with pytest.raises(errors.InvalidDuration) as caught:
        durations.parse_duration(text)
    assert problem in caught.value.message
    assert "for example 1h30m, 90s or 500ms" in caught.value.hint


duration_numbers = st.one_of(
    st.integers(0, 10_000).map(str),
    st.builds("{}.{}".format, st.integers(0, 10_000), st.integers(0, 10**12)),
)
parts = st.lists(
    st.tuples(duration_numbers, st.sampled_from(sorted(UNITS))), min_size=1, max_size=3
)


@given(parts, st.sampled_from(["", "-"]))
def test_a_sequence_is_the_exact_sum_of_its_parts_rounded_once(parts, sign):
    text = sign + "".join(number + unit for number, unit in parts)
    exact = sum(Fraction(number) * UNITS[unit] for number, unit in parts)
    microseconds = math.ceil(exact * 10**6)
    assert durations.parse_duration(text) == (-microseconds if sign else microseconds) * MICROSECOND


@given(st.timedeltas(-durations.MAX_DURATION, durations.MAX_DURATION))
def test_printing_and_parsing_give_the_same_duration(duration):
    assert durations.parse_duration(durations.format_duration(duration)) == duration
    assert durations.parse_duration(durations.format_duration_short(duration)) == duration
