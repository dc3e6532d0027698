"""Each reason to refuse, alone: one cluster, one request, one obstacle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import make
from kubelend.core import decision, filters
from kubelend.core.filters import FILTERS, BudgetLimit, PlacementQuery
from kubelend.core.lifecycle import Rejection
from kubelend.core.models import ClusterId
from kubelend.core.prices import Prices
from kubelend.core.resources import Resources


def rejections(question, ledger, cluster="a"):
    """All that speaks against a cluster, in the order of reporting."""
    row = ledger.fleet.find_row(ClusterId(cluster))
    return [str(r) for r, mask in filters.filter_masks(question, ledger.fleet) if not mask[row]]


def asked(**fields):
    return make.question("cpu=1,memory=1Gi", **fields)


def test_refusals_keep_their_names():
    assert {str(rejection) for rejection in Rejection} == {
        "IsRequester",
        "NotPinned",
        "Excluded",
        "LeftBefore",
        "RequesterNotAllowed",
        "RequesterDenied",
        "Stale",
        "Cordoned",
        "OutsideOpeningHours",
        "LabelMismatch",
        "CurrencyMismatch",
        "TooExpensive",
        "OverBudget",
        "InsufficientCPU",
        "InsufficientMemory",
        "InsufficientGPU",
        "InsufficientStorage",
        "InsufficientExtendedResource",
        "KeptBack",
        "LendingCapReached",
        "RequesterCapReached",
        "HeldForWaiter",
    }


def test_every_refusal_has_its_filter_in_the_order_of_its_definition():
    assert [rejection for rejection, _ in FILTERS] == list(Rejection)


def test_open_cluster_that_fits_passes():
    ledger = make.ledger(a="cpu=1,memory=1Gi")
    assert rejections(asked(), ledger) == []
    assert filters.feasible_clusters(asked(), ledger.fleet).tolist() == [True]


@pytest.mark.parametrize(
    "fields, rejection",
    [
        ({"requester": "a"}, "IsRequester"),
        ({"pinned": "b"}, "NotPinned"),
        ({"pinned": "unknown"}, "NotPinned"),
        ({"excluded": ["b", "a"]}, "Excluded"),
        ({"labels": {"tier": "silver"}}, "LabelMismatch"),
        ({"labels": {"tier": "gold", "ssd": "yes"}}, "LabelMismatch"),
        ({"region": "eu-south"}, "LabelMismatch"),
        ({"now": make.T0 + make.STALE_AFTER}, "Stale"),
        ({"max_price": "0.099"}, "TooExpensive"),
        ({"max_price": "0"}, "TooExpensive"),
        ({"max_price": "9", "currency": "EUR"}, "CurrencyMismatch"),
        ({"max_price": "0.01", "currency": "EUR"}, "CurrencyMismatch"),
    ],
)
def test_one_obstacle_is_one_rejection(fields, rejection):
    offer = make.advertisement(
        "a",
        labels={"tier": "gold"},
        region="eu-north",
        prices=make.price_list("USD", cpu="0.1"),
    )
    ledger = make.ledger(a=offer, b="cpu=1,memory=1Gi")
    assert rejections(asked(**fields), ledger) == [rejection]
    assert filters.feasible_clusters(asked(**fields), ledger.fleet).tolist()[0] is False


@pytest.mark.parametrize(
    "fields",
    [
        {"pinned": "a"},
        {"excluded": ["b", "unknown"]},
        {"labels": {"tier": "gold"}},
        {"region": "eu-north", "labels": {"tier": "gold"}},
        {"now": make.T0 + make.STALE_AFTER - make.MOMENT},
        {"max_price": "0.1"},
        {"currency": "EUR"},
    ],
    ids=str,
)
def test_constraint_that_is_met_refuses_nothing(fields):
    offer = make.advertisement(
        "a",
        labels={"tier": "gold"},
        region="eu-north",
        prices=make.price_list("USD", cpu="0.1"),
    )
    assert rejections(asked(**fields), make.ledger(a=offer)) == []


def test_cordoned_cluster_is_closed_until_it_is_opened():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.cordon("a")
    assert rejections(asked(), desk.ledger) == ["Cordoned"]
    desk.uncordon("a")
    assert rejections(asked(), desk.ledger) == []


def test_cluster_that_was_left_is_not_asked_again():
    question = PlacementQuery(
        make.request(), make.T0, excluded_before=(ClusterId("a"), ClusterId("gone"))
    )
    assert rejections(question, make.ledger(a="cpu=4,memory=8Gi")) == ["LeftBefore"]


@pytest.mark.parametrize(
    "wanted, refused",
    [
        ("cpu=4,memory=8Gi,gpu=2,storage=10Gi,example.com/fpga=1", []),
        ("cpu=4001m", ["InsufficientCPU"]),
        ("memory=8589934593", ["InsufficientMemory"]),
        ("gpu=3", ["InsufficientGPU"]),
        ("nvidia.com/gpu=3", ["InsufficientGPU"]),
        ("storage=11Gi", ["InsufficientStorage"]),
        ("example.com/fpga=2", ["InsufficientExtendedResource"]),
        ("example.com/unknown=1", ["InsufficientExtendedResource"]),
        ("cpu=5,memory=9Gi,gpu=3", ["InsufficientCPU", "InsufficientMemory", "InsufficientGPU"]),
    ],
)
def test_exact_fit_fits_and_one_more_does_not(wanted, refused):
    ledger = make.ledger(a="cpu=4,memory=8Gi,gpu=2,storage=10Gi,example.com/fpga=1")
    assert rejections(make.question(wanted), ledger) == refused
    assert isinstance(
        decision.decide_placement(make.question(wanted), ledger.fleet), decision.NoFit
    ) == bool(refused)


def test_gpu_cluster_without_gpu_pods_lends_its_gpus():
    desk = make.desk(a="cpu=4,memory=8Gi,gpu=2")
    for left in (1, 0):
        desk.reserve("cpu=1,memory=1Gi,gpu=1")
        assert desk.available("a").gpu == left
    assert desk.refused("cpu=1,memory=1Gi,gpu=1") == "0/1 cluster fits: 1 InsufficientGPU"


def test_cluster_without_a_price_asks_for_none():
    """Published prices must not punish: unpriced passes any maximum, and in any currency."""
    question = asked(max_price="0", currency="EUR")
    assert rejections(question, make.ledger(a="cpu=4,memory=8Gi")) == []


def test_price_that_floating_point_puts_a_hair_over_the_maximum_is_not_over_it():
    """Three times 0.1 is 0.30000000000000004, and nobody who wrote 0.3 meant to refuse it."""
    offer = make.advertisement("a", "gpu=4", prices=make.price_list(gpu="0.1"))
    ledger = make.ledger(a=offer)
    question = make.question("gpu=3", max_price="0.3")
    assert filters.hourly_costs(question.request, ledger.fleet)[0] > 0.3
    assert rejections(question, ledger) == []
    assert rejections(make.question("gpu=3", max_price="0.299999999"), ledger) == ["TooExpensive"]


def test_capacity_kept_for_a_waiter_is_refused_to_those_behind():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=3,memory=1Gi")
    desk.reserve("cpu=2,memory=1Gi", wait=make.HOUR, priority=5)
    assert rejections(asked(priority=5), desk.ledger) == ["HeldForWaiter"]
    assert rejections(asked(priority=6), desk.ledger) == []


def test_huge_amounts_are_compared_exactly():
    """A float would round 2**63-1 and its neighbour to the same number."""
    most = 2**63 - 1
    ledger = make.ledger(a=f"cpu=1,memory={most - 1}")
    assert rejections(make.question(f"memory={most - 1}"), ledger) == []
    assert rejections(make.question(f"memory={most}"), ledger) == ["InsufficientMemory"]


@given(
    st.integers(1, 10**18 - 1),
    st.integers(0, 10**18 - 1),
    st.integers(1, 10**7),
    st.integers(0, 2**50),
    st.integers(-2, 2),
)
def test_budget_is_exact_to_the_billionth_however_large_the_price(cpu, memory, millis, size, more):
    """Floating point alone would let pass, or refuse, what differs in the last digits of so large a sum."""
    offer = make.advertisement("a", Resources(millis, size), prices=Prices("USD", cpu, memory))
    ledger, wanted = make.ledger(a=offer), make.request(Resources(millis, size))
    agreed = Prices("USD", cpu, memory).hourly_cost(wanted.resources)
    most = max(agreed + more, 0)
    question = PlacementQuery(wanted, make.T0, budget=BudgetLimit(most, "USD"))
    assert rejections(question, ledger) == (["OverBudget"] if agreed > most else [])
