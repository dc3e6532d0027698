"""The engine over columns decides exactly as the plain reference does, on whatever it is given."""

import make
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from kubelend.core import decision, filters, policies
from kubelend.core.decision import NoFit, Placement
from kubelend.core.ledger import Ledger
from kubelend.core.models import ClusterId
from kubelend.core.resources import Resources

MOST = 2**63 - 1
NAMES = ["a", "b", "c", "d", "e", "f"]


def decided(question, ledger):
    answer = decision.decide(question, ledger.fleet)
    return (answer.cluster, answer.score) if isinstance(answer, Placement) else None


def test_nobody_advertises():
    answer = decision.decide(make.question(), Ledger().fleet)
    assert isinstance(answer, NoFit)
    assert str(answer.explanation) == "no cluster advertises yet"


def test_requester_does_not_serve_itself():
    desk = make.desk(a="cpu=64,memory=64Gi", b="cpu=2,memory=2Gi")
    assert desk.target(desk.reserve("cpu=1,memory=1Gi", requester="a")) == "b"


def test_deciding_changes_nothing():
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    before = make.state(desk.ledger)
    first = decision.decide(make.question(policy="balanced"), desk.ledger.fleet)
    decision.decide(make.question("cpu=99"), desk.ledger.fleet)
    assert decision.decide(make.question(policy="balanced"), desk.ledger.fleet) == first
    assert make.state(desk.ledger) == before


@pytest.mark.parametrize("order", [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"]], ids="".join)
def test_order_of_arrival_does_not_matter(order):
    desk = make.Desk()
    for name in order:
        desk.advertise(name)
    assert [desk.target(desk.reserve("cpu=1,memory=1Gi")) for _ in order] == ["a", "b", "c"]


def test_thousands_of_clusters_are_one_decision():
    offers = {f"c{n:05}": make.advertisement(f"c{n:05}", f"cpu={n % 7},memory=8Gi") for n in range(2000)}
    ledger = make.ledger(**offers)
    question = make.question("cpu=6,memory=1Gi")
    assert decided(question, ledger) == reference.decide(question, ledger) == ("c00006", 0.4375)


# Few values, so that ties and exact fits are common; the extremes, so that rounding shows.
small = st.sampled_from([0, 1, 2, 3, 4, 1000])
amount = small | st.sampled_from([MOST, MOST - 1, 2**53 + 1, 10**15 + 1]) | st.integers(0, MOST)
extended = st.dictionaries(st.sampled_from(["example.com/x", "example.com/y"]), small, max_size=2)
vectors = st.builds(Resources, amount, amount, small, amount, extended)
wanted = vectors.filter(bool)
price = st.sampled_from([0, 1, 10**8, 2 * 10**8, 10**18 - 1])
labels = st.dictionaries(st.sampled_from(["zone", "ssd"]), st.sampled_from("xy"), max_size=2)
currency = st.sampled_from(["USD", "EUR"])
weight = st.sampled_from([0.0, 0.1, 0.3, 1.0, 7.0])


@st.composite
def prices_(draw):
    return make.Prices(draw(currency), *(draw(price) for _ in range(4)))


@st.composite
def offers(draw, name):
    made = make.advertisement(
        name,
        draw(vectors),
        allocated=draw(st.just("") | vectors),
        labels=draw(labels),
        prices=draw(st.none() | prices_()),
        valid_for=draw(st.sampled_from([None, make.MINUTE])),
    )
    return made


@st.composite
def requests(draw, **fixed):
    maximum = draw(st.none() | st.sampled_from(["0", "0.1", "0.3", "1", "999999999"]))
    fields = {
        "requester": draw(st.sampled_from([*NAMES, "r"])),
        "priority": draw(st.sampled_from([0, 0, 1])),
        "policy": draw(st.sampled_from(sorted(policies.POLICIES))),
        "weights": draw(
            st.just({})
            | st.dictionaries(st.sampled_from(sorted(policies.SCORES)), weight).filter(
                lambda weights: any(weights.values())
            )
        ),
        "labels": draw(st.just({}) | labels),
        "pinned": draw(st.none() | st.none() | st.sampled_from([*NAMES, "unknown"])),
        "excluded": draw(st.just([]) | st.lists(st.sampled_from(NAMES), max_size=2)),
        "max_price": maximum,
        "currency": draw(currency),
    }
    return make.request(draw(wanted), **(fields | fixed))


@st.composite
def ledgers(draw):
    """Some clusters, some of them lent from, cordoned or kept for a waiter."""
    desk = make.Desk()
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=6)):
        desk.advertise(name, draw(offers(name)))
    for asked in draw(st.lists(requests(), max_size=4)):
        desk.ask(asked)
    for asked in draw(st.lists(requests(wait=make.HOUR), max_size=3)):
        desk.ask(asked)
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=1)):
        if name in desk.ledger.clusters:
            desk.cordon(name)
    return desk.ledger


@st.composite
def cases(draw):
    now = make.T0 + draw(st.sampled_from([0, 0, 1])) * make.MINUTE
    left = tuple(draw(st.just([]) | st.lists(st.sampled_from(NAMES), max_size=2)))
    ticket = draw(st.sampled_from([filters.NEWEST, 1, 10]))
    return draw(ledgers()), filters.Question(draw(requests()), now, ticket, left)


@settings(max_examples=300)
@given(cases())
def test_engine_equals_the_reference(case):
    ledger, question = case
    assert decided(question, ledger) == reference.decide(question, ledger)


@settings(max_examples=200)
@given(cases())
def test_every_refusal_equals_the_reference(case):
    ledger, question = case
    verdicts = list(filters.verdicts(question, ledger.fleet))
    for name, cluster in ledger.clusters.items():
        row = ledger.fleet.find(ClusterId(name))
        found = [refusal for refusal, mask in verdicts if not mask[row]]
        assert found == reference.refusals(question, cluster, ledger)
        passes = bool(filters.passing(question, ledger.fleet)[row])
        assert passes == (not found)


@settings(max_examples=100)
@given(cases())
def test_price_of_a_request_equals_the_reference(case):
    ledger, question = case
    hourly = filters.hourly(question.request, ledger.fleet).tolist()
    for name, cluster in ledger.clusters.items():
        asked = reference.price(question.request, cluster)
        assert hourly[ledger.fleet.find(name)] == asked
        prices = cluster.advertisement.prices
        assert prices is None or prices.hourly(question.request.resources) == asked
