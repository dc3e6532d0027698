"""Pauses grow, have an end and a longest, and differ between clients."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from kubelend.kits import backoff
from kubelend.kits.backoff import Backoff


def test_pauses_double_up_to_the_longest():
    steps = Backoff(retries=5, first=timedelta(seconds=1), longest=timedelta(seconds=5))
    assert list(steps.delays(chance=lambda: 0.0)) == [1, 2, 4, 5, 5]


def test_chance_takes_up_to_half_away():
    steps = Backoff(retries=2, first=timedelta(seconds=1))
    assert list(steps.delays(chance=lambda: 1.0)) == [0.5, 1.0]


def test_two_clients_do_not_come_back_in_step():
    assert list(Backoff().delays()) != list(Backoff().delays())


def test_none_is_none():
    assert list(backoff.NO_RETRIES.delays()) == []


@given(retries=st.integers(0, 200), chance=st.floats(0, 1))
def test_no_pause_is_ever_longer_than_the_longest(retries, chance):
    steps = Backoff(retries=retries, longest=timedelta(seconds=3))
    pauses = list(steps.delays(chance=lambda: chance))
    assert len(pauses) == retries
    assert all(0 < pause <= 3 for pause in pauses)
