"""Why a request fits where it does: the counts add up, and the decision says the same."""

import pytest
from hypothesis import given, settings

import make
from kubelend.core import decision, explanations
from kubelend.core.decision import Placement
from kubelend.core.lifecycle import Rejection
from small_fleets import ledgers, requests


def explain(ledger, wanted="cpu=1,memory=1Gi", limit=10, **fields):
    return explanations.explain_placement(make.question(wanted, **fields), ledger.fleet, limit)


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
    assert found.rejections == {Rejection.IS_REQUESTER: 1}
    assert (found.total, found.fitting) == (2, 1)
    assert str(found) == "1/2 clusters fit: 1 IsRequester"
    assert found.candidates[1].rejections == (
        Rejection.IS_REQUESTER,
        Rejection.CORDONED,
        Rejection.INSUFFICIENT_CPU,
        Rejection.INSUFFICIENT_MEMORY,
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
    answer = decision.decide_placement(make.question(**choice), ledger.fleet)
    assert isinstance(answer, Placement)
    assert answer.cluster == "b"


def test_candidate_shows_its_price_in_its_own_currency():
    ledger = make.ledger(a=priced("a", currency="CREDITS", cpu="0.5"), b="cpu=4,memory=8Gi")
    found = {c.cluster: c for c in explain(ledger, "cpu=3,memory=1Gi").candidates}
    assert (found["a"].price, found["a"].currency) == (1.5, "CREDITS")
    assert (found["b"].price, found["b"].currency) == (None, "")


@settings(max_examples=200)
@given(ledgers(), requests())
def test_explanation_agrees_with_the_decision(ledger, request):
    question = make.question(request)
    found = explanations.explain_placement(question, ledger.fleet, limit=10)
    answer = decision.decide_placement(question, ledger.fleet)
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
