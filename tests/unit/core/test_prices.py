"""Prices are read exactly, printed back as written, and cost what the contract's units say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import make
from kubelend.core import errors, filters, prices
from kubelend.core.prices import BILLIONTHS, Prices


@pytest.mark.parametrize(
    "text, billionths",
    [
        ("0", 0),
        ("0.05", 50_000_000),
        ("1", BILLIONTHS),
        ("007.5", 7_500_000_000),
        ("0.000000001", 1),
        ("999999999.999999999", 10**18 - 1),
    ],
)
def test_decimal_text_is_read_exactly(text, billionths):
    assert prices.parse_price(text, "cpuCost") == billionths


@pytest.mark.parametrize(
    "text",
    [
        *("", "-1", "+1", "1e3", ".5", "1.", "1,5", "NaN", "inf", " 1", "1\n", "\u0663"),
        *("0.0000000001", "1000000000", "0" * 21, "9" * 1_000_000),
    ],
    ids=lambda text: repr(text[:24]),
)
def test_what_is_no_plain_price_is_refused_with_its_field(text):
    with pytest.raises(errors.InvalidInput, match=r"^cpuCost: ") as refused:
        prices.parse_price(text, "cpuCost")
    assert len(str(refused.value)) < 120


@given(st.integers(0, 10**18 - 1))
def test_printed_price_reads_back_as_itself(billionths):
    assert prices.parse_price(prices.format_price(billionths), "cost") == billionths


@pytest.mark.parametrize(
    "billionths, text",
    [(0, "0"), (50_000_000, "0.05"), (10 * BILLIONTHS, "10"), (1, "0.000000001")],
)
def test_price_prints_in_as_few_digits_as_say_it(billionths, text):
    assert prices.format_price(billionths) == text


@pytest.mark.parametrize("text, code", [("EUR", "EUR"), ("usd", "USD"), ("credits", "CREDITS")])
def test_currency_is_read_in_capitals(text, code):
    assert prices.parse_currency(text, "currency") == code


@pytest.mark.parametrize(
    "text", ["", "EU", "EURO PLUS", "€", "TOOLONGCODE", "EUR\n", "\uff25\uff35\uff32"]
)
def test_what_is_no_currency_is_refused_with_its_field(text):
    with pytest.raises(errors.InvalidInput, match=r"^currency: "):
        prices.parse_currency(text, "currency")


@pytest.mark.parametrize(
    "wanted, hourly",
    [
        ("cpu=2", 0.1),
        ("cpu=500m", 0.025),
        ("memory=1G", 0.01),
        ("memory=500M", 0.005),
        ("gpu=2", 3.0),
        ("storage=100G", 0.1),
        ("cpu=2,memory=1G,gpu=2,storage=100G", 3.21),
        ("example.com/fpga=3", 0.0),
    ],
)
def test_hourly_price_counts_cores_gigabytes_and_devices(wanted, hourly):
    offer = make.price_list(cpu="0.05", memory="0.01", gpu="1.5", storage="0.001")
    assert asked(offer, wanted) == pytest.approx(hourly, rel=1e-12)
    assert offer.hourly_cost(make.resources(wanted)) == round(hourly * BILLIONTHS)


def test_what_is_not_priced_costs_nothing():
    offer = Prices("EUR", cpu=BILLIONTHS)
    assert asked(offer, "memory=1Ti,gpu=8") == 0
    assert offer.hourly_cost(make.resources("memory=1Ti,gpu=8")) == 0


def asked(offer, wanted):
    """What a cluster with these prices asks per hour, as offers are compared."""
    ledger = make.ledger(a=make.advertisement("a", "cpu=1", prices=offer))
    return float(filters.hourly_costs(make.request(wanted), ledger.fleet)[0])
