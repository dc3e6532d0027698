"""Which of the fitting clusters wins, by policy; the numbers are worked out by hand."""

import pytest

import make
from kubelend.core import decision, errors, scoring


def choose(clusters, wanted="cpu=1,memory=1Gi", **fields):
    """The winner and its score."""
    made = make.ledger(**clusters)
    answer = decision.decide_placement(make.question(wanted, **fields), made.fleet)
    assert isinstance(answer, decision.Placement)
    return answer.cluster, answer.score


def winner(clusters, wanted="cpu=1,memory=1Gi", **fields):
    return choose(clusters, wanted, **fields)[0]


def priced(cluster, cpu=None, offer="cpu=4,memory=8Gi", currency="USD"):
    prices = None if cpu is None else make.price_list(currency, cpu=cpu)
    return make.advertisement(cluster, offer, prices=prices)


def offers(**per_core):
    """Equal clusters but for their prices."""
    return {name: priced(name, cpu) for name, cpu in per_core.items()}


def test_headroom_prefers_the_larger_free_share():
    """The contract's example: (2000-500)/4000 beats (2000-500)/8000."""
    half = make.advertisement("half", "cpu=4", allocated="cpu=2")
    quarter = make.advertisement("a-quarter", "cpu=8", allocated="cpu=6")
    assert choose({"half": half, "a-quarter": quarter}, "cpu=500m") == ("half", 0.375)


def test_headroom_is_the_mean_share_left_of_cpu_and_memory():
    offer = make.advertisement("a", "cpu=10,memory=8Gi", allocated="cpu=1,memory=2Gi")
    _, score = choose({"a": offer}, "cpu=4,memory=2Gi")
    assert score == pytest.approx(0.5 * (9 - 4) / 10 + 0.5 * (6 - 2) / 8, abs=1e-15)


def test_headroom_counts_every_resource_that_is_asked_for_and_no_other():
    clusters = {"a": "cpu=4,memory=8Gi,gpu=1", "b": "cpu=4,memory=8Gi,gpu=4"}
    assert winner(clusters, "cpu=1,memory=1Gi") == "a"
    assert winner(clusters, "cpu=1,memory=1Gi,gpu=1") == "b"
    assert choose(clusters, "gpu=1") == ("b", 0.75)


@pytest.mark.parametrize("policy", scoring.SCORING_POLICIES)
def test_equal_scores_go_to_the_smaller_id(policy):
    clusters = dict.fromkeys(("c", "b", "d"), "cpu=4,memory=8Gi")
    assert winner(clusters, policy=policy) == "b"


def test_binpack_fills_one_cluster_before_the_next():
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    desk.reserve("cpu=1,memory=1Gi", pinned="b")
    placed = [desk.target(desk.reserve("cpu=1,memory=1Gi", policy="binpack")) for _ in range(4)]
    assert placed == ["b", "b", "b", "a"]


def test_headroom_spreads():
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    placed = [desk.target(desk.reserve("cpu=1,memory=1Gi")) for _ in range(4)]
    assert placed == ["a", "b", "a", "b"]


def test_balanced_leaves_no_cluster_with_memory_but_no_cpu():
    clusters = {"a": "cpu=16,memory=2Gi", "b": "cpu=4,memory=8Gi"}
    assert winner(clusters, policy="balanced") == "b"
    lopsided = choose({"a": clusters["a"]}, weights={"balance": 1.0})[1]
    assert lopsided == 1 - (15 / 16 - 1 / 2)


def test_cheapest_wins_although_it_is_the_fullest():
    clusters = offers(a="0.3", b="0.2", c="0.1")
    clusters["c"] = priced("c", "0.1", "cpu=1,memory=1Gi")
    assert choose(clusters, policy="cost") == ("c", 1.0)


def test_equal_prices_are_decided_by_headroom():
    clusters = {"a": priced("a", "0.1"), "b": priced("b", "0.1", "cpu=8,memory=16Gi")}
    assert winner(clusters, policy="cost") == "b"


def test_missing_price_is_neither_best_nor_worst():
    assert winner(offers(a=None, b="0.1", c="0.3"), policy="cost") == "b"
    scores = {}
    for absent in ("b", "c"):
        fewer = offers(a=None, b="0.1", c="0.3") | {absent: "cpu=0"}
        scores[absent] = choose(fewer, policy="cost")
    made = make.ledger(**offers(a=None, b="0.1", c="0.2", d="0.3"))
    question = make.question(policy="cost")
    weighed = (
        scoring.weighted_score({"price": 1.0}, question.request, made.fleet, made.fleet.uncordoned)
        / 1e9
    )
    assert weighed == pytest.approx([0.5, 1.0, 0.5, 0.0])
    # With a single price there is nothing to compare, so it must not decide at all.
    assert scores == {"b": ("a", 1.0), "c": ("a", 1.0)}


def test_without_any_price_cost_is_headroom():
    clusters = {"a": "cpu=2,memory=2Gi", "b": "cpu=8,memory=16Gi", "c": "cpu=4,memory=8Gi"}
    assert winner(clusters, policy="cost") == winner(clusters) == "b"


def test_price_in_another_currency_is_no_price():
    clusters = offers(b="0.2", c="0.3") | {"a": priced("a", "0.000001", currency="JPY")}
    assert winner(clusters, policy="cost") == "b"
    assert winner(clusters, policy="cost", currency="JPY") == "a"


def test_prices_are_compared_in_the_currency_that_most_ask_for_if_none_is_named():
    euros = {name: priced(name, cpu, currency="EUR") for name, cpu in {"c": "5", "d": "4"}.items()}
    assert winner(euros, policy="cost") == "d"
    assert winner(euros | offers(a="3"), policy="cost") == "d"
    assert winner(euros | offers(a="3", b="2", e="1"), policy="cost") == "e"
    # As many of each: always the same, whoever advertised first.
    assert winner(euros | offers(a="3", b="2"), policy="cost") == "d"
    assert winner(offers(a="3", b="2") | euros, policy="cost") == "d"


def test_price_is_that_of_this_request():
    """Cheap cores and dear memory: who is cheaper depends on what is asked for."""
    clusters = {
        "cores": make.advertisement("cores", prices=make.price_list(cpu="0.1", memory="1")),
        "bytes": make.advertisement("bytes", prices=make.price_list(cpu="1", memory="0.1")),
    }
    assert winner(clusters, "cpu=4,memory=100M", policy="cost") == "cores"
    assert winner(clusters, "cpu=100m,memory=4G", policy="cost") == "bytes"


def test_only_clusters_that_fit_take_part_in_the_comparison_of_prices():
    """A dear cluster that cannot serve must not make the others look alike."""
    clusters = {
        "a": priced("a", "0.2", "cpu=8,memory=16Gi"),
        "b": priced("b", "0.1"),
        "c": priced("c", "999999999", "cpu=0"),
    }
    assert winner(clusters, weights={"price": 1.0, "headroom": 1.0}) == "b"


@pytest.mark.parametrize(
    "weights, wins",
    [
        ({"price": 1.0}, "cheap"),
        ({"headroom": 1.0}, "empty"),
        ({"price": 1.0, "headroom": 10.0}, "empty"),
        ({"price": 10.0, "headroom": 1.0}, "cheap"),
        ({"packing": 2.5}, "cheap"),
        ({"headroom": 1.0, "price": 0.0}, "empty"),
    ],
    ids=str,
)
def test_weights_of_the_request_decide(weights, wins):
    clusters = {
        "cheap": priced("cheap", "0.1", "cpu=2,memory=2Gi"),
        "empty": priced("empty", "0.2", "cpu=16,memory=32Gi"),
    }
    assert winner(clusters, weights=weights) == wins


def test_weighted_score_is_a_mean():
    score = choose({"a": "cpu=4,memory=4Gi"}, weights={"headroom": 3.0, "packing": 1.0})[1]
    assert score == (0.75 * 3 + 0.25 * 1) / 4


@pytest.mark.parametrize(
    "policy, weights, message",
    [
        ("fastest", {}, "policy: 'fastest' is unknown"),
        ("headroom", {"speed": 1.0}, "weights: 'speed' is unknown"),
        ("headroom", {"price": -0.1}, "weights.price: -0.1 is not between"),
        ("headroom", {"price": 1001.0}, "weights.price: 1001.0 is not between"),
        ("headroom", {"price": float("nan")}, "weights.price: nan is not between"),
        ("headroom", {"price": float("inf")}, "weights.price: inf is not between"),
        ("headroom", {"price": 0.0, "balance": 0.0}, "weights: all are zero"),
        ("x" * 10**6, {}, "policy: 'xxxx"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_policy_that_means_nothing_is_refused(policy, weights, message):
    with pytest.raises(errors.InvalidInput) as refused:
        scoring.check_policy(policy, weights)
    assert str(refused.value).startswith(message)
    assert len(str(refused.value)) < 150


def test_every_policy_and_score_is_accepted():
    for policy in scoring.SCORING_POLICIES:
        scoring.check_policy(policy, dict.fromkeys(scoring.SCORES, 1.0))
