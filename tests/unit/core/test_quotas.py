"""What a requester may hold, wait for and spend; and that it hears why not, with numbers."""

from datetime import timedelta

import pytest

import make
from kubelend.core import audit, errors, prices, quotas
from kubelend.core.events import Failed, Requested
from kubelend.core.lifecycle import Reason
from kubelend.core.models import ClusterId, Reservation, ReservationId

R = make.R
DAY = timedelta(days=1)
WAIT = {"wait": make.HOUR}


@pytest.fixture
def desk():
    return make.desk(a="cpu=64,memory=64Gi")


def priced(desk, per_hour="1", name="a", currency="EUR", offer="cpu=64,memory=64Gi"):
    """A provider that asks so much for a core."""
    return desk.advertise(name, offer, prices=make.price_list(currency, cpu=per_hour))


def exceeded(desk, *args, **fields):
    """Ask for what must exceed the quota; gives the sentence."""
    before = make.state(desk.ledger)
    with pytest.raises(errors.QuotaExceeded) as raised:
        desk.ask(*args, **fields)
    assert make.state(desk.ledger) == before
    return str(raised.value)


def spent(desk):
    account = desk.ledger.quota_usages.get(R)
    assert account is not None
    return prices.format_price(account.spent_today(desk.now))


# -- amounts and numbers


def test_amounts_are_bounded_with_numbers_in_the_sentence(desk):
    desk.allot("r", "cpu=32")
    desk.reserve("cpu=30,memory=1Gi")
    assert exceeded(desk, "cpu=4,memory=1Gi") == (
        "r holds 30 of 32 cpu, and 4 more would exceed its quota; request 2 cpu less"
    )
    desk.reserve("cpu=2,memory=9Gi")
    assert exceeded(desk, "cpu=1m,memory=1Gi") == (
        "r holds 32 of 32 cpu, and 1m more would exceed its quota;"
        " release some of it, or wait until reservations end"
    )


def test_zero_allows_none_and_what_is_not_named_is_free(desk):
    desk.allot("r", "gpu=0")
    desk.advertise("a", "cpu=64,memory=64Gi,gpu=8")
    desk.reserve("cpu=60,memory=60Gi")
    assert "r holds 0 of 0 gpu, and 1 more" in exceeded(desk, "cpu=1,memory=1Gi,gpu=1")


def test_quota_is_the_requesters_own(desk):
    desk.allot("r", "cpu=1")
    desk.reserve("cpu=9,memory=1Gi", requester="other")


def test_waiting_requests_count_so_that_serving_them_exceeds_nothing(desk):
    desk.allot("r", "cpu=70", reservations=3)
    held = desk.reserve("cpu=60,memory=1Gi")
    waiter = desk.reserve("cpu=10,memory=1Gi", **WAIT)
    assert exceeded(desk, "cpu=1,memory=1Gi", **WAIT) == (
        "r holds 60 and waits for 10 of 70 cpu, and 1 more would exceed its quota;"
        " release some of it, or wait until reservations end"
    )
    desk.release(held)
    assert desk[waiter].is_live
    desk.reserve("cpu=60,memory=1Gi", **WAIT)


def test_number_of_reservations_is_bounded_waiting_ones_too(desk):
    desk.allot("r", reservations=2)
    first = desk.reserve("cpu=60,memory=1Gi")
    desk.reserve("cpu=60,memory=1Gi", **WAIT)
    assert exceeded(desk, "cpu=1,memory=1Gi") == (
        "r has 2 of 2 reservations, and one more would exceed its quota;"
        " release a reservation, or wait until one ends"
    )
    desk.release(first)
    desk.reserve("cpu=1,memory=1Gi")


def test_same_key_is_answered_whatever_the_quota_says(desk):
    desk.allot("r", reservations=1)
    first = desk.reserve("cpu=1,memory=1Gi", key="k")
    assert desk.reserve("cpu=1,memory=1Gi", key="k") == first


def test_quota_that_is_lowered_takes_nothing_back_and_stops_who_waits(desk):
    held = desk.reserve("cpu=60,memory=1Gi")
    waiter = desk.reserve("cpu=20,memory=1Gi", **WAIT)
    assert desk.nominations() == {waiter: "a"}
    desk.allot("r", "cpu=10")
    assert desk[held].is_live
    assert desk.nominations() == {}, "a cluster is not kept for who may not have it"
    desk.release(held)
    assert desk[waiter].phase == "Pending"
    desk.allot("r", "cpu=20")
    assert desk[waiter].is_live


def test_quota_that_was_lowered_serves_a_waiter_once_enough_is_given_back(desk):
    first, second = (desk.reserve("cpu=30,memory=1Gi") for _ in range(2))
    waiter = desk.reserve("cpu=5,memory=1Gi", **WAIT)
    desk.allot("r", "cpu=35")
    desk.release(first)
    assert desk[waiter].is_live
    assert desk[second].is_live


def test_lifted_quota_bounds_nothing(desk):
    desk.allot("r", "cpu=1")
    desk.lift("r")
    desk.reserve("cpu=60,memory=1Gi")
    assert desk.ledger.quota_usages.get(R) is None


def test_quota_that_bounds_nothing_only_counts(desk):
    desk.allot("r")
    desk.reserve("cpu=60,memory=1Gi")
    account = desk.ledger.quota_usages.get(R)
    assert account is not None
    assert account.held == make.resources("cpu=60,memory=1Gi")


def test_excesses_say_all_at_once(desk):
    desk.allot("r", "cpu=1,memory=1Gi", reservations=0)
    found = quotas.quota_violations(desk.ledger, make.request("cpu=2,memory=2Gi"))
    assert [excess.message.split(",")[0] for excess in found] == [
        "r has 0 of 0 reservations",
        "r holds 0 of 1 cpu",
        "r holds 0 of 1Gi memory",
    ]
    assert quotas.quota_violations(desk.ledger, make.request("cpu=99", requester="other")) == ()


# -- budgets


def test_reservation_has_the_price_at_which_it_was_placed(desk):
    priced(desk, "0.05")
    held = desk.reserve("cpu=3,memory=1Gi")
    priced(desk, "9")
    assert (desk[held].hourly, desk[held].currency) == (150_000_000, "EUR")
    free = make.desk(b="cpu=4,memory=8Gi")
    placed = free[free.reserve("cpu=3,memory=1Gi")]
    assert (placed.hourly, placed.currency) == (0, "")


def test_budget_is_for_a_day_and_exact_to_the_billionth(desk):
    priced(desk)
    desk.allot("r", budget="10", currency="EUR")
    desk.reserve("cpu=4,memory=1Gi", duration=2 * make.HOUR)
    assert spent(desk) == "8"
    assert desk.refused("cpu=2001m,memory=1Gi") == "0/1 cluster fits: 1 OverBudget"
    desk.reserve("cpu=2,memory=1Gi")
    assert spent(desk) == "10"
    assert desk.refused("cpu=1m,memory=1Gi") == "0/1 cluster fits: 1 OverBudget"


def test_what_is_given_back_early_is_not_spent(desk):
    priced(desk)
    desk.allot("r", budget="10", currency="EUR")
    held = desk.reserve("cpu=5,memory=1Gi", duration=2 * make.HOUR)
    desk.pass_time(30 * make.MINUTE)
    desk.release(held)
    assert spent(desk) == "2.5"


def test_each_day_has_its_own_budget_and_a_reservation_has_to_fit_all_it_touches(desk):
    """At noon, a lease of 36 hours has 12 today and 24 tomorrow."""
    priced(desk)
    desk.allot("r", budget="24", currency="EUR")
    assert desk.refused("cpu=1001m,memory=1Gi", duration=1.5 * DAY).endswith("1 OverBudget")
    desk.reserve("cpu=1,memory=1Gi", duration=1.5 * DAY)
    assert spent(desk) == "12"
    desk.reserve("cpu=12,memory=1Gi")
    assert spent(desk) == "24"
    desk.pass_time(12 * make.HOUR)
    priced(desk)
    assert desk.refused("cpu=1m,memory=1Gi").endswith("1 OverBudget"), "tomorrow is paid for"


def test_cluster_without_a_price_is_free_and_another_currency_is_refused(desk):
    priced(desk, "1", "a")
    priced(desk, "1", "b", currency="USD")
    desk.allot("r", budget="0", currency="EUR")
    assert desk.refused("cpu=1,memory=1Gi") == (
        "0/2 clusters fit: 1 CurrencyMismatch, 1 OverBudget"
    )
    desk.advertise("c")
    assert desk.target(desk.reserve("cpu=1,memory=1Gi")) == "c"


def test_the_cheaper_cluster_is_taken_when_the_dearer_is_beyond_the_budget(desk):
    priced(desk, "9", "a")
    priced(desk, "1", "b", offer="cpu=2,memory=4Gi")
    desk.allot("r", budget="1", currency="EUR")
    assert desk.target(desk.reserve("cpu=1,memory=1Gi")) == "b"


def test_renewal_has_to_fit_the_budget_too(desk):
    priced(desk)
    desk.allot("r", budget="10", currency="EUR")
    held = desk.reserve("cpu=4,memory=1Gi", duration=make.HOUR)
    desk.renew(held, 2 * make.HOUR)
    revision = desk.ledger.revision
    with pytest.raises(errors.QuotaExceeded) as raised:
        desk.renew(held, 3 * make.HOUR)
    assert str(raised.value) == (
        f"the budget of r, 10 EUR a day, leaves 2 per hour, but {held} costs 4;"
        " renew it for a shorter time, or release other reservations"
    )
    assert desk.ledger.revision == revision
    desk.renew(held, 2 * make.HOUR + 30 * make.MINUTE)


def test_renewal_in_another_currency_than_the_budgets_is_refused(desk):
    priced(desk)
    held = desk.reserve("cpu=1,memory=1Gi")
    desk.allot("r", budget="99", currency="USD")
    with pytest.raises(errors.QuotaExceeded, match="costs EUR, but r has a budget in USD only"):
        desk.renew(held, 2 * make.HOUR)


def test_move_agrees_on_a_new_price_and_what_was_spent_stays_spent(desk):
    priced(desk, "1", "a")
    desk.allot("r", budget="10", currency="EUR")
    held = desk.reserve("cpu=2,memory=1Gi", duration=3 * make.HOUR)
    priced(desk, "2", "b", offer="cpu=4,memory=8Gi")
    desk.pass_time(make.HOUR)
    for name, price in (("a", "1"), ("b", "2")):
        priced(desk, price, name)
    desk.drain("a")
    assert (desk.target(held), desk[held].hourly) == ("b", 4 * 10**9)
    assert spent(desk) == "10", "2 for the first hour, 4 for each of the others"
    assert [charge.hourly for charge in desk[held].charges] == [2 * 10**9]


def test_move_to_what_the_budget_does_not_pay_for_is_none(desk):
    priced(desk, "1", "a")
    desk.allot("r", budget="10", currency="EUR")
    held = desk.reserve("cpu=2,memory=1Gi", duration=3 * make.HOUR)
    priced(desk, "2.000000001", "b", offer="cpu=4,memory=8Gi")
    desk.pass_time(make.MINUTE)
    desk.drain("a")
    assert desk[held].message.endswith("then 0/2 clusters fit: 1 LeftBefore, 1 OverBudget")


def test_waiter_is_served_when_the_budget_allows_for_it_again(desk):
    priced(desk)
    desk.allot("r", budget="10", currency="EUR")
    held = desk.reserve("cpu=10,memory=1Gi")
    waiter = desk.reserve("cpu=5,memory=1Gi", wait=DAY)
    assert desk.nominations() == {}, "a cluster is not kept for who cannot pay"
    desk.reserve("cpu=50,memory=1Gi", requester="other")
    desk.release(held)
    assert desk[waiter].is_live


def test_waiter_is_served_when_something_ends_elsewhere_that_it_could_not_have_used(desk):
    """What comes free is too small for it, but the money is enough."""
    priced(desk, "1", "a")
    priced(desk, "1", "b", offer="cpu=4,memory=8Gi")
    desk.allot("r", budget="10", currency="EUR")
    held = desk.reserve("cpu=4,memory=1Gi", pinned="b")
    waiter = desk.reserve("cpu=8,memory=1Gi", **WAIT)
    desk.release(held)
    assert desk.target(waiter) == "a"


def test_waiter_is_served_when_a_new_day_brings_a_new_budget(desk):
    priced(desk)
    desk.allot("r", budget="10", currency="EUR")
    desk.reserve("cpu=10,memory=1Gi", duration=make.HOUR)
    waiter = desk.reserve("cpu=5,memory=1Gi", wait=DAY)
    desk.pass_time(12 * make.HOUR - 5 * make.MINUTE)
    priced(desk)
    for _ in range(5):
        desk.expire()
        assert desk[waiter].phase == "Pending"
        desk.pass_time(make.MINUTE)
    desk.expire()
    assert desk[waiter].reserved_at == make.T0 + 12 * make.HOUR


def test_waiter_is_served_when_the_budget_is_raised(desk):
    priced(desk)
    desk.allot("r", budget="1", currency="EUR")
    waiter = desk.reserve("cpu=5,memory=1Gi", **WAIT)
    desk.allot("r", budget="5", currency="EUR")
    assert desk[waiter].is_live


def test_finished_reservation_stays_at_hand_while_its_day_counts(desk):
    priced(desk)
    desk.allot("r", budget="10", currency="EUR")
    paid = desk.reserve("cpu=10,memory=1Gi")
    free = desk.reserve("cpu=1,memory=1Gi", requester="other")
    for held in (paid, free):
        desk.pass_time(30 * make.MINUTE)
        desk.release(held)
    for hours in (1, 5, 4, 0.9):
        desk.pass_time(hours * make.HOUR)
        priced(desk)
        desk.expire(retention=make.MINUTE)
        assert paid in desk.ledger.reservations
        assert free not in desk.ledger.reservations
        assert spent(desk) == "5"
    desk.pass_time(make.HOUR)
    desk.expire(retention=make.MINUTE)
    assert paid not in desk.ledger.reservations
    account = desk.ledger.quota_usages.get(R)
    assert account is not None
    assert account.daily_spend.steps() == {}, "days that are over leave nothing behind"


def test_budget_that_is_set_later_counts_what_is_still_at_hand(desk):
    priced(desk)
    desk.release(desk.reserve("cpu=10,memory=1Gi"))
    held = desk.reserve("cpu=2,memory=1Gi")
    desk.pass_time(30 * make.MINUTE)
    desk.release(held)
    desk.allot("r", budget="10", currency="EUR")
    assert spent(desk) == "1"
    desk.pass_time(make.HOUR)
    desk.expire(retention=make.MINUTE)
    assert held in desk.ledger.reservations, "it was set before that was forgotten"


def test_restored_ledger_has_spent_the_same(desk):
    priced(desk)
    desk.allot("r", "cpu=20", budget="60", currency="EUR")
    desk.reserve("cpu=4,memory=1Gi", duration=DAY)
    desk.release(desk.reserve("cpu=4,memory=1Gi"))
    desk.reserve("cpu=9,memory=1Gi", **WAIT)
    restored = make.Recorder.restore(desk.kept())
    assert make.state(restored) == make.state(desk.ledger)
    assert restored.quota_usages.get(ClusterId("r")) is not None


def test_who_begins_to_wait_makes_nobody_look_again():
    """It leaves no room to those who wait already, and to look at all of them for each takes long."""
    desk = make.desk(a="cpu=1,memory=1Gi")
    desk.allot("r", reservations=9)
    desk.reserve("cpu=2,memory=1Gi", wait=make.HOUR)
    asked = make.request("cpu=3,memory=1Gi", wait=make.HOUR)
    waiter = Reservation(ReservationId("w"), asked, desk.now, wait_until=desk.now + make.HOUR)
    desk.ledger.apply(Requested(desk.now, waiter))
    assert desk.ledger.quota_changed == set()
    assert audit.invariant_violations(desk.ledger) == []
    desk.ledger.apply(Failed(desk.now, waiter.id, Reason.WAIT_TIMED_OUT, "over"))
    assert desk.ledger.quota_changed == {"r"}
