"""Objects that seem spoilt: how long one waits, and how often one tries."""

import pytest

import broker_samples as samples
from clocks import Seconds
from kubelend.controllers.suspicions import GRAVE_AFTER, GRAVE_AT_LAST, MOST_TRIES, Suspicions

FOUND = samples.wish()
CHANGED = samples.with_metadata(FOUND, resource_version="8")


class Looks:
    def __init__(self):
        self.later = []

    def add_after(self, name, delay):
        self.later.append((name, delay))


@pytest.fixture
def looks():
    return Looks()


@pytest.fixture
def clock():
    return Seconds(0.0)


@pytest.fixture
def suspicions(looks, clock):
    return Suspicions(looks, clock)


def version(number):
    return samples.with_metadata(FOUND, resource_version=str(number))


def test_suspicion_is_grave_if_nothing_changes_for_a_while(suspicions, looks):
    assert not suspicions.is_grave(FOUND)
    assert looks.later == [("mine", GRAVE_AFTER)]
    assert suspicions.is_grave(FOUND)


def test_every_change_begins_the_wait_anew(suspicions):
    suspicions.is_grave(FOUND)
    assert not suspicions.is_grave(CHANGED)
    suspicions.clear(CHANGED)
    assert not suspicions.is_grave(CHANGED)


def test_same_mistake_is_not_written_for_ever(suspicions):
    assert [suspicions.may_write(FOUND, "x") for _ in range(MOST_TRIES + 1)] == [
        *[True] * MOST_TRIES,
        False,
    ]
    assert suspicions.may_write(FOUND, "y")


def test_edit_of_an_object_that_was_right_is_a_new_mistake(suspicions):
    for _ in range(2 * MOST_TRIES):
        assert suspicions.may_write(FOUND, "x")
        suspicions.clear(FOUND)


def test_object_that_changes_all_the_time_is_grave_at_last(suspicions, clock):
    """And again after as long, but not at every change."""
    grave = []
    for number in range(24):
        if suspicions.is_grave(version(number)):
            grave.append(clock.now)
        clock.now += GRAVE_AFTER.total_seconds() / 2
    assert grave == [GRAVE_AT_LAST.total_seconds(), 2 * GRAVE_AT_LAST.total_seconds()]


def test_what_others_write_after_the_broker_gave_up_is_a_new_mistake(suspicions):
    for number in range(MOST_TRIES):
        assert suspicions.may_write(version(number), "x")
    for _ in range(2):
        assert not suspicions.may_write(version(MOST_TRIES), "x")
    assert suspicions.may_write(version(MOST_TRIES + 1), "x")
