"""Why nothing fits and what would help: the counts add up, and every remedy is true when tried."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import make
from kubelend.core import decision, explanations, policies
from kubelend.core.decision import Placement
from kubelend.core.models import ClusterId
from kubelend.core.refusals import Refusal
from kubelend.core.resources import Resources

GI = 2**30


def explain(ledger, wanted="cpu=1,memory=1Gi", limit=10, **fields):
    return explanations.explain(make.question(wanted, **fields), ledger.fleet, limit)


def remedy(ledger, wanted="cpu=1,memory=1Gi", **fields):
    found = explain(ledger, wanted, **fields).remedy
    assert found is not None
    return found


def applied(request, remedy):
    """The request after the change that a remedy asks for."""
    constraints = request.constraints
    kept = {k: v for k, v in constraints.labels.items() if k not in remedy.drop_labels}
    constraints = replace(constraints, labels=kept)
    if remedy.max_price is not None:
        constraints = replace(
            constraints, max_price=remedy.max_price, currency=remedy.currency, pinned=None
        )
    return replace(request, resources=request.resources - remedy.less, constraints=constraints)


def priced(cluster, offer="cpu=4,memory=8Gi", currency="USD", **per_hour):
    return make.advertisement(cluster, offer, prices=make.price_list(currency, **per_hour))


def test_histogram_is_sorted_by_count_then_by_name():
    desk = make.desk(
        a="cpu=9,memory=1Gi",
        b="cpu=9,memory=2Gi",
        c="cpu=9,memory=3Gi",
        d="cpu=1,memory=9Gi",
        e="cpu=9,memory=9Gi",
    )
    desk.cordon("e")
    assert desk.refused("cpu=2,memory=4Gi") == (
        "0/5 clusters fit: 3 InsufficientMemory, 1 Cordoned, 1 InsufficientCPU"
    )


def test_each_cluster_counts_once_with_its_first_refusal():
    desk = make.desk(a="cpu=1,memory=1Gi", b="cpu=8,memory=8Gi")
    desk.cordon("a")
    found = explain(desk.ledger, "cpu=2,memory=2Gi", requester="a")
    assert found.refusals == {Refusal.IS_REQUESTER: 1}
    assert (found.total, found.fitting) == (2, 1)
    assert str(found) == "1/2 clusters fit: 1 IsRequester"
    assert found.candidates[1].refusals == (
        Refusal.IS_REQUESTER,
        Refusal.CORDONED,
        Refusal.INSUFFICIENT_CPU,
        Refusal.INSUFFICIENT_MEMORY,
    )


@pytest.mark.parametrize(
    "clusters, text",
    [
        ({}, "no cluster advertises yet"),
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
    found = explain(ledger, "cpu=4,memory=4Gi")
    assert [c.cluster for c in found.candidates] == ["best", "good", "near", "far"]
    assert [c.score is None for c in found.candidates] == [False, False, True, True]
    assert [c.cluster for c in explain(ledger, "cpu=4,memory=4Gi", limit=2).candidates] == [
        "best",
        "good",
    ]


@pytest.mark.parametrize("choice", [{"policy": "cost"}, {"weights": {"price": 1.0}}], ids=str)
def test_first_candidate_is_the_chosen_one_among_equals_too(choice):
    ledger = make.ledger(a="cpu=2,memory=2Gi", b="cpu=8,memory=8Gi", c="cpu=4,memory=4Gi")
    found = explain(ledger, **choice)
    assert [c.cluster for c in found.candidates] == ["b", "c", "a"]
    answer = decision.decide(make.question(**choice), ledger.fleet)
    assert isinstance(answer, Placement)
    assert answer.cluster == "b"


def test_candidate_shows_its_price_in_its_own_currency():
    ledger = make.ledger(a=priced("a", currency="CREDITS", cpu="0.5"), b="cpu=4,memory=8Gi")
    found = {c.cluster: c for c in explain(ledger, "cpu=3,memory=1Gi").candidates}
    assert (found["a"].price, found["a"].currency) == (1.5, "CREDITS")
    assert (found["b"].price, found["b"].currency) == (None, "")


@pytest.mark.parametrize(
    "fields, text",
    [
        ({}, "a fits if you ask for 1 cpu and 1Gi memory less"),
        ({"labels": {"tier": "gold"}}, "drop the label tier=gold"),
        ({"excluded": ["a"]}, "do not exclude it"),
        ({"pinned": "b"}, "do not pin another cluster"),
    ],
)
def test_remedy_says_in_words_what_to_change(fields, text):
    ledger = make.ledger(a="cpu=4,memory=8Gi")
    assert text in remedy(ledger, "cpu=5,memory=9Gi", **fields).text


def test_remedy_names_every_step():
    offer = priced("a", cpu="0.1", memory="0")
    found = remedy(make.ledger(a=offer), "cpu=5,memory=8Gi", labels={"ssd": "yes"}, max_price="0.1")
    assert found.text == (
        "a fits if you ask for 1 cpu less and allow 0.5 USD per hour and drop the label ssd=yes"
    )
    assert found.less == make.resources("cpu=1")
    assert found.drop_labels == {"ssd": "yes"}


def test_remedy_says_when_waiting_would_help():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=3,memory=1Gi")
    text = "a fits if you ask for 1 cpu less, or wait until reservations there end"
    assert remedy(desk.ledger, "cpu=2,memory=1Gi").text == text
    assert "wait" not in remedy(desk.ledger, "cpu=5,memory=1Gi").text


def test_asking_for_nothing_is_no_remedy():
    """A request of zero is refused, so "ask for all of it less" would be a lie."""
    assert explain(make.ledger(a="cpu=4,memory=8Gi"), "gpu=1").remedy is None
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=4,memory=8Gi")
    found = remedy(desk.ledger, "cpu=1,memory=1Gi")
    assert found.text == "a fits if you wait until reservations there end"
    assert not found.less


def test_remedy_looks_past_clusters_that_have_nothing_to_offer():
    """`a` has no CPU at all; `b` is two steps away, but can be reached."""
    ledger = make.ledger(a="memory=8Gi", b=priced("b", cpu="1"))
    found = remedy(ledger, "cpu=4", labels={"zone": "x"}, max_price="1")
    assert found.text == "b fits if you allow 4 USD per hour and drop the label zone=x"


@pytest.mark.parametrize("spoil", ["cordon", "stale", "requester"])
def test_what_no_request_can_change_has_no_remedy(spoil):
    desk = make.desk(a="cpu=4,memory=8Gi")
    if spoil == "cordon":
        desk.cordon("a")
    now = make.T0 + (make.STALE_AFTER if spoil == "stale" else make.NO_TIME)
    requester = "a" if spoil == "requester" else "r"
    found = explain(desk.ledger, "cpu=9,memory=1Gi", now=now, requester=requester)
    assert found.remedy is None
    assert found.candidates[0].remedy is None


def test_remedy_for_a_price_is_the_price():
    """And not a billionth above it, however the sum was rounded."""
    ledger = make.ledger(a=priced("a", "cpu=9,memory=9Gi,gpu=9", gpu="0.1"))
    found = remedy(ledger, "gpu=3", max_price="0.2")
    assert found.text == "a fits if you allow 0.3 USD per hour"
    assert found.max_price == 300_000_000


@pytest.mark.parametrize("maximum", ["0.1", "9"], ids=["below", "above"])
def test_remedy_for_another_currency_is_the_price_in_it(maximum):
    ledger = make.ledger(a=priced("a", currency="EUR", cpu="0.5"))
    found = remedy(ledger, "cpu=1,memory=1Gi", max_price=maximum, currency="USD")
    assert found.text == "a fits if you allow 0.5 EUR per hour"
    assert (found.max_price, found.currency) == (500_000_000, "EUR")


def test_kept_capacity_is_had_by_waiting_or_by_priority():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=3,memory=1Gi")
    desk.reserve("cpu=2,memory=1Gi", wait=make.HOUR, priority=5)
    found = remedy(desk.ledger, "cpu=1,memory=1Gi")
    assert found.text == "a fits if you wait, or ask with a higher priority"
    assert desk.target(desk.reserve("cpu=1,memory=1Gi", priority=6)) == "a"


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
def ledgers(draw):
    desk = make.Desk()
    for name in "abcd"[: draw(st.integers(0, 4))]:
        desk.advertise(name, replace(draw(offers), cluster=ClusterId(name)))
    for cpu in draw(st.lists(st.integers(1, 3), max_size=2)):
        desk.ask(f"cpu={cpu},memory=1Gi")
    return desk.ledger


@st.composite
def requests(draw):
    cpu, memory = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    gpu, fpga = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (2, 1)]))
    wanted = Resources(cpu * 1000, memory * GI, gpu, 0, {"example.com/fpga": fpga})
    return make.request(
        wanted or make.resources("cpu=1"),
        requester=draw(st.sampled_from("ra")),
        labels=draw(st.sampled_from([{}, {}, {}, {"zone": "x"}, {"zone": "y", "ssd": "no"}])),
        max_price=draw(st.sampled_from([None, None, None, "0", "0.05", "0.2"])),
        currency=draw(st.sampled_from(["USD", "EUR"])),
        policy=draw(st.sampled_from(sorted(policies.POLICIES))),
        weights=draw(st.sampled_from([{}, {}, {"price": 1.0}])),
    )


@settings(max_examples=200)
@given(ledgers(), requests())
def test_explanation_agrees_with_the_decision(ledger, request):
    question = make.question(request)
    found = explanations.explain(question, ledger.fleet, limit=10)
    answer = decision.decide(question, ledger.fleet)
    assert (found.fitting > 0) == isinstance(answer, Placement)
    assert found.fitting + sum(found.refusals.values()) == found.total == len(ledger.clusters)
    assert sum(not c.refusals for c in found.candidates) == found.fitting
    assert sorted(c.cluster for c in found.candidates) == sorted(ledger.clusters)
    if isinstance(answer, Placement):
        assert (found.candidates[0].cluster, found.candidates[0].score) == (
            answer.cluster,
            answer.score,
        )
        assert found.remedy is None


CURABLE = {
    Refusal.LABEL_MISMATCH,
    Refusal.CURRENCY_MISMATCH,
    Refusal.TOO_EXPENSIVE,
    Refusal.INSUFFICIENT_CPU,
    Refusal.INSUFFICIENT_MEMORY,
    Refusal.INSUFFICIENT_GPU,
    Refusal.INSUFFICIENT_EXTENDED,
    Refusal.KEPT_BACK,
    Refusal.LENDING_CAP_REACHED,
    Refusal.REQUESTER_CAP_REACHED,
}


@settings(max_examples=200)
@given(ledgers(), requests())
def test_every_remedy_is_true(ledger, request):
    """Doing what it says makes the very cluster fit; where only waiting helps, it asks for no change."""
    for candidate in explanations.explain(make.question(request), ledger.fleet, 10).candidates:
        remedy = candidate.remedy
        if remedy is None or "fits if you wait" in remedy.text:
            continue
        assert set(candidate.refusals) <= CURABLE
        cured = applied(request, remedy)
        assert cured != request
        assert cured.resources
        pinned = replace(cured, constraints=replace(cured.constraints, pinned=candidate.cluster))
        answer = decision.decide(make.question(pinned), ledger.fleet)
        assert isinstance(answer, Placement), remedy.text


@settings(max_examples=200)
@given(ledgers(), requests())
def test_no_smaller_change_would_do(ledger, request):
    """One unit, or one billionth, less than the remedy asks for is not enough."""
    for candidate in explanations.explain(make.question(request), ledger.fleet, 10).candidates:
        remedy = candidate.remedy
        if remedy is None or len(candidate.refusals) != 1:
            continue
        for name, amount in remedy.less.items():
            less = Resources.of({**dict(remedy.less.items()), name: amount - 1})
            assert_refused(applied(request, replace(remedy, less=less)), candidate, ledger)
        if remedy.max_price and candidate.refusals == (Refusal.TOO_EXPENSIVE,):
            cheaper = replace(remedy, max_price=remedy.max_price - 1)
            assert_refused(applied(request, cheaper), candidate, ledger)


def assert_refused(request, candidate, ledger):
    row = ledger.fleet.find(candidate.cluster)
    found = explanations.explain(make.question(request), ledger.fleet, 10)
    assert row is not None
    assert next(c for c in found.candidates if c.cluster == candidate.cluster).refusals
