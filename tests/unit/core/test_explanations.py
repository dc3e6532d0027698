"""Why a request fits where it does, and what would make it fit: the counts add up, the decision says the
same, and a suggestion that is followed is accepted.
"""

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import make
from kubelend.core import explanations, prices, scoring
from kubelend.core.explanations import Explanation, Placement, Suggestion
from kubelend.core.filters import BudgetLimit
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import INSUFFICIENT_AMOUNT, Rejection
from kubelend.core.models import Cluster, ClusterId, Request
from kubelend.core.resources import Resources

GI = 2**30
SMALL = "cpu=4,memory=8Gi"
amounts = st.integers(0, 5)
POLICIES = [
    None,
    None,
    make.policy(keep_back="cpu=1,memory=1Gi"),
    make.policy(max_lent="cpu=3,gpu=1"),
    make.policy(max_per_requester="cpu=2,memory=2Gi"),
    make.policy(max_per_requester="cpu=3", max_lent="cpu=4", keep_back="cpu=1", allow=["r", "a"]),
    make.policy(hours=["13:00-14:00"]),
]
offers = st.builds(
    lambda cpu, memory, gpu, fpga, prices, labels, policy: make.advertisement(
        "-",
        Resources(cpu * 1000, memory * GI, gpu, 0, {"example.com/fpga": fpga}),
        prices=prices,
        labels=labels,
        policy=policy,
    ),
    amounts,
    amounts,
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from(
        [None, make.price_list(cpu="0.1", memory="0.07"), make.price_list("EUR", cpu="0.3")]
    ),
    st.sampled_from([{}, {"zone": "x"}, {"zone": "y", "ssd": "yes"}]),
    st.sampled_from(POLICIES),
)


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    runner = make.CommandRunner()
    for name in "abcd"[: draw(st.integers(0, 4))]:
        runner.advertise(name, replace(draw(offers), cluster=ClusterId(name)))
    for cpu in draw(st.lists(st.integers(1, 3), max_size=2)):
        runner.ask(f"cpu={cpu},memory=1Gi")
    return runner.ledger


@st.composite
def requests(draw: st.DrawFn) -> Request:
    cpu, memory = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    gpu, fpga = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (2, 1)]))
    wanted = Resources(cpu * 1000, memory * GI, gpu, 0, {"example.com/fpga": fpga})
    return make.request(
        wanted or make.resources("cpu=1"),
        requester=draw(st.sampled_from("ra")),
        labels=draw(st.sampled_from([{}, {}, {}, {"zone": "x"}, {"zone": "y", "ssd": "no"}])),
        max_price=draw(st.sampled_from([None, None, None, "0", "0.05", "0.2"])),
        currency=draw(st.sampled_from(["USD", "EUR"])),
        policy=draw(st.sampled_from(sorted(scoring.SCORING_POLICIES))),
        weights=draw(st.sampled_from([{}, {}, {"price": 1.0}])),
    )


def explain(ledger, wanted="cpu=1,memory=1Gi", limit=10, **fields) -> Explanation:
    return explanations.explain_placement(make.question(wanted, **fields), ledger.fleet, limit)


def suggestion(ledger, wanted="cpu=1,memory=1Gi", **fields) -> Suggestion:
    found = explain(ledger, wanted, **fields).suggestion
    assert found is not None
    return found


def priced(cluster, offer=SMALL, currency="USD", **per_hour):
    return make.advertisement(cluster, offer, prices=make.price_list(currency, **per_hour))


def applied(request: Request, suggested: Suggestion) -> Request:
    """The request after the change that a suggestion asks for."""
    constraints = request.constraints
    kept = {k: v for k, v in constraints.labels.items() if k not in suggested.drop_labels}
    constraints = replace(constraints, labels=kept)
    if suggested.max_price is not None:
        constraints = replace(
            constraints, max_price=suggested.max_price, currency=suggested.currency, pinned=None
        )
    return replace(request, resources=request.resources - suggested.less, constraints=constraints)


def is_placed(request: Request, cluster: str, ledger: Ledger) -> bool:
    pinned = replace(request, constraints=replace(request.constraints, pinned=cluster))
    return explanations.choose_cluster(make.question(pinned), ledger.fleet) is not None


def is_taken(request: Request, asked: Request) -> bool:
    """Whether the broker would take it: none of CPU and memory is refused, whatever is free."""
    before, after = asked.resources, request.resources
    no_zero = (after.cpu or not before.cpu) and (after.memory or not before.memory)
    return bool(after and no_zero)


def test_each_cluster_counts_once_with_its_first_refusal_in_a_sorted_histogram():
    runner = make.runner(
        a="cpu=9,memory=1Gi",
        b="cpu=9,memory=2Gi",
        c="cpu=9,memory=3Gi",
        d="cpu=1,memory=9Gi",
        e="cpu=1,memory=1Gi",
    )
    runner.cordon("e")
    assert runner.refused("cpu=2,memory=4Gi") == (
        "0/5 clusters fit: 3 InsufficientMemory, 1 Cordoned, 1 InsufficientCPU"
    )
    found = explain(runner.ledger, "cpu=2,memory=3Gi", requester="e")
    assert (found.total, found.fitting) == (5, 1)
    assert str(found) == "1/5 clusters fit: 2 InsufficientMemory, 1 InsufficientCPU, 1 IsRequester"
    assert {str(one.cluster): " ".join(one.rejections) for one in found.candidates}["e"] == (
        "IsRequester Cordoned InsufficientCPU InsufficientMemory"
    )


@pytest.mark.parametrize(
    "clusters, text",
    [
        ({}, "no cluster has advertised yet"),
        ({"a": "cpu=1,memory=1Gi"}, "1/1 cluster fits"),
        ({"a": "cpu=0"}, "0/1 cluster fits: 1 InsufficientCPU"),
        ({"a": "cpu=1,memory=1Gi", "b": "cpu=1,memory=1Gi"}, "2/2 clusters fit"),
    ],
)
def test_sentence_for_any_size_of_fleet(clusters, text):
    assert str(explain(make.ledger(**clusters))) == text


def test_candidates_are_the_best_then_the_nearest():
    ledger = make.ledger(
        far="cpu=1,memory=1Gi",
        near="cpu=3,memory=8Gi",
        good="cpu=5,memory=8Gi",
        best="cpu=9,memory=9Gi",
    )
    found = explain(ledger, "cpu=4,memory=4Gi").candidates
    assert [c.cluster for c in found] == ["best", "good", "near", "far"]
    assert [c.score is None for c in found] == [False, False, True, True]
    assert explain(ledger, "cpu=4,memory=4Gi", limit=2).candidates == found[:2]


@pytest.mark.parametrize("choice", [{"policy": "cost"}, {"weights": {"price": 1.0}}], ids=str)
def test_first_candidate_is_the_chosen_one_among_equals_too(choice):
    ledger = make.ledger(a="cpu=2,memory=2Gi", b="cpu=8,memory=8Gi", c="cpu=4,memory=4Gi")
    assert [c.cluster for c in explain(ledger, **choice).candidates] == ["b", "c", "a"]
    answer = explanations.decide_placement(make.question(**choice), ledger.fleet)
    assert isinstance(answer, Placement)
    assert answer.cluster == "b"


def test_candidate_shows_its_price_in_its_own_currency():
    ledger = make.ledger(a=priced("a", currency="CREDITS", cpu="0.5"), b="cpu=4,memory=8Gi")
    found = {str(c.cluster): c for c in explain(ledger, "cpu=3,memory=1Gi").candidates}
    assert (found["a"].price, found["a"].currency) == (1.5, "CREDITS")
    assert (found["b"].price, found["b"].currency) == (None, "")


@given(ledgers(), requests())
def test_explanation_agrees_with_the_decision(ledger, request):
    question = make.question(request)
    found = explanations.explain_placement(question, ledger.fleet, limit=10)
    answer = explanations.decide_placement(question, ledger.fleet)
    assert (found.fitting > 0) == isinstance(answer, Placement)
    assert found.fitting + sum(found.rejections.values()) == found.total == len(ledger.clusters)
    assert sum(not c.rejections for c in found.candidates) == found.fitting
    assert sorted(c.cluster for c in found.candidates) == sorted(ledger.clusters)
    if isinstance(answer, Placement):
        assert (found.candidates[0].cluster, found.candidates[0].score) == (
            answer.cluster,
            answer.score,
        )
        assert found.suggestion is None


IN_EUROS = {"a": priced("a", currency="EUR", cpu="0.5")}
TEN_CORES = {"a": priced("a", "cpu=10,memory=8Gi", "EUR", cpu="0.1")}
IN_ONE_EURO = {"max_price": "1", "currency": "EUR", "pinned": "a"}


@pytest.mark.parametrize(
    "clusters, wanted, fields, text",
    [
        ({"a": SMALL}, "cpu=5,memory=9Gi", {}, "a: request 1 cpu and 1Gi memory less"),
        ({"a": SMALL}, "cpu=1", {"labels": {"tier": "gold"}}, "a: drop the label tier=gold"),
        ({"a": SMALL}, "cpu=1", {"excluded": ["a"]}, "a: remove its exclusion"),
        ({"a": SMALL}, "cpu=1", {"pinned": "b"}, "a: remove the pin to another cluster"),
        (
            {"a": priced("a", cpu="0.1", memory="0")},
            "cpu=5,memory=8Gi",
            {"labels": {"ssd": "yes"}, "max_price": "0.1"},
            "a: request 1 cpu less and allow 0.4 USD per hour and drop the label ssd=yes",
        ),
        (  # `a` has no CPU at all; `b` is two steps away, but can be reached
            {"a": "memory=8Gi", "b": priced("b", cpu="1")},
            "cpu=4",
            {"labels": {"zone": "x"}, "max_price": "1"},
            "b: allow 4 USD per hour and drop the label zone=x",
        ),
        (  # the price, and not a billionth above it, however the sum was rounded
            {"a": priced("a", "gpu=9", gpu="0.1")},
            "gpu=3",
            {"max_price": "0.2"},
            "a: allow 0.3 USD per hour",
        ),
        (IN_EUROS, "cpu=1", {"max_price": "0.1", "currency": "USD"}, "a: allow 0.5 EUR per hour"),
        (IN_EUROS, "cpu=1", {"max_price": "9", "currency": "USD"}, "a: allow 0.5 EUR per hour"),
        (
            {"a": SMALL},
            "cpu=4,memory=1Gi,gpu=2,example.com/fpga=1",
            {},
            "a: request 2 gpu and 1 example.com/fpga less",
        ),
        (
            {"a": priced("a", "cpu=10,memory=8Gi", "EUR", cpu="0.1"), "b": "cpu=1,memory=8Gi"},
            "cpu=10,memory=1Gi",
            {"max_price": "0.9", "currency": "EUR"},
            "a: allow 1 EUR per hour",
        ),
        (  # the price of what is left of the request
            TEN_CORES,
            "cpu=20,memory=1Gi",
            {"max_price": "0.9", "currency": "EUR", "pinned": "a"},
            "a: request 10 cpu less and allow 1 EUR per hour",
        ),
        (TEN_CORES, "cpu=20,memory=1Gi", IN_ONE_EURO, "a: request 10 cpu less"),
        (
            {"a": priced("a", "cpu=2000,memory=8Gi", cpu="1000000")},
            "cpu=999,memory=1Gi",
            {"max_price": "1"},
            "a: allow 999000000 USD per hour",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and ":" in value else "",
)
def test_suggestion_names_every_step(clusters, wanted, fields, text):
    found = suggestion(make.ledger(**clusters), wanted, **fields)
    assert found.text == text.replace(": ", " fits if you ", 1)


@pytest.mark.parametrize(
    "offer, wanted, fields",
    [
        (SMALL, "gpu=1", {}),  # a request of nothing is refused
        (priced("a", "cpu=2000,memory=8Gi", cpu="1000000"), "cpu=1000", {"max_price": "1"}),
        (SMALL, "cpu=9,memory=1Gi", {"now": make.T0 + make.STALE_AFTER}),
        (SMALL, "cpu=9,memory=1Gi", {"requester": "a"}),
        (make.advertisement("a", policy=make.policy(deny=["r"])), "cpu=9,memory=1Gi", {}),
    ],
    ids=["nothing", "no-such-price", "stale", "requester", "denied"],
)
def test_no_suggestion_where_no_change_of_the_request_helps(offer, wanted, fields):
    found = explain(make.ledger(a=offer), wanted, **fields)
    assert found.fitting == 0
    assert found.suggestion is found.candidates[0].suggestion is None


@pytest.mark.parametrize(
    "lent, wanted, max_price, text",
    [
        ("cpu=3,memory=1Gi", "cpu=2,memory=1Gi", None, "request 1 cpu less, or wait"),
        ("cpu=3,memory=1Gi", "cpu=5,memory=1Gi", None, "request 4 cpu less"),
        ("cpu=4,memory=1Gi", "cpu=4,memory=1Gi", None, "wait"),
        ("cpu=4,memory=8Gi", "cpu=1,memory=1Gi", None, "wait"),
        # `wait` would be wrong where the whole request is too expensive
        ("cpu=1,memory=1Gi", "cpu=4,memory=1Gi", "0.3", "request 1 cpu less"),
        ("cpu=1,memory=1Gi", "cpu=4,memory=1Gi", "0.4", "request 1 cpu less, or wait"),
        ("cpu=4,memory=1Gi", "cpu=4,memory=1Gi", "0.3", "wait and allow 0.4 USD per hour"),
    ],
)
def test_waiting_is_suggested_where_the_whole_request_would_fit(lent, wanted, max_price, text):
    runner = make.runner(a=priced("a", cpu="0.1"))
    runner.reserve(lent)
    found = suggestion(runner.ledger, wanted, max_price=max_price)
    expected = text.replace("wait", "wait until reservations there end")
    assert found.text == f"a fits if you {expected}"


def test_nominated_cluster_is_had_by_waiting_or_by_priority():
    runner = make.runner(a=SMALL)
    runner.reserve("cpu=3,memory=1Gi")
    runner.reserve("cpu=2,memory=1Gi", wait=make.HOUR, priority=5)
    runner.advertise("b", "cpu=1m,memory=8Gi")  # nearly nothing is further away than waiting
    found = suggestion(runner.ledger, "cpu=1,memory=1Gi")
    assert found.text == "a fits if you wait, or use a higher priority"
    assert runner.target(runner.reserve("cpu=1,memory=1Gi", priority=6)) == "a"


@pytest.mark.parametrize(
    "fields, near",
    [
        ({}, "a"),
        ({"labels": {"zone": "x"}}, "b"),
        ({"excluded": ["a"]}, "b"),
        ({"max_price": "1"}, "b"),
        ({"max_price": "4"}, "a"),
        ({"max_price": "9", "currency": "EUR"}, "b"),
    ],
    ids=str,
)
def test_nearest_cluster_is_suggested(fields, near):
    """`a` lacks 1 of 4 cores; `b` lacks 2 of them, and nothing else."""
    ledger = make.ledger(
        a=priced("a", "cpu=3,memory=8Gi", cpu="1"),
        b=make.advertisement("b", "cpu=2,memory=8Gi", labels={"zone": "x"}),
    )
    assert suggestion(ledger, "cpu=4,memory=1Gi", **fields).cluster == near


@pytest.mark.parametrize(
    "most, currency, steps",
    [
        ("0.4", "USD", "request 1 cpu less"),
        ("0.3", "USD", "budget leaves 0.3 USD"),
        ("1", "EUR", None),
    ],
    ids=str,
)
def test_what_is_given_up_anyway_spares_the_budget_of_its_currency(most, currency, steps):
    ledger = make.ledger(a=priced("a", cpu="0.1"))
    budget = BudgetLimit(prices.parse_price(most, "most"), currency)
    question = replace(make.question("cpu=5,memory=1Gi"), budget=budget)
    found = explanations.explain_placement(question, ledger.fleet, 0).suggestion
    assert (found is None) == (steps is None)
    if found is not None:
        assert steps in found.text
        assert ("budget" in found.text) == ("budget" in steps)


FIXABLE = INSUFFICIENT_AMOUNT | {
    Rejection.LABEL_MISMATCH,
    Rejection.CURRENCY_MISMATCH,
    Rejection.TOO_EXPENSIVE,
}


@given(ledgers(), requests())
def test_every_suggestion_is_true_and_no_part_of_it_larger_than_need_be(ledger, request):
    """Doing what it says makes the very cluster fit, and one unit or one billionth less does not.

    Where only waiting helps, it asks for no change.
    """
    explained = explanations.explain_placement(make.question(request), ledger.fleet, 10)
    for candidate in explained.candidates:
        suggested, cluster = candidate.suggestion, candidate.cluster
        if suggested is None or "fits if you wait" in suggested.text:
            continue
        assert set(candidate.rejections) <= FIXABLE
        fixed = applied(request, suggested)
        assert fixed != request
        assert is_taken(fixed, request), suggested.text
        assert is_placed(fixed, cluster, ledger), suggested.text
        for name, amount in suggested.less.items():
            less = Resources.of({**dict(suggested.less.items()), name: amount - 1})
            more = applied(request, replace(suggested, less=less))
            assert not is_placed(more, cluster, ledger)
        if suggested.max_price:
            cheaper = applied(request, replace(suggested, max_price=suggested.max_price - 1))
            assert not is_placed(cheaper, cluster, ledger)


@given(ledgers(), requests())
def test_there_is_a_suggestion_whenever_some_change_would_do(ledger, request):
    found = explanations.explain_placement(make.question(request), ledger.fleet, 10)
    can_be_placed = (
        is_placed(other, cluster.id, ledger)
        for cluster in ledger.clusters.values()
        for other in changed(request, cluster)
    )
    assert found.fitting or found.suggestion is not None or not any(can_be_placed)


def changed(request: Request, cluster: Cluster) -> Iterator[Request]:
    """Everything that can be asked of a cluster instead: fewer whole units, fewer labels, its price."""
    wanted, labels = request.resources, request.constraints.labels
    fpgas = wanted.extended.get("example.com/fpga", 0)
    ranges = wanted.cpu // 1000, wanted.memory // GI, wanted.gpu, fpgas
    for cpu, memory, gpu, fpga in product(*(range(most + 1) for most in ranges)):
        less = Resources(cpu * 1000, memory * GI, gpu, 0, {"example.com/fpga": fpga})
        for kept in {(), tuple(labels), *((key,) for key in labels)}:
            constraints = replace(request.constraints, labels={key: labels[key] for key in kept})
            other = replace(request, resources=less, constraints=constraints)
            if is_taken(other, request):
                yield other
                yield paid(other, cluster)


def paid(request: Request, cluster: Cluster) -> Request:
    """With a maximum that is its price, if it has both."""
    asks, constraints = cluster.advertisement.prices, request.constraints
    if asks is None or constraints.max_price is None:
        return request
    most = asks.hourly_cost(request.resources) + 1
    paid = replace(constraints, max_price=most, currency=asks.currency)
    return replace(request, constraints=paid)
