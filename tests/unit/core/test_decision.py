"""The engine over columns decides exactly as the plain reference does, on whatever it is given."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import make
import reference
from kubelend.core import decision, filters, policies
from kubelend.core.decision import NoFit, Placement
from kubelend.core.ledger import Ledger
from kubelend.core.prices import Prices
from kubelend.core.resources import Resources

MOST = 2**63 - 1
NAMES = ["a", "b", "c", "d", "e"]


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
    offers = {
        f"c{n:05}": make.advertisement(f"c{n:05}", f"cpu={n % 7},memory=8Gi") for n in range(2000)
    }
    ledger = make.ledger(**offers)
    question = make.question("cpu=6,memory=1Gi")
    assert decided(question, ledger) == reference.decide(question, ledger) == ("c00006", 0.4375)


# Few values, so that ties and exact fits are common; the extremes, so that rounding shows.
AMOUNTS = [0, 1, 2, 3, 4, 1000, 10**15 + 1, 2**53 + 1, MOST - 1, MOST]
EXTENDED = [{}, {}, {"example.com/x": 1}, {"example.com/x": 2, "example.com/y": 1}]
PRICES = [0, 1, 10**8, 2 * 10**8, 10**18 - 1]
LABELS = [{}, {"zone": "x"}, {"zone": "y"}, {"zone": "x", "ssd": "y"}]
WEIGHTS = [
    {},
    {},
    {"price": 0.3},
    {"price": 0.1, "headroom": 0.3},
    dict.fromkeys(policies.SCORES, 0.7),
]
amount = st.sampled_from(AMOUNTS) | st.integers(0, MOST)
vectors = st.builds(
    Resources,
    cpu=amount,
    memory=amount,
    gpu=st.sampled_from([0, 0, 1, 2]),
    storage=st.sampled_from([0, 0, 5, MOST]),
    extended=st.sampled_from(EXTENDED),
)
price_lists = st.none() | st.builds(
    Prices,
    st.sampled_from(["USD", "EUR"]),
    cpu=st.sampled_from(PRICES),
    memory=st.sampled_from(PRICES),
    gpu=st.sampled_from(PRICES),
)


@st.composite
def offers(draw, name):
    return make.advertisement(
        name,
        draw(vectors),
        allocated=draw(st.just("") | vectors),
        labels=draw(st.sampled_from(LABELS)),
        prices=draw(price_lists),
        valid_for=draw(st.sampled_from([None, None, make.MINUTE])),
    )


@st.composite
def requests(draw, wait=make.NO_TIME):
    return make.request(
        draw(vectors.filter(bool)),
        requester=draw(st.sampled_from(["r", *NAMES])),
        priority=draw(st.sampled_from([0, 0, 1])),
        policy=draw(st.sampled_from(sorted(policies.POLICIES))),
        weights=draw(st.sampled_from(WEIGHTS)),
        labels=draw(st.sampled_from([{}, *LABELS])),
        pinned=draw(st.sampled_from([None] * 8 + ["a", "unknown"])),
        excluded=draw(st.sampled_from([[]] * 4 + [["a", "b"]])),
        max_price=draw(st.sampled_from([None] * 4 + ["0", "0.1", "0.3", "999999999"])),
        currency=draw(st.sampled_from(["USD", "EUR"])),
        wait=wait,
    )


@st.composite
def ledgers(draw):
    """Some clusters, some of them lent from, cordoned or kept for a waiter."""
    desk = make.Desk()
    for name in NAMES[: draw(st.integers(0, len(NAMES)))]:
        desk.advertise(name, draw(offers(name)))
    for asked in draw(st.lists(requests(), max_size=2)):
        desk.ask(asked)
    for asked in draw(st.lists(requests(wait=make.HOUR), max_size=2)):
        desk.ask(asked)
    if desk.ledger.clusters and draw(st.booleans()):
        desk.cordon("a")
    return desk.ledger


@st.composite
def cases(draw):
    now = make.T0 + draw(st.sampled_from([0, 0, 1])) * make.MINUTE
    left = draw(st.sampled_from([(), (), ("a",), ("b", "gone")]))
    ticket = draw(st.sampled_from([filters.NEWEST, 1, 10]))
    return draw(ledgers()), filters.Question(draw(requests()), now, ticket, left)


@pytest.mark.timeout(600)  # so that a failure can be shrunk
@settings(max_examples=250)
@given(cases())
def test_engine_equals_the_reference(case):
    """The same choice with the same score, the same refusals of every cluster, the same prices."""
    ledger, question = case
    assert decided(question, ledger) == reference.decide(question, ledger)
    verdicts = list(filters.verdicts(question, ledger.fleet))
    passing = filters.passing(question, ledger.fleet).tolist()
    hourly = filters.hourly(question.request, ledger.fleet).tolist()
    for row, name in enumerate(ledger.fleet.ids):
        cluster = ledger.clusters[name]
        refusals = [refusal for refusal, mask in verdicts if not mask[row]]
        assert refusals == reference.refusals(question, cluster, ledger)
        assert passing[row] == (not refusals)
        assert hourly[row] == reference.price(question.request, cluster)
        prices = cluster.advertisement.prices
        assert prices is None or prices.hourly(question.request.resources) == hourly[row]
