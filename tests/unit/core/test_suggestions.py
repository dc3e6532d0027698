"""What would make a request fit: it helps when done, the broker takes it, and nothing smaller would do."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

import make
from kubelend.core import decision, explanations, prices
from kubelend.core.explanations import Explanation, Suggestion
from kubelend.core.filters import BudgetLimit
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Rejection
from kubelend.core.models import Cluster, Request
from kubelend.core.resources import Resources
from small_fleets import GI, ledgers, requests


def explain(ledger, wanted="cpu=1,memory=1Gi", limit=10, **fields) -> Explanation:
    return explanations.explain_placement(make.question(wanted, **fields), ledger.fleet, limit)


def suggestion(ledger, wanted="cpu=1,memory=1Gi", **fields) -> Suggestion:
    found = explain(ledger, wanted, **fields).suggestion
    assert found is not None
    return found


def priced(cluster, offer="cpu=4,memory=8Gi", currency="USD", **per_hour):
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
    return decision.choose_cluster(make.question(pinned), ledger.fleet) is not None


def is_taken(request: Request, asked: Request) -> bool:
    """Whether the broker would take it: none of CPU and memory is refused, whatever is free."""
    before, after = asked.resources, request.resources
    no_zero = (after.cpu or not before.cpu) and (after.memory or not before.memory)
    return bool(after and no_zero)


@pytest.mark.parametrize(
    "fields, text",
    [
        ({}, "a fits if you request 1 cpu and 1Gi memory less"),
        ({"labels": {"tier": "gold"}}, "drop the label tier=gold"),
        ({"excluded": ["a"]}, "remove its exclusion"),
        ({"pinned": "b"}, "remove the pin to another cluster"),
    ],
)
def test_remedy_says_in_words_what_to_change(fields, text):
    ledger = make.ledger(a="cpu=4,memory=8Gi")
    assert text in suggestion(ledger, "cpu=5,memory=9Gi", **fields).text


def test_remedy_names_every_step():
    offer = priced("a", cpu="0.1", memory="0")
    found = suggestion(
        make.ledger(a=offer), "cpu=5,memory=8Gi", labels={"ssd": "yes"}, max_price="0.1"
    )
    assert found.text == (
        "a fits if you request 1 cpu less and allow 0.4 USD per hour and drop the label ssd=yes"
    )
    assert found.less == make.resources("cpu=1")
    assert found.drop_labels == {"ssd": "yes"}


def test_remedy_says_when_waiting_would_help():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=3,memory=1Gi")
    text = "a fits if you request 1 cpu less, or wait until reservations there end"
    assert suggestion(desk.ledger, "cpu=2,memory=1Gi").text == text
    assert "wait" not in suggestion(desk.ledger, "cpu=5,memory=1Gi").text


def test_asking_for_nothing_is_no_remedy():
    """A request of zero is refused, so "ask for all of it less" would be a lie."""
    assert explain(make.ledger(a="cpu=4,memory=8Gi"), "gpu=1").suggestion is None


def test_remedy_looks_past_clusters_that_have_nothing_to_offer():
    """`a` has no CPU at all; `b` is two steps away, but can be reached."""
    ledger = make.ledger(a="memory=8Gi", b=priced("b", cpu="1"))
    found = suggestion(ledger, "cpu=4", labels={"zone": "x"}, max_price="1")
    assert found.text == "b fits if you allow 4 USD per hour and drop the label zone=x"


@pytest.mark.parametrize("spoil", ["cordon", "stale", "requester"])
def test_what_no_request_can_change_has_no_remedy(spoil):
    desk = make.desk(a="cpu=4,memory=8Gi")
    if spoil == "cordon":
        desk.cordon("a")
    now = make.T0 + (make.STALE_AFTER if spoil == "stale" else make.NO_TIME)
    requester = "a" if spoil == "requester" else "r"
    found = explain(desk.ledger, "cpu=9,memory=1Gi", now=now, requester=requester)
    assert found.suggestion is None
    assert found.candidates[0].suggestion is None


def test_remedy_for_a_price_is_the_price():
    """And not a billionth above it, however the sum was rounded."""
    ledger = make.ledger(a=priced("a", "cpu=9,memory=9Gi,gpu=9", gpu="0.1"))
    found = suggestion(ledger, "gpu=3", max_price="0.2")
    assert found.text == "a fits if you allow 0.3 USD per hour"
    assert found.max_price == 300_000_000


@pytest.mark.parametrize("maximum", ["0.1", "9"], ids=["below", "above"])
def test_remedy_for_another_currency_is_the_price_in_it(maximum):
    ledger = make.ledger(a=priced("a", currency="EUR", cpu="0.5"))
    found = suggestion(ledger, "cpu=1,memory=1Gi", max_price=maximum, currency="USD")
    assert found.text == "a fits if you allow 0.5 EUR per hour"
    assert (found.max_price, found.currency) == (500_000_000, "EUR")


def test_kept_capacity_is_had_by_waiting_or_by_priority():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=3,memory=1Gi")
    desk.reserve("cpu=2,memory=1Gi", wait=make.HOUR, priority=5)
    found = suggestion(desk.ledger, "cpu=1,memory=1Gi")
    assert found.text == "a fits if you wait, or use a higher priority"
    assert desk.target(desk.reserve("cpu=1,memory=1Gi", priority=6)) == "a"


def test_neither_cpu_nor_memory_falls_to_zero():
    """Such a request is refused by the broker; one without GPUs is not."""
    full = make.advertisement("a", "cpu=4,memory=8Gi", allocated="cpu=4")
    assert explain(make.ledger(a=full), "cpu=4,memory=1Gi").suggestion is None
    full = make.advertisement("a", "cpu=4,memory=8Gi", allocated="memory=8Gi")
    assert explain(make.ledger(a=full), "cpu=4,memory=1Gi").suggestion is None
    found = suggestion(
        make.ledger(a="cpu=4,memory=8Gi"), "cpu=4,memory=1Gi,gpu=2,example.com/fpga=1"
    )
    assert found.text == "a fits if you request 2 gpu and 1 example.com/fpga less"


@pytest.mark.parametrize(
    "lent, wanted",
    [("cpu=4,memory=1Gi", "cpu=4,memory=1Gi"), ("cpu=4,memory=8Gi", "cpu=1,memory=1Gi")],
)
def test_where_no_cpu_is_left_only_waiting_helps(lent, wanted):
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve(lent)
    found = suggestion(desk.ledger, wanted)
    assert found.text == "a fits if you wait until reservations there end"
    assert not found.less


def test_small_raise_of_the_price_is_nearer_than_a_tenth_of_the_request():
    ledger = make.ledger(
        c2=priced("c2", "cpu=10,memory=8Gi", "EUR", cpu="0.1"), c3="cpu=1,memory=8Gi"
    )
    found = suggestion(ledger, "cpu=10,memory=1Gi", max_price="0.9", currency="EUR")
    assert found.text == "c2 fits if you allow 1 EUR per hour"


def test_price_to_allow_is_that_of_what_is_left_of_the_request():
    ledger = make.ledger(c2=priced("c2", "cpu=10,memory=8Gi", "EUR", cpu="0.1"))
    asked = {"max_price": "0.9", "currency": "EUR", "pinned": "c2"}
    found = suggestion(ledger, "cpu=20,memory=1Gi", **asked)
    assert found.text == "c2 fits if you request 10 cpu less and allow 1 EUR per hour"
    found = suggestion(ledger, "cpu=20,memory=1Gi", **{**asked, "max_price": "1"})
    assert found.text == "c2 fits if you request 10 cpu less"


def test_waiting_for_one_who_came_before_is_nearer_than_doing_with_almost_nothing():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=3,memory=1Gi")
    desk.reserve("cpu=2,memory=1Gi", wait=make.HOUR, priority=5)
    desk.advertise("b", "cpu=1m,memory=8Gi")
    found = suggestion(desk.ledger, "cpu=1,memory=1Gi")
    assert found.text == "a fits if you wait, or use a higher priority"


@pytest.mark.parametrize(
    "fields, near",
    [
        ({}, "a"),
        ({"labels": {"zone": "x"}}, "b"),
        ({"labels": {"zone": "x", "ssd": "yes"}}, "b"),
        ({"excluded": ["a"]}, "b"),
        ({"pinned": "b"}, "b"),
        ({"max_price": "1"}, "b"),
        ({"max_price": "3"}, "a"),
        ({"max_price": "9", "currency": "EUR"}, "b"),
    ],
    ids=str,
)
def test_sizes_of_all_changes_add_up(fields, near):
    """`a` lacks 1 of 4 cores; `b` lacks 2 of them, and nothing else."""
    labels = {"zone": "x", "ssd": "yes"}
    ledger = make.ledger(
        a=priced("a", "cpu=3,memory=8Gi", cpu="1"),
        b=make.advertisement("b", "cpu=2,memory=8Gi", labels=labels),
    )
    assert suggestion(ledger, "cpu=4,memory=1Gi", **fields).cluster == near


def test_of_equally_near_clusters_the_first_is_suggested():
    """Missing shares of 1/10 and 2/10 are not above one of 3/10, as they are in floating point."""
    ledger = make.ledger(a="cpu=9,memory=8G", b="cpu=7,memory=10G")
    assert suggestion(ledger, "cpu=10,memory=10G").cluster == "a"


def test_waiting_is_suggested_with_the_price_of_all_and_less_with_that_of_the_rest():
    """`wait` would be a lie where the whole request is too expensive."""
    desk = make.desk(a=priced("a", "cpu=10,memory=8Gi", cpu="0.1"))
    desk.reserve("cpu=2,memory=1Gi")
    assert suggestion(desk.ledger, "cpu=10,memory=1Gi", max_price="0.8").text == (
        "a fits if you request 2 cpu less"
    )
    assert suggestion(desk.ledger, "cpu=10,memory=1Gi", max_price="1").text == (
        "a fits if you request 2 cpu less, or wait until reservations there end"
    )
    desk.reserve("cpu=7,memory=1Gi")
    assert suggestion(desk.ledger, "cpu=10,memory=1Gi", max_price="0.8").text == (
        "a fits if you wait until reservations there end and allow 1 USD per hour"
    )


@pytest.mark.parametrize("most, steps", [("0.4", ""), ("0.3", "budget leaves 0.3 USD")])
def test_what_is_given_up_anyway_spares_the_budget(most, steps):
    ledger = make.ledger(a=priced("a", cpu="0.1"))
    billionths = prices.parse_price(most, "most")
    question = replace(make.question("cpu=5,memory=1Gi"), budget=BudgetLimit(billionths, "USD"))
    found = explanations.explain_placement(question, ledger.fleet, 0).suggestion
    assert found is not None
    assert steps in found.text
    assert ("budget" in found.text) == bool(steps)


def test_maximum_that_cannot_be_written_is_no_remedy():
    ledger = make.ledger(a=priced("a", "cpu=2000,memory=8Gi", cpu="1000000"))
    assert suggestion(ledger, "cpu=999,memory=1Gi", max_price="1").max_price == 999 * 10**15
    assert explain(ledger, "cpu=1000,memory=1Gi", max_price="1").suggestion is None


CURABLE = {
    Rejection.LABEL_MISMATCH,
    Rejection.CURRENCY_MISMATCH,
    Rejection.TOO_EXPENSIVE,
    Rejection.INSUFFICIENT_CPU,
    Rejection.INSUFFICIENT_MEMORY,
    Rejection.INSUFFICIENT_GPU,
    Rejection.INSUFFICIENT_EXTENDED,
    Rejection.KEPT_BACK,
    Rejection.LENDING_CAP_REACHED,
    Rejection.REQUESTER_CAP_REACHED,
}


@settings(max_examples=200)
@given(ledgers(), requests())
def test_every_remedy_is_true(ledger, request):
    """Doing what it says makes the very cluster fit; where only waiting helps, it asks for no change."""
    for candidate in explanations.explain_placement(
        make.question(request), ledger.fleet, 10
    ).candidates:
        suggested = candidate.suggestion
        if suggested is None or "fits if you wait" in suggested.text:
            continue
        assert set(candidate.rejections) <= CURABLE
        cured = applied(request, suggested)
        assert cured != request
        assert is_taken(cured, request), suggested.text
        assert is_placed(cured, candidate.cluster, ledger), suggested.text


@settings(max_examples=200)
@given(ledgers(), requests())
def test_no_part_of_a_remedy_is_larger_than_need_be(ledger, request):
    """One unit, or one billionth, less than the suggestion asks for is not enough."""
    for candidate in explanations.explain_placement(
        make.question(request), ledger.fleet, 10
    ).candidates:
        suggested = candidate.suggestion
        if suggested is None or "fits if you wait" in suggested.text:
            continue
        for name, amount in suggested.less.items():
            less = Resources.of({**dict(suggested.less.items()), name: amount - 1})
            more = applied(request, replace(suggested, less=less))
            assert not is_placed(more, candidate.cluster, ledger)
        if suggested.max_price:
            cheaper = applied(request, replace(suggested, max_price=suggested.max_price - 1))
            assert not is_placed(cheaper, candidate.cluster, ledger)


@settings(max_examples=200)
@given(ledgers(), requests())
def test_no_smaller_change_would_do(ledger, request):
    """Of all that could be asked for instead, nothing that is placed is a smaller change."""
    found = explanations.explain_placement(make.question(request), ledger.fleet, 10)
    if found.fitting:
        return
    for cluster in ledger.clusters.values():
        for other in changed(request, cluster):
            if is_placed(other, cluster.id, ledger):
                assert found.suggestion is not None
                assert suggestion_size(found.suggestion, request, ledger) <= size(
                    other, request, cluster
                )


@settings(max_examples=200)
@given(ledgers(), requests())
def test_candidates_that_do_not_fit_are_in_the_order_of_their_remedies(ledger, request):
    found = explanations.explain_placement(make.question(request), ledger.fleet, 10)
    suggestions = [c.suggestion for c in found.candidates if c.rejections]
    sizes = [
        suggestion_size(suggested, request, ledger)
        for suggested in suggestions
        if suggested is not None
    ]
    assert suggestions[len(sizes) :] == [None] * (len(suggestions) - len(sizes))
    assert sizes == sorted(sizes)
    assert found.fitting or found.suggestion == next(iter(suggestions), None)


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


def size(other: Request, request: Request, cluster: Cluster) -> Fraction:
    """The same as `nearness` says, of any two requests; rounded, as a maximum is to the billionth."""
    total = Fraction(len(request.constraints.labels) - len(other.constraints.labels), 2)
    for name, amount in request.resources.items():
        total += Fraction(amount - other.resources.amount(name), amount)
    return round(total + _raise(other, request, cluster), 6)


def _raise(other: Request, request: Request, cluster: Cluster) -> Fraction:
    offer, before, after = cluster.advertisement, request.constraints, other.constraints
    if offer.prices is None or before.max_price is None or after.max_price is None:
        return Fraction(0)
    if (before.currency or prices.DEFAULT_CURRENCY) != (after.currency or prices.DEFAULT_CURRENCY):
        return Fraction(1)
    higher = max(after.max_price - before.max_price, 0)
    return Fraction(higher, offer.prices.hourly_cost(request.resources) or 1)


def suggestion_size(suggested: Suggestion, request: Request, ledger: Ledger) -> Fraction:
    """That of a suggestion: waiting for reservations stands in for asking for less, if it is the smaller."""
    cluster = ledger.cluster(suggested.cluster)
    in_full = applied(request, replace(suggested, less=Resources()))
    waiting = size(in_full, request, cluster) + Fraction(1, 2)
    opening = Fraction("until it opens" in suggested.text, 2)
    if "until reservations" not in suggested.text:
        return size(applied(request, suggested), request, cluster) + opening
    if not suggested.less:
        return waiting + opening
    return min(size(applied(request, suggested), request, cluster), waiting) + opening
