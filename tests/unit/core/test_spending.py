"""Money by day, counted with steps, is what counting each microsecond's day would give."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from kubelend.core.accounts import COST_UNITS_PER_BILLIONTH, CostInterval, DailySpend
from kubelend.core.timestamps import DAY_MICROS, HOUR_MICROS

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


def test_a_price_for_an_hour_is_that_much_money():
    spending = counted([CostInterval(HOUR_MICROS, 2 * HOUR_MICROS, 50)])
    assert spending.cost_on(0) == 50 * COST_UNITS_PER_BILLIONTH
    assert spending.cost_on(1) == 0


@given(st.lists(spans, max_size=6))
def test_each_day_has_what_falls_on_it(spans):
    spending = counted(spans)
    assert [spending.cost_on(day) for day in range(-1, 14)] == [
        plain(spans, d) for d in range(-1, 14)
    ]


@given(st.lists(spans, max_size=6), st.data())
def test_what_is_taken_back_leaves_no_trace(spans, data):
    spending = counted(spans)
    for span in data.draw(st.permutations(spans)):
        spending.remove(span)
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
    spending.remove(CostInterval(5 * HOUR_MICROS, CENTURIES, 7))
    assert len(spending.steps()) <= 3
