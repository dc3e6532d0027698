"""The engine over columns decides exactly as the plain reference does, on whatever it is given."""

import random
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import make
import reference
from kubelend.core import decision, filters, quotas, scoring
from kubelend.core.decision import NoFit, Placement
from kubelend.core.errors import QuotaExceeded
from kubelend.core.ledger import Ledger
from kubelend.core.models import UNCONSTRAINED
from kubelend.core.prices import Prices
from kubelend.core.resources import Resources

MOST = 2**63 - 1
NAMES = ["a", "b", "c", "d", "e"]


def decided(question, ledger):
    answer = decision.decide_placement(question, ledger.fleet)
    return (answer.cluster, answer.score) if isinstance(answer, Placement) else None


def test_nobody_advertises():
    answer = decision.decide_placement(make.question(), Ledger().fleet)
    assert isinstance(answer, NoFit)
    assert str(answer.explanation) == "no cluster has advertised yet"


def test_requester_does_not_serve_itself():
    desk = make.desk(a="cpu=64,memory=64Gi", b="cpu=2,memory=2Gi")
    assert desk.target(desk.reserve("cpu=1,memory=1Gi", requester="a")) == "b"


def test_deciding_changes_nothing():
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    before = make.state(desk.ledger)
    first = decision.decide_placement(make.question(policy="balanced"), desk.ledger.fleet)
    decision.decide_placement(make.question("cpu=99"), desk.ledger.fleet)
    assert decision.decide_placement(make.question(policy="balanced"), desk.ledger.fleet) == first
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
        desk = make.Desk()
        for name in NAMES[: self.choice([0, 1, 3, 5, 5, 5])]:
            desk.advertise(name, self.offer(name))
        for _ in range(self.randint(0, 6)):
            desk.ask(self.request(4))
        self.limit(desk)
        for _ in range(self.randint(0, 3)):
            with suppress(QuotaExceeded):
                desk.ask(self.request(6, wait=self.choice([make.NO_TIME, make.HOUR])))
        if desk.ledger.clusters:
            self.rarely(desk.cordon, desk.uncordon)("a")
        return desk.ledger

    def limit(self, desk):
        """What administrators add to it, in half of all fleets."""
        if self.random() < 0.5:
            return
        for name in self.sample(NAMES, self.randint(0, 3)):
            desk.limit(name, self.policy())
        for name in ("r", self.choice(NAMES)):
            desk.allot(name, self.choice([self.quota(), make.quota()]))

    def question(self, ledger):
        now = make.T0 + self.choice([make.NO_TIME, make.NO_TIME, make.MINUTE, 5 * make.MINUTE])
        return replace(
            quotas.query_for_request(ledger, self.request(3), now),
            ticket=self.choice(
                [filters.NEW_REQUEST_TICKET, filters.NEW_REQUEST_TICKET, *range(5, 15)]
            ),
            excluded_before=self.rarely(("b", "gone"), ()),
        )


@settings(max_examples=1500)
@given(st.integers(0, 2**32))
def test_engine_equals_the_reference(seed):
    """The same choice with the same score, the same rejections of every cluster, the same prices."""
    dice = Dice(seed)
    ledger = dice.ledger()
    question = dice.question(ledger)
    until = question.now + question.request.duration
    max_hourly_price = reference.most_per_hour(
        ledger, question.request.requester, question.now, until
    )
    assert (question.budget and question.budget.max_hourly_price) == max_hourly_price
    assert decided(question, ledger) == reference.decide(question, ledger)
    verdicts = list(filters.filter_masks(question, ledger.fleet))
    passing = filters.feasible_clusters(question, ledger.fleet).tolist()
    hourly = filters.hourly_costs(question.request, ledger.fleet).tolist()
    for row, name in enumerate(ledger.fleet.ids):
        cluster = ledger.clusters[name]
        rejections = [rejection for rejection, mask in verdicts if not mask[row]]
        assert rejections == reference.rejections(question, cluster, ledger)
        assert passing[row] == (not rejections)
        assert hourly[row] == reference.price(question.request, cluster)
        prices, wanted = cluster.advertisement.prices, question.request.resources
        assert prices is None or prices.hourly_cost(wanted) == reference.agreed(
            question.request, cluster
        )


@settings(max_examples=500)
@given(st.integers(0, 2**32), st.booleans())
def test_passing_is_all_verdicts_folded_together(seed, constrained):
    """Requests without constraints take a shorter way through the filters, to the same clusters."""
    dice = Dice(seed)
    ledger = dice.ledger()
    fleet, question = ledger.fleet, dice.question(ledger)
    if not constrained:
        plain = replace(question.request, constraints=UNCONSTRAINED)
        question = replace(question, request=plain)
    everyone = np.ones(len(fleet), np.bool_)
    masks = [mask for _, mask in filters.filter_masks(question, fleet)]
    together = np.logical_and.reduce([everyone, *masks])
    assert filters.feasible_clusters(question, fleet).tolist() == together.tolist()


def test_equal_sums_of_other_parts_are_equal_and_the_smaller_id_wins():
    """0.1 + 0.5 is not 0.2 + 0.4 in floating point, but it is in the contract."""
    desk = make.Desk()
    desk.advertise("a", "cpu=10,memory=10Gi", allocated="cpu=9,memory=5Gi")
    desk.advertise("b", "cpu=10,memory=10Gi", allocated="cpu=8,memory=6Gi")
    held = desk.reserve("cpu=100m,memory=100Mi")
    assert desk[held].target == "a"
