"""Resource vectors, their texts, and prices: exact arithmetic and round trips."""

import doctest

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import make
from kubelend.core import errors, filters, prices, resources
from kubelend.core.prices import BILLIONTHS
from kubelend.core.quantities import MAX_AMOUNT
from kubelend.core.resources import NOTHING, Resources, parse_offered, parse_requested

FPGA, NIC = "example.com/fpga", "example.com/nic"
NAMES = ("cpu", "memory", "gpu", "storage", FPGA, NIC, "pods")


def vectors(amounts):
    extended = st.dictionaries(st.sampled_from([FPGA, NIC, "pods"]), amounts)
    return st.builds(Resources, amounts, amounts, amounts, amounts, extended)


anything = vectors(st.integers(-5, 5) | st.integers(-MAX_AMOUNT, MAX_AMOUNT))
some = vectors(st.integers(0, 5) | st.integers(0, MAX_AMOUNT))


@given(anything, anything, anything)
def test_arithmetic_is_that_of_each_amount(a, b, c):
    before = msgspec.json.encode([a, b])
    for name in NAMES:
        one, other = a.amount(name), b.amount(name)
        assert (a + b).amount(name) == one + other
        assert (a - b).amount(name) == one - other
        assert a.clamped().amount(name) == max(one, 0)
        assert a.elementwise_max(b).amount(name) == max(one, other)
    assert a + b - b == a - b + b == a
    assert hash(a + b - b) == hash(a)
    assert (a + b) + c == b + (a + c) == sum([a, b, c], NOTHING)
    assert a - a == NOTHING
    assert bool(a) == (a != NOTHING)
    assert Resources.of(dict(a.items())) == a
    assert msgspec.json.decode(msgspec.json.encode(a), type=Resources) == a
    a.shortfall(b), a.quantities()
    assert msgspec.json.encode([a, b]) == before, "operators leave their operands alone"


def test_a_zero_that_is_written_out_changes_nothing():
    assert Resources(extended={FPGA: 0, NIC: 1}) == Resources(extended={NIC: 1})
    assert not Resources(extended={FPGA: 0})
    assert msgspec.json.decode(b'{"extended":{"pods":0}}', type=Resources) == NOTHING
    assert msgspec.json.encode(NOTHING) == b"{}"
    assert msgspec.json.encode(Resources(cpu=1)) == b'{"cpu":1}'


@given(anything, anything)
@example(Resources.of({FPGA: 2}), Resources.of({NIC: 9}))
@example(Resources(cpu=4), Resources(cpu=4, gpu=-1, extended={FPGA: -1}))
def test_only_what_is_asked_for_can_be_missing_and_the_shortfall_is_no_more(wanted, free):
    missing = {
        name: amount - free.amount(name)
        for name, amount in wanted.items()
        if amount > max(free.amount(name), 0)
    }
    assert wanted.shortfall(free) == Resources.of(missing)
    assert wanted.fits_in(free) == (not missing)


def test_the_name_of_kubernetes_for_a_gpu_means_the_gpu():
    for name in ("nvidia.com/gpu", "gpu"):
        assert parse_requested({name: "2"}) == Resources(gpu=2)
    assert Resources.of({"nvidia.com/gpu": 2, "gpu": 1}) == Resources(gpu=3)
    assert Resources(gpu=2).amount("nvidia.com/gpu") == 2


@pytest.mark.parametrize(
    "name, text, down, up",
    [
        ("cpu", "1500u", 1, 2),
        ("cpu", "1n", 0, 1),
        ("memory", "0.5", 0, 1),
        ("memory", "1500m", 1, 2),
        ("storage", "0.05Gi", 53687091, 53687092),
        ("gpu", "1500m", 1, 2),
        (FPGA, "0.1", 0, 1),
    ],
)
def test_what_is_asked_rounds_up_and_what_is_offered_down(name, text, down, up):
    assert parse_offered({name: text}) == Resources.of({name: down})
    assert parse_requested({name: text}) == Resources.of({name: up})


@given(some)
def test_texts_say_the_same_vector_again(a):
    assert parse_requested(a.quantities()) == parse_offered(a.quantities()) == a


@pytest.mark.parametrize(
    "vector, texts",
    [
        (NOTHING, {"cpu": "0", "memory": "0"}),
        (Resources(cpu=5950, memory=7779729408), {"cpu": "5950m", "memory": "7597392Ki"}),
        (Resources(cpu=-50, gpu=1000), {"cpu": "-50m", "memory": "0", "gpu": "1k"}),
        (
            Resources(
                storage=2**30,
                extended={"hugepages-2Mi": 2**22, "ephemeral-storage": 2**20, "a.b/c": 2048},
            ),
            {
                "cpu": "0",
                "memory": "0",
                "storage": "1Gi",
                "a.b/c": "2048",
                "ephemeral-storage": "1Mi",
                "hugepages-2Mi": "4Mi",
            },
        ),
    ],
)
def test_texts_are_canonical_by_name_and_always_have_cpu_and_memory(vector, texts):
    assert list(vector.quantities().items()) == list(texts.items())


@pytest.mark.parametrize(
    "vector, words",
    [
        (Resources(500, 256 * 2**20), "500m CPU / 256Mi Memory"),
        (NOTHING, "0 CPU / 0 Memory"),
        (
            Resources(8000, 2**30, 2, 100 * 2**30, {FPGA: 1}),
            "8 CPU / 1Gi Memory / 2 GPU / 100Gi Storage / 1 example.com/fpga",
        ),
    ],
)
def test_describes_itself_to_people(vector, words):
    assert vector.describe() == words


@pytest.mark.parametrize(
    "free, score, band",
    [
        ("cpu=10,memory=20Gi", "66.67", "Moderate"),
        ("cpu=15,memory=30Gi", "100.00", "Excellent"),
        ("cpu=13500m,memory=27Gi", "90.00", "Excellent"),
        ("cpu=10500m,memory=21Gi", "70.00", "Good"),
        ("cpu=7500m,memory=15Gi", "50.00", "Moderate"),
        ("", "0.00", "Limited"),
    ],
)
def test_display_score_is_half_cpu_and_half_memory(free, score, band):
    found = resources.display_score(make.resources(free), make.resources("cpu=15,memory=30Gi"))
    assert (resources.display_score_text(found), resources.display_band(found)) == (score, band)
    assert resources.display_score(make.resources("cpu=4"), make.resources("cpu=4")) == 0


@pytest.mark.parametrize(
    "texts, problem",
    [
        ({"cpu": "abc"}, "cpu: 'abc' is not a quantity"),
        ({"memory": "1", "cpu": "-1"}, "cpu: '-1' is negative"),
        ({"memory": "-1n"}, "memory: '-1n' is negative"),
        ({FPGA: "-1"}, "example.com/fpga: '-1' is negative"),
        ({"nvidia.com/gpu": ""}, "nvidia.com/gpu: '' is not a quantity"),
        ({"memory": "8Ei"}, "memory: '8Ei' is out of range"),
        ({"cpu": "9223372036854775808m"}, "cpu: '9223372036854775808m' is out of range"),
        ({"cpu": "1E"}, "cpu: '1E' is out of range"),
    ],
)
@pytest.mark.parametrize("read", [parse_requested, parse_offered])
def test_a_bad_quantity_is_refused_by_the_name_of_its_field(read, texts, problem):
    with pytest.raises(errors.InvalidQuantity) as caught:
        read(texts, "requestedResources")
    assert caught.value.message.startswith(f"requestedResources.{problem}")
    assert caught.value.hint
    with pytest.raises(errors.InvalidQuantity) as caught:
        read(texts)
    assert caught.value.message.startswith(problem)


def test_the_largest_amounts_are_accepted():
    most = {"cpu": "9223372036854775807m", "memory": str(MAX_AMOUNT), FPGA: str(MAX_AMOUNT)}
    assert parse_requested(most) == Resources(MAX_AMOUNT, MAX_AMOUNT, extended={FPGA: MAX_AMOUNT})


def test_the_gpu_by_both_names_is_given_twice():
    with pytest.raises(errors.InvalidInput, match=r"^want\.nvidia\.com/gpu: is given twice"):
        parse_requested({"gpu": "0", "nvidia.com/gpu": "1"}, "want")


@pytest.mark.parametrize(
    "name", ["a", "pods", "hugepages-2Mi", "A_b.c-d", "x/y", "a-b.c--d.e/F", "n" * 63]
)
def test_names_of_kubernetes_are_accepted(name):
    assert parse_requested({name: "1"}) == Resources(extended={name: 1})


@pytest.mark.parametrize(
    "name",
    [
        *["", " ", "a b", "a/", "/a", "a/b/c", "-a", "a-", "a.", "\u00e9", "cpu\n"],
        *["A.com/x", "a..b/x", "a-.b/x", "a_b/x", "n" * 64, "p" * 254 + "/x"],
        *["n" * 2**20, "p-" * 2**19 + "/x", "a." * 2**19],
    ],
    ids=lambda name: name[:8] or "empty",
)
@pytest.mark.timeout(1)
def test_other_names_are_refused_at_once_in_one_short_line(name):
    with pytest.raises(errors.InvalidInput, match="is not a Kubernetes resource name") as caught:
        parse_requested({name: "1"}, "want")
    assert len(str(caught.value)) < 200


def test_the_examples_in_the_documentation_hold():
    result = doctest.testmod(resources)
    assert result.failed == 0 < result.attempted


@pytest.mark.parametrize(
    "text, billionths",
    [
        ("0", 0),
        ("0.05", 50_000_000),
        ("10", 10 * BILLIONTHS),
        ("007.5", 7_500_000_000),
        ("0.000000001", 1),
        ("999999999.999999999", 10**18 - 1),
    ],
)
def test_decimal_text_is_read_exactly_and_written_in_as_few_digits(text, billionths):
    assert prices.parse_price(text, "cpuCost") == billionths
    assert prices.format_price(billionths) == (text.lstrip("0") if text[1:2] == "0" else text)


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
    "text", ["", "EU", "EURO PLUS", "€", "TOOLONGCODE", "EUR\n", "\uff25\uff35\uff32"]
)
def test_what_is_no_currency_is_refused_with_its_field(text):
    assert prices.parse_currency("credits", "currency") == "CREDITS"
    with pytest.raises(errors.InvalidInput, match=r"^currency: "):
        prices.parse_currency(text, "currency")


def test_hourly_price_counts_cores_gigabytes_and_devices():
    offer = make.price_list(cpu="0.05", memory="0.01", gpu="1.5", storage="0.001")
    wanted = "cpu=2500m,memory=1500M,gpu=2,storage=100G,example.com/fpga=3"
    assert offer.hourly_cost(make.resources(wanted)) == 3_240_000_000
    ledger = make.ledger(a=make.advertisement("a", "cpu=1", prices=offer))
    assert filters.hourly_costs(make.request(wanted), ledger.fleet)[0] == pytest.approx(3.24)
