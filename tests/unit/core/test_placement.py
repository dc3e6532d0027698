"""Placement: which clusters pass the filters, which of them wins, and that columns and decision agree with a
plain reference."""

import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import make
import reference
from kubelend.core import durations, errors, explanations, filters, lending, quotas, scoring
from kubelend.core import fleet as fleets
from kubelend.core.columns import DictionaryColumn
from kubelend.core.errors import QuotaExceeded
from kubelend.core.explanations import NoFit, Placement
from kubelend.core.filters import FILTERS, BudgetLimit, PlacementQuery
from kubelend.core.fleet import Fleet
from kubelend.core.lifecycle import Rejection
from kubelend.core.models import UNCONSTRAINED, Cluster, ClusterId
from kubelend.core.prices import Prices
from kubelend.core.resources import NOTHING, Resources


def rejections(question, ledger, cluster="a"):
    """All that speaks against a cluster, in the order of reporting."""
    row = ledger.fleet.find_row(ClusterId(cluster))
    return [str(r) for r, mask in filters.filter_masks(question, ledger.fleet) if not mask[row]]


def asked(**fields):
    return make.question("cpu=1,memory=1Gi", **fields)


def test_rejections_keep_their_names():
    assert " ".join(Rejection) == (
        "IsRequester NotPinned Excluded PreviousProvider RequesterNotAllowed RequesterDenied Stale Cordoned"
        " OutsideOpeningHours LabelMismatch CurrencyMismatch TooExpensive OverBudget InsufficientCPU"
        " InsufficientMemory InsufficientGPU InsufficientStorage InsufficientExtendedResource KeptBack"
        " LendingCapReached RequesterCapReached NominatedForOther"
    )


def test_every_rejection_has_its_filter_in_the_order_of_its_definition():
    assert [rejection for rejection, _ in FILTERS] == list(Rejection)


@pytest.mark.parametrize(
    "fields, rejection",
    [
        ({}, ""),
        ({"pinned": "a"}, ""),
        ({"excluded": ["b", "unknown"]}, ""),
        ({"region": "eu-north", "labels": {"tier": "gold"}}, ""),
        ({"now": make.T0 + make.STALE_AFTER - make.MOMENT}, ""),
        ({"max_price": "0.1"}, ""),
        ({"currency": "EUR"}, ""),
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
def test_one_obstacle_is_one_rejection_and_a_met_constraint_is_none(fields, rejection):
    prices = make.price_list("USD", cpu="0.1")
    offer = make.advertisement("a", labels={"tier": "gold"}, region="eu-north", prices=prices)
    ledger = make.ledger(a=offer, b="cpu=1,memory=1Gi")
    assert rejections(asked(**fields), ledger) == rejection.split()
    assert filters.feasible_clusters(asked(**fields), ledger.fleet)[0] == (not rejection)


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
    answer = explanations.decide_placement(make.question(wanted), ledger.fleet)
    assert isinstance(answer, NoFit) == bool(refused)


def test_price_that_floating_point_puts_a_hair_over_the_maximum_is_not_over_it():
    """Three times 0.1 is 0.30000000000000004, and nobody who wrote 0.3 meant to refuse it."""
    offer = make.advertisement("a", "gpu=4", prices=make.price_list(gpu="0.1"))
    ledger = make.ledger(a=offer)
    question = make.question("gpu=3", max_price="0.3")
    assert filters.hourly_costs(question.request, ledger.fleet)[0] > 0.3
    assert rejections(question, ledger) == []
    assert rejections(make.question("gpu=3", max_price="0.299999999"), ledger) == ["TooExpensive"]


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


CHOICES = {
    "headroom": (ClusterId("half"), 0.375),
    "balanced": (ClusterId("quarter"), 0.729166667),
    "binpack": (ClusterId("quarter"), 0.8125),
    "cost": (ClusterId("quarter"), 1.0),
}
"""The first is the contract's example: (2000-500)/4000 beats (2000-500)/8000."""


@pytest.mark.parametrize("policy", scoring.SCORING_POLICIES)
def test_policy_of_the_request_chooses(policy):
    ledger = make.ledger(
        half=make.advertisement(
            "half", "cpu=4", allocated="cpu=2", prices=make.price_list(cpu="0.2")
        ),
        quarter=make.advertisement(
            "quarter", "cpu=8", allocated="cpu=6", prices=make.price_list(cpu="0.1")
        ),
    )
    answer = explanations.decide_placement(make.question("cpu=500m", policy=policy), ledger.fleet)
    assert answer == Placement(*CHOICES[policy])


def test_missing_price_is_neither_best_nor_worst():
    offers = {"a": make.advertisement("a")}
    for name, cpu in (("b", "0.1"), ("c", "0.2"), ("d", "0.3")):
        offers[name] = make.advertisement(name, prices=make.price_list(cpu=cpu))
    fleet = make.ledger(**offers).fleet
    weighed = scoring.weighted_score({"price": 1.0}, make.request(), fleet, fleet.uncordoned)
    assert weighed / 1e9 == pytest.approx([0.5, 1.0, 0.5, 0.0])
    # With a single price there is nothing to compare, so it must not decide at all.
    single = make.ledger(a=offers["a"], b=offers["b"])
    answer = explanations.decide_placement(make.question(policy="cost"), single.fleet)
    assert answer == Placement(ClusterId("a"), 1.0)


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


MOST = 2**63 - 1
NAMES = ["a", "b", "c", "d", "e"]


def decided(question, ledger):
    answer = explanations.decide_placement(question, ledger.fleet)
    return (answer.cluster, answer.score) if isinstance(answer, Placement) else None


# Few values, so that ties and exact fits are common; now and then an extreme, so that rounding shows.
EXTREMES = [0, 1, 10**15 + 1, 2**53 + 1, MOST - 1, MOST]
EXTENDED = [{}, {"example.com/x": 1}, {"example.com/x": 2, "example.com/y": 1}]
PRICES = [0, 10**8, 10**8, 2 * 10**8, 3 * 10**8, 1, 10**18 - 1]
LABELS = [{}, {"zone": "x"}, {"zone": "y"}, {"zone": "x", "ssd": "y"}]
ALLOWED = [(), (), (), ("r",), ("r*", "a"), ("nobody",), ("?",)]
DENIED = [(), (), (), (), ("r",), ("[a-c]", "x*")]
CAPS = ["", "", "cpu=2", "cpu=6,gpu=1", "cpu=0", "memory=4000,example.com/x=1", "storage=5"]
# At T0 it is noon on a Thursday, in winter.
HOURS = [(), (), (), ("08:00-12:03",), ("13:03-13:00 Europe/Rome",), ("Mon-Wed 00:00-24:00",)]
BUDGETS = ["", "0", "0.3", "1", "7.5", "100"]
TIMES = [make.HOUR, make.HOUR, make.MINUTE, 13 * make.HOUR, 80 * make.HOUR]
WEIGHTS = [{"price": 0.3}, {"price": 0.1, "headroom": 0.3}, dict.fromkeys(scoring.SCORES, 0.7)]


class Dice(random.Random):
    """A whole fleet from one number: hypothesis would need a hundred choices for each."""

    def rarely(self, rare, usual):
        return rare if self.random() < 0.12 else usual

    def vector(self, most, *, rich=False):
        return Resources(
            cpu=self.rarely(self.choice(EXTREMES), self.randint(1, most) * 1000),
            memory=self.rarely(self.choice(EXTREMES), self.randint(0, most) * 1000),
            gpu=self.choice([0, 3, 3]) if rich else self.rarely(1, 0),
            storage=self.choice([0, 5, MOST]) if rich else self.rarely(5, 0),
            extended=self.choice(EXTENDED) if rich else self.rarely(EXTENDED[1], {}),
        )

    def offer(self, name):
        price = Prices(self.choice(["USD", "USD", "EUR", "EUR", "JPY"]), *self.choices(PRICES, k=3))
        return make.advertisement(
            name,
            self.vector(8, rich=True),
            allocated=self.rarely(self.vector(4), ""),
            labels=self.choice(LABELS),
            prices=self.choice([None, price, price]),
            valid_for=self.rarely(make.MINUTE, None),
            policy=self.choice([None, None, None, self.policy()]),
        )

    def policy(self):
        return make.policy(
            allow=self.choice(ALLOWED),
            deny=self.choice(DENIED),
            keep_back=self.choice(["", self.vector(2)]),
            max_lent=self.choice(CAPS),
            max_per_requester=self.choice(CAPS),
            hours=self.choice(HOURS),
        )

    def quota(self):
        return make.quota(
            self.rarely("cpu=20", ""),
            budget=self.choice(BUDGETS),
            currency=self.rarely("EUR", "USD"),
        )

    def request(self, most, wait=make.NO_TIME):
        return make.request(
            self.vector(most) or "cpu=1",
            requester=self.rarely(self.choice(NAMES), "r"),
            duration=self.choice(TIMES),
            priority=self.choice([0, 1]),
            policy=self.choice(sorted(scoring.SCORING_POLICIES)),
            weights=self.choice([{}, {}, self.choice(WEIGHTS)]),
            labels=self.rarely(self.choice(LABELS), {}),
            pinned=self.rarely(self.choice(["a", "unknown"]), None),
            excluded=self.rarely(["a", "b"], []),
            max_price=self.choice([None] * 6 + ["0", "0.1", "0.2", "0.3", "0.6"]),
            currency=self.choice(["", "", "USD", "EUR"]),
            wait=wait,
        )

    def ledger(self):
        """Some clusters, some of them lent from, cordoned or kept for a waiter."""
        runner = make.CommandRunner()
        for name in NAMES[: self.choice([0, 1, 3, 5, 5, 5])]:
            runner.advertise(name, self.offer(name))
        for _ in range(self.randint(0, 6)):
            runner.ask(self.request(4))
        self.limit(runner)
        for _ in range(self.randint(0, 3)):
            with suppress(QuotaExceeded):
                runner.ask(self.request(6, wait=self.choice([make.NO_TIME, make.HOUR])))
        if runner.ledger.clusters:
            self.rarely(runner.cordon, runner.uncordon)("a")
        return runner.ledger

    def limit(self, runner):
        """What administrators add to it, in half of all fleets."""
        if self.random() < 0.5:
            return
        for name in self.sample(NAMES, self.randint(0, 3)):
            runner.limit(name, self.policy())
        for name in ("r", self.choice(NAMES)):
            runner.allot(name, self.choice([self.quota(), make.quota()]))

    def question(self, ledger):
        """Requests without constraints take a shorter way through the filters, to the same clusters."""
        now = make.T0 + self.choice([make.NO_TIME, make.NO_TIME, make.MINUTE, 5 * make.MINUTE])
        request = self.request(3)
        if self.random() < 0.25:
            request = replace(request, constraints=UNCONSTRAINED)
        return replace(
            quotas.query_for_request(ledger, request, now),
            ticket=self.choice([filters.NEW_REQUEST_TICKET] * 2 + [*range(5, 15)]),
            excluded_before=self.rarely(("b", "gone"), ()),
        )


@settings(max_examples=4 * settings().max_examples)
@given(st.integers(0, 2**32))
def test_engine_equals_the_reference(seed):
    """The same choice with the same score, the same rejections of every cluster, the same prices."""
    dice = Dice(seed)
    ledger = dice.ledger()
    question = dice.question(ledger)
    until = question.now + question.request.duration
    most = reference.most_per_hour(ledger, question.request.requester, question.now, until)
    assert (question.budget and question.budget.max_hourly_price) == most
    assert decided(question, ledger) == reference.decide(question, ledger)
    masks = list(filters.filter_masks(question, ledger.fleet))
    passing = filters.feasible_clusters(question, ledger.fleet).tolist()
    hourly = filters.hourly_costs(question.request, ledger.fleet).tolist()
    for row, name in enumerate(ledger.fleet.ids):
        cluster = ledger.clusters[name]
        rejections = [rejection for rejection, mask in masks if not mask[row]]
        assert rejections == reference.rejections(question, cluster, ledger)
        assert passing[row] == (not rejections)
        assert hourly[row] == reference.price(question.request, cluster)
        prices, agreed = cluster.advertisement.prices, reference.agreed(question.request, cluster)
        assert prices is None or prices.hourly_cost(question.request.resources) == agreed


NOON = durations.to_micros(make.T0)
POLICIES = [
    None,
    None,
    make.policy(keep_back="cpu=2,example.com/a=1"),
    make.policy(allow=["s"], max_lent="cpu=3"),
    make.policy(deny=["r"], max_per_requester="cpu=1,example.com/b=1"),
    make.policy(hours=["13:00-14:00"]),
    make.policy(hours=["11:00-14:00"], deny=["r"]),
]
RESOURCES = ["cpu", "memory", "gpu", "storage", "example.com/a", "example.com/b"]


def put(fleet, cluster):
    free = cluster.ceiling.clamped()
    holds = lending.effective_policy(cluster.advertisement.policy, None)
    fleet.put(cluster, free)
    fleet.set_policy(cluster, holds)
    if holds is not None:
        fleet.apply_policy(cluster.id, holds, free, NOTHING)


def contents(fleet):
    """Every column as lists, by cluster."""
    return {
        "ids": fleet.ids,
        "labels": fleet.labels,
        "free": {name: _list(fleet.free(name)) for name in RESOURCES},
        "ceiling": {name: _list(fleet.ceiling(name)) for name in RESOURCES},
        "free_and_allocatable": {
            name: [_list(part) for part in fleet.free_and_allocatable(name) or ()]
            for name in RESOURCES
        },
        "valid_until": _list(fleet.valid_until),
        "uncordoned": _list(fleet.uncordoned),
        "currency": _list(fleet.currency),
        "rates": _list(fleet.rates),
        "labelled": _list(fleet.with_label("zone", "x")),
        "prices": fleet.prices,
        "available": {name: _list(fleet.available(name)) for name in RESOURCES},
        "limit_columns": {name: limit_column(fleet, name) for name in RESOURCES},
        "requester_cap_left": {
            name: _list(fleet.requester_cap_left(name, make.R)) for name in RESOURCES
        },
        "requester_mask": None
        if fleet.policy_columns is None
        else [_list(mask) for mask in fleet.policy_columns.requester_mask(make.R, len(fleet))],
        "within_hours": _list(fleet.within_hours(NOON)),
        "usable": _list(fleet.usable(NOON)),
        "nominations": fleet.nomination_count,
        "not_nominated_above": [_list(fleet.not_nominated_above(1, ticket)) for ticket in range(7)],
    }


def limit_column(fleet, name):
    found = fleet.limit_column(name)
    return None if found is None else [_list(array[: len(fleet)]) for array in found.arrays()]


def _list(array):
    return None if array is None else array.tolist()


def test_labels_of_requests_do_not_fill_the_memory():
    fleet = Fleet()
    put(fleet, make.cluster("a", labels={"n": "7"}))
    seen = [
        bool(fleet.with_label("n", str(value))[0]) for value in range(3 * fleets.MAX_LABEL_MASKS)
    ]
    assert seen == [value == 7 for value in range(3 * fleets.MAX_LABEL_MASKS)]
    assert len(fleet._label_masks) <= fleets.MAX_LABEL_MASKS  # noqa: SLF001 - only its size shows it


def test_currencies_fit_a_column_exactly():
    codes = [fleets.currency_code(text) for text in ("EUR", "USD", "CREDITS", "ZZZZZZZZ")]
    assert len(set(codes)) == 4
    assert all(0 < code < 2**63 for code in codes)


@st.composite
def clusters(draw):
    extended = draw(st.sampled_from(["", ",example.com/a=1", ",example.com/a=2,example.com/b=3"]))
    return make.cluster(
        draw(st.sampled_from("abcdef")),
        f"cpu={draw(st.integers(0, 9))},memory={draw(st.integers(0, 9))}Gi{extended}",
        allocated=f"cpu={draw(st.integers(0, 9))}",
        labels=draw(st.sampled_from([{}, {"zone": "x"}, {"zone": "y"}])),
        prices=draw(st.sampled_from([None, make.price_list(cpu="1"), make.price_list("EUR")])),
        cordon=draw(st.sampled_from([None, "closed"])),
        policy=draw(st.sampled_from(POLICIES)),
    )


@given(st.lists(clusters() | st.sampled_from("abcdef"), max_size=30))
def test_fleet_with_a_past_equals_one_that_is_written_afresh(steps):
    """A cluster is put, a letter is removed; rows and columns must shift without a trace."""
    fleet = Fleet(capacity=1)
    present: dict[ClusterId, Cluster] = {}
    for step in steps:
        if isinstance(step, str):
            if present.pop(ClusterId(step), None) is not None:
                fleet.remove(ClusterId(step))
        else:
            put(fleet, step)
            present[step.id] = step
            fleet.set_nomination(step.id, (1, "abcdef".index(step.id)))
    fresh = Fleet()
    for cluster in present.values():
        put(fresh, cluster)
        fresh.set_nomination(cluster.id, (1, "abcdef".index(cluster.id)))
    assert contents(fleet) == contents(fresh)


def test_usable_clusters_stay_usable_when_the_arrays_grow():
    fleet = Fleet(capacity=2)
    for name in ("a", "b"):
        put(fleet, make.cluster(name))
    assert fleet.usable(NOON).all()  # cached from here on
    put(fleet, make.cluster("c"))
    assert fleet.usable(NOON).tolist() == [True, True, True]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([None, "a", "b", "c", "d"]))))
def test_each_row_has_the_value_it_was_given_last(steps):
    coded: DictionaryColumn[str] = DictionaryColumn(5)
    plain: list[str | None] = [None] * 5
    for row, value in steps:
        assert coded.set(row, value) == (plain[row] != value)
        plain[row] = value
    assert [coded.value(row) for row in range(5)] == plain
    assert set(coded.values()) == set(plain) - {None}
    assert len(coded) == len(set(plain) - {None})
    mask = coded.mask_where(lambda value: value in "ab", 5)
    assert mask.tolist() == [value in {None, "a", "b"} for value in plain]


def test_numbers_of_values_that_are_gone_are_used_again():
    coded: DictionaryColumn[int] = DictionaryColumn(2)
    for value in range(1000):
        coded.set(value % 2, value)
    assert coded.codes.max() <= 3
    assert coded.values() == [998, 999]
