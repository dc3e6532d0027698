"""What the description says of a text is what its parser does: neither laxer nor stricter."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kubelend.core import durations, resources, scoring
from kubelend.core.errors import InvalidInput
from kubelend.core.lifecycle import Phase
from kubelend.core.models import ClusterId
from kubelend.wire import bodies, conversion, json_types, quantities

TERMS = conversion.RequestLimits(*[durations.MAX_DURATION] * 3)


def fits(schema, text):
    """As a validator reads it: `$` is the end, and not the last line's."""
    assert schema.keys() <= {"pattern", "allOf", "maxLength", "not", "enum"}
    return (
        re.fullmatch(schema["pattern"].removeprefix("^").removesuffix("$"), text) is not None
        and len(text) <= schema.get("maxLength", 64)
        and all(re.search(other["pattern"], text) for other in schema.get("allOf", []))
        and text not in schema.get("not", {}).get("enum", [])
    )


def accepts(parse, text):
    """Whether a parser takes a text. That one says too much is beyond any pattern."""
    try:
        parse(text)
    except InvalidInput as problem:
        return "out of range" in problem.message and "exponent" not in problem.message
    return True


def near(schema, letters):
    """Texts that fit, and texts that nearly do."""
    return st.from_regex(schema["pattern"]) | st.text(letters, max_size=9)


def offered(cpu="1", **amounts):
    return quantities.parse_offered(bodies.Quantities(cpu, "1", **amounts), "x")


def with_gpu(text):
    return offered(gpu=text)


def with_extended(name):
    return offered(extended={name: "1"})


def wanted(cpu):
    return quantities.parse_reservation_amounts(bodies.Quantities(cpu, "1"))


def lasting(text):
    return conversion.bounded_duration(text, TERMS)


def waiting(text):
    body = bodies.ReservationRequest(bodies.Quantities("1", "1"), wait=text)
    return conversion.to_request(body, ClusterId("me"), "", TERMS)


def costing(text):
    return conversion.to_prices(bodies.Cost(cpu_cost=text))


def paid_in(text):
    return conversion.to_prices(bodies.Cost(currency=text))


@given(near(json_types.QUANTITY, "0123456789.+-eEnumkMGTPKi \n"))
@example("1e64")
@example("1e65")
@example("1e-0064")
@example("-0")
@example("-.0Ki")
@example("-0.1")
@example("Ki")
@example("")
@example("1" * 64)
@example("0" * 65)
def test_quantities(text):
    assert fits(json_types.QUANTITY, text) == accepts(offered, text)


@given(near(json_types.QUANTITY, "0123456789.+-eEnumkMGTPKi"))
@example("")
def test_quantities_that_may_be_left_out(text):
    assert fits(json_types.OPTIONAL_QUANTITY, text) == accepts(with_gpu, text)


@given(st.from_regex(json_types.QUANTITY["pattern"], fullmatch=True).filter(lambda t: len(t) <= 64))
@example("0")
@example("0e5")
@example("+.001n")
@example("-0")
def test_wanted_is_more_than_zero(text):
    number, text_part = json_types.POSITIVE_CPU_AND_MEMORY["properties"]["cpu"]["anyOf"]
    assert number["minimum"] == 1
    assert bool(re.search(text_part["pattern"], text)) == accepts(wanted, text)


@pytest.mark.parametrize("number", [-1, 0, 1, 2**63 // 1000, 2**63 // 1000 + 1])
def test_numbers_of_cores_have_a_range(number):
    is_within = json_types.CORES_NUMBER["minimum"] <= number <= json_types.CORES_NUMBER["maximum"]
    try:
        offered(number)
    except InvalidInput:
        assert not is_within
    else:
        assert is_within


@given(near(json_types.DURATION, "0123456789.+-nuµμmsh "))
@example("0")
@example("-0s")
@example("+0h0m1ns")
@example("1")
@example("-1s")
@example("1m1")
@example("000s" * 15 + "000!")  # takes for ever where digits can be divided in many ways
def test_durations(text):
    assert fits(json_types.DURATION, text) == accepts(lasting, text)


@given(near(json_types.WAIT, "0123456789.+-nuµμmsh "))
@example("0")
@example("-0s")
@example("-0")
@example("-0h0.1s")
def test_waits(text):
    assert fits(json_types.WAIT, text) == accepts(waiting, text)


@given(near(json_types.PRICE, "0123456789.+-e"))
@example("0999999999.000000001")
@example("1000000000")
@example("1.")
def test_prices(text):
    assert fits(json_types.PRICE, text) == accepts(costing, text)


@given(near(json_types.CURRENCY, "AZaz09é"))
def test_currencies(text):
    assert fits(json_types.CURRENCY, text) == accepts(paid_in, text)


@given(near(json_types.RESOURCE_NAME, "aZ0-_./"))
@example("gpu")
@example("example.com/" + "x" * 63)
@example("example.com/" + "x" * 64)
@example("a..b/c")
@example("A/c")
@example("nvidia.com/gpu")
def test_names_of_resources(text):
    assert fits(json_types.RESOURCE_NAME, text) == accepts(with_extended, text)


def test_policies_and_scores_are_those_there_are():
    assert tuple(scoring.SCORING_POLICIES) == json_types.POLICIES
    assert tuple(scoring.SCORES) == json_types.SCORES


@pytest.mark.parametrize("text", ["", ",", "Pending", "Pending,Failed", "Pending,,Active,"])
def test_phases_are_those_there_are(text):
    assert re.search(json_types.PHASES["pattern"], text)
    assert {phase for phase in text.split(",") if phase} <= set(Phase)


@pytest.mark.parametrize("text", ["pending", "Pending;Failed", "Pending "])
def test_no_other_phase_is_one(text):
    assert not re.search(json_types.PHASES["pattern"], text)


def test_printable_amounts_fit_what_is_said_of_amounts():
    """What the broker answers is described by the same types."""
    for amount in (0, 1, 1500, 2**40, 2**63 - 1):
        for name in ("cpu", "memory", "example.com/fpga"):
            assert fits(json_types.QUANTITY, resources.format_amount(name, amount))
