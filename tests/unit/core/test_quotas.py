"""Quotas and budgets of requesters, and the exact sums behind them."""

from datetime import timedelta
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import make
from kubelend.core import audit, errors, prices, quotas
from kubelend.core.accounts import COST_UNITS_PER_BILLIONTH, CostInterval, DailySpend
from kubelend.core.durations import DAY_MICROS, HOUR_MICROS
from kubelend.core.events import Failed, Requested
from kubelend.core.lifecycle import Reason
from kubelend.core.models import Reservation, ReservationId

R = make.R
DAY = timedelta(days=1)
WAIT = {"wait": make.HOUR}


@pytest.fixture
def runner():
    return make.runner(a="cpu=64,memory=64Gi")


def priced(runner, per_hour="1", name="a", currency="EUR", offer="cpu=64,memory=64Gi"):
    """A provider that asks so much for a core."""
    return runner.advertise(name, offer, prices=make.price_list(currency, cpu=per_hour))


def exceeded(runner, *args, **fields):
    """Ask for what must exceed the quota; gives the sentence."""
    before = make.state(runner.ledger)
    with pytest.raises(errors.QuotaExceeded) as raised:
        runner.ask(*args, **fields)
    assert make.state(runner.ledger) == before
    return str(raised.value)


def spent(runner):
    account = runner.ledger.quota_usages.get(R)
    assert account is not None
    return prices.format_price(account.spent_today(runner.now))


def test_amounts_are_bounded_with_numbers_in_the_sentence(runner):
    runner.allot("r", "cpu=32")
    runner.reserve("cpu=30,memory=1Gi")
    assert exceeded(runner, "cpu=4,memory=1Gi") == (
        "r holds 30 of 32 cpu, and 4 more would exceed its quota; request 2 cpu less"
    )
    runner.reserve("cpu=2,memory=9Gi")
    assert exceeded(runner, "cpu=1m,memory=1Gi") == (
        "r holds 32 of 32 cpu, and 1m more would exceed its quota;"
        " release some of it, or wait until reservations end"
    )


def test_zero_allows_none_and_what_is_not_named_is_free(runner):
    runner.allot("r", "gpu=0")
    runner.advertise("a", "cpu=64,memory=64Gi,gpu=8")
    runner.reserve("cpu=50,memory=50Gi")
    assert "r holds 0 of 0 gpu, and 1 more" in exceeded(runner, "cpu=1,memory=1Gi,gpu=1")
    runner.reserve("cpu=1,memory=1Gi,gpu=1", requester="other")
    runner.lift("r")
    runner.reserve("cpu=1,memory=1Gi,gpu=1")
    assert runner.ledger.quota_usages.get(R) is None


def test_waiting_requests_count_so_that_serving_them_exceeds_nothing(runner):
    runner.allot("r", "cpu=70", reservations=3)
    held = runner.reserve("cpu=60,memory=1Gi")
    waiter = runner.reserve("cpu=10,memory=1Gi", **WAIT)
    assert exceeded(runner, "cpu=1,memory=1Gi", **WAIT) == (
        "r holds 60 and waits for 10 of 70 cpu, and 1 more would exceed its quota;"
        " release some of it, or wait until reservations end"
    )
    runner.release(held)
    assert runner[waiter].is_live
    runner.reserve("cpu=60,memory=1Gi", **WAIT)


def test_number_of_reservations_is_bounded_waiting_ones_too(runner):
    runner.allot("r", reservations=2)
    first = runner.reserve("cpu=60,memory=1Gi", key="k")
    runner.reserve("cpu=60,memory=1Gi", **WAIT)
    assert runner.reserve("cpu=60,memory=1Gi", key="k") == first, "the same request again"
    assert exceeded(runner, "cpu=1,memory=1Gi") == (
        "r has 2 of 2 reservations, and one more would exceed its quota;"
        " release a reservation, or wait until one ends"
    )
    runner.release(first)
    runner.reserve("cpu=1,memory=1Gi")


def test_quota_that_is_lowered_takes_nothing_back_and_stops_who_waits(runner):
    held = runner.reserve("cpu=60,memory=1Gi")
    waiter = runner.reserve("cpu=20,memory=1Gi", **WAIT)
    assert runner.nominations() == {waiter: "a"}
    runner.allot("r", "cpu=10")
    assert runner[held].is_live
    assert runner.nominations() == {}, "a cluster is not kept for who may not have it"
    runner.release(held)
    assert runner[waiter].phase == "Pending"
    runner.allot("r", "cpu=20")
    assert runner[waiter].is_live


def test_excesses_say_all_at_once(runner):
    runner.allot("r", "cpu=1,memory=1Gi", reservations=0)
    found = quotas.quota_violations(runner.ledger, make.request("cpu=2,memory=2Gi"))
    assert [excess.message.split(",")[0] for excess in found] == [
        "r has 0 of 0 reservations",
        "r holds 0 of 1 cpu",
        "r holds 0 of 1Gi memory",
    ]
    assert quotas.quota_violations(runner.ledger, make.request("cpu=99", requester="other")) == ()


def test_reservation_has_the_price_at_which_it_was_placed(runner):
    priced(runner, "0.05")
    held = runner.reserve("cpu=3,memory=1Gi")
    priced(runner, "9")
    assert (runner[held].hourly, runner[held].currency) == (150_000_000, "EUR")
    free = make.runner(b="cpu=4,memory=8Gi")
    placed = free[free.reserve("cpu=3,memory=1Gi")]
    assert (placed.hourly, placed.currency) == (0, "")


def test_budget_is_for_a_day_and_exact_to_the_billionth(runner):
    priced(runner)
    runner.allot("r", budget="10", currency="EUR")
    runner.reserve("cpu=4,memory=1Gi", duration=2 * make.HOUR)
    assert spent(runner) == "8"
    assert runner.refused("cpu=2001m,memory=1Gi") == "0/1 cluster fits: 1 OverBudget"
    runner.reserve("cpu=2,memory=1Gi")
    assert spent(runner) == "10"
    assert runner.refused("cpu=1m,memory=1Gi") == "0/1 cluster fits: 1 OverBudget"


def test_what_is_given_back_early_is_not_spent(runner):
    priced(runner)
    runner.allot("r", budget="10", currency="EUR")
    held = runner.reserve("cpu=5,memory=1Gi", duration=2 * make.HOUR)
    runner.pass_time(30 * make.MINUTE)
    runner.release(held)
    assert spent(runner) == "2.5"


def test_each_day_has_its_own_budget_and_a_reservation_has_to_fit_all_it_touches(runner):
    """At noon, a lease of 36 hours has 12 today and 24 tomorrow."""
    priced(runner)
    runner.allot("r", budget="24", currency="EUR")
    assert runner.refused("cpu=1001m,memory=1Gi", duration=1.5 * DAY).endswith("1 OverBudget")
    runner.reserve("cpu=1,memory=1Gi", duration=1.5 * DAY)
    assert spent(runner) == "12"
    runner.reserve("cpu=12,memory=1Gi")
    assert spent(runner) == "24"
    runner.pass_time(12 * make.HOUR)
    priced(runner)
    assert runner.refused("cpu=1m,memory=1Gi").endswith("1 OverBudget"), "tomorrow is paid for"


def test_renewal_has_to_fit_the_budget_too(runner):
    priced(runner)
    runner.allot("r", budget="10", currency="EUR")
    held = runner.reserve("cpu=4,memory=1Gi", duration=make.HOUR)
    runner.renew(held, 2 * make.HOUR)
    revision = runner.ledger.revision
    with pytest.raises(errors.QuotaExceeded) as raised:
        runner.renew(held, 3 * make.HOUR)
    assert str(raised.value) == (
        f"the budget of r, 10 EUR a day, leaves 2 per hour, but {held} costs 4;"
        " renew it for a shorter time, or release other reservations"
    )
    assert runner.ledger.revision == revision
    runner.renew(held, 2 * make.HOUR + 30 * make.MINUTE)


def test_renewal_in_another_currency_than_the_budgets_is_refused(runner):
    priced(runner)
    held = runner.reserve("cpu=1,memory=1Gi")
    runner.allot("r", budget="99", currency="USD")
    with pytest.raises(errors.QuotaExceeded, match="costs EUR, but r has a budget in USD only"):
        runner.renew(held, 2 * make.HOUR)


def test_move_agrees_on_a_new_price_and_what_was_spent_stays_spent(runner):
    priced(runner, "1", "a")
    runner.allot("r", budget="10", currency="EUR")
    held = runner.reserve("cpu=2,memory=1Gi", duration=3 * make.HOUR)
    priced(runner, "2", "b", offer="cpu=4,memory=8Gi")
    runner.pass_time(make.HOUR)
    for name, price in (("a", "1"), ("b", "2")):
        priced(runner, price, name)
    runner.drain("a")
    assert (runner.target(held), runner[held].hourly) == ("b", 4 * 10**9)
    assert spent(runner) == "10", "2 for the first hour, 4 for each of the others"
    assert [charge.hourly for charge in runner[held].charges] == [2 * 10**9]


def test_move_to_what_the_budget_does_not_pay_for_is_none(runner):
    priced(runner, "1", "a")
    runner.allot("r", budget="10", currency="EUR")
    held = runner.reserve("cpu=2,memory=1Gi", duration=3 * make.HOUR)
    priced(runner, "2.000000001", "b", offer="cpu=4,memory=8Gi")
    runner.pass_time(make.MINUTE)
    runner.drain("a")
    assert runner[held].message.endswith("then 0/2 clusters fit: 1 OverBudget, 1 PreviousProvider")


def test_waiter_is_served_when_a_new_day_brings_a_new_budget(runner):
    priced(runner)
    runner.allot("r", budget="10", currency="EUR")
    runner.reserve("cpu=10,memory=1Gi", duration=make.HOUR)
    waiter = runner.reserve("cpu=5,memory=1Gi", wait=DAY)
    runner.pass_time(12 * make.HOUR - 5 * make.MINUTE)
    priced(runner)
    for _ in range(5):
        runner.expire()
        assert runner[waiter].phase == "Pending"
        runner.pass_time(make.MINUTE)
    runner.expire()
    assert runner[waiter].reserved_at == make.T0 + 12 * make.HOUR


def test_finished_reservation_stays_at_hand_while_its_day_counts(runner):
    priced(runner)
    runner.allot("r", budget="10", currency="EUR")
    paid = runner.reserve("cpu=10,memory=1Gi")
    free = runner.reserve("cpu=1,memory=1Gi", requester="other")
    for held in (paid, free):
        runner.pass_time(30 * make.MINUTE)
        runner.release(held)
    for hours in (1, 5, 4, 0.9):
        runner.pass_time(hours * make.HOUR)
        priced(runner)
        runner.expire(retention=make.MINUTE)
        assert paid in runner.ledger.reservations
        assert free not in runner.ledger.reservations
        assert spent(runner) == "5"
    runner.pass_time(make.HOUR)
    runner.expire(retention=make.MINUTE)
    assert paid not in runner.ledger.reservations
    account = runner.ledger.quota_usages.get(R)
    assert account is not None
    assert account.daily_spend.steps() == {}, "days that are over leave nothing behind"


def test_budget_that_is_set_later_counts_what_is_still_at_hand(runner):
    priced(runner)
    runner.release(runner.reserve("cpu=10,memory=1Gi"))
    held = runner.reserve("cpu=2,memory=1Gi")
    runner.pass_time(30 * make.MINUTE)
    runner.release(held)
    runner.allot("r", budget="10", currency="EUR")
    assert spent(runner) == "1"
    runner.pass_time(make.HOUR)
    runner.expire(retention=make.MINUTE)
    assert held in runner.ledger.reservations, "it was set before that was forgotten"


def test_who_begins_to_wait_makes_nobody_look_again():
    """It leaves no room to those who wait already, and to look at all of them for each takes long."""
    runner = make.runner(a="cpu=1,memory=1Gi")
    runner.allot("r", reservations=9)
    runner.reserve("cpu=2,memory=1Gi", wait=make.HOUR)
    asked = make.request("cpu=3,memory=1Gi", wait=make.HOUR)
    waiter = Reservation(ReservationId("w"), asked, runner.now, wait_until=runner.now + make.HOUR)
    runner.ledger.apply(Requested(runner.now, waiter))
    assert runner.ledger.quota_changed == set()
    assert audit.invariant_violations(runner.ledger) == []
    runner.ledger.apply(Failed(runner.now, waiter.id, Reason.WAIT_TIMED_OUT, "over"))
    assert runner.ledger.quota_changed == {"r"}


CENTURIES = 400 * 366 * DAY_MICROS

hours = st.integers(0, 24 * 6).map(lambda hour: hour * HOUR_MICROS)
odd = st.integers(0, 6 * DAY_MICROS)
spans = st.builds(
    lambda since, length, hourly: CostInterval(since, since + length, hourly),
    hours | odd,
    hours | odd,
    st.integers(0, 10**18),
)


def plain(spans, day):
    """What falls on a day, span by span."""
    return sum(
        max(min(span.until, DAY_MICROS * (day + 1)) - max(span.since, DAY_MICROS * day), 0)
        * span.hourly
        for span in spans
    )


def counted(spans):
    spending = DailySpend()
    for span in spans:
        spending.add(span)
    return spending


@given(st.lists(spans, max_size=6))
def test_each_day_has_what_falls_on_it(spans):
    spending = counted(spans)
    for day in range(-1, 14):
        assert spending.cost_on(day) == plain(spans, day)


@given(st.lists(spans, max_size=6), st.data())
def test_what_is_taken_back_leaves_no_trace(spans, data):
    spending = counted(spans)
    for span in data.draw(st.permutations(spans)):
        spending.add(span, -1)
    assert spending.steps() == {}


@given(
    st.lists(spans, max_size=5), hours | odd, st.integers(1, 6 * DAY_MICROS), st.integers(0, 10**19)
)
def test_the_highest_price_fits_every_day_and_a_billionth_more_does_not(
    spans, since, length, budget
):
    until = since + length
    most = counted(spans).max_hourly_price(budget * COST_UNITS_PER_BILLIONTH, since, until)

    def fits(hourly):
        mine = [*spans, CostInterval(since, until, hourly)]
        days = range(since // DAY_MICROS, (until - 1) // DAY_MICROS + 1)
        return all(plain(mine, day) <= budget * COST_UNITS_PER_BILLIONTH for day in days)

    if most >= 0:
        assert fits(most)
        assert not fits(most + 1)
    else:
        assert not fits(0)


def test_a_lease_for_centuries_costs_no_more_to_count_than_one_for_an_hour():
    spending = counted(
        [CostInterval(5 * HOUR_MICROS, CENTURIES, 7), CostInterval(CENTURIES // 2, CENTURIES, 1)]
    )
    assert len(spending.steps()) <= 8
    middle = CENTURIES // 2 // DAY_MICROS
    assert spending.cost_on(middle - 10) == 7 * DAY_MICROS
    assert spending.cost_on(middle + 10) == 8 * DAY_MICROS
    left = spending.max_hourly_price(10 * DAY_MICROS, 0, CENTURIES)
    assert left == Fraction(2)
    spending.add(CostInterval(5 * HOUR_MICROS, CENTURIES, 7), -1)
    assert len(spending.steps()) <= 3
