"""Objects that seem spoilt: how long one waits, and how often one tries."""

import pytest

import broker_samples as samples
from clocks import Seconds
from kubelend.controllers.reconciler import DRIFT_DEADLINE, DRIFT_GRACE, MAX_REPAIRS, DriftTracker

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
    return DriftTracker(looks, clock)


def version(number):
    return samples.with_metadata(FOUND, resource_version=str(number))


def test_suspicion_is_grave_if_nothing_changes_for_a_while(suspicions, looks):
    assert not suspicions.is_persistent(FOUND)
    assert looks.later == [("mine", DRIFT_GRACE)]
    assert suspicions.is_persistent(FOUND)


def test_every_change_begins_the_wait_anew(suspicions):
    suspicions.is_persistent(FOUND)
    assert not suspicions.is_persistent(CHANGED)
    suspicions.clear(CHANGED)
    assert not suspicions.is_persistent(CHANGED)


def test_same_mistake_is_not_written_for_ever(suspicions):
    assert [suspicions.may_repair(FOUND, "x") for _ in range(MAX_REPAIRS + 1)] == [
        *[True] * MAX_REPAIRS,
        False,
    ]
    assert suspicions.may_repair(FOUND, "y")


def test_edit_of_an_object_that_was_right_is_a_new_mistake(suspicions):
    for _ in range(2 * MAX_REPAIRS):
        assert suspicions.may_repair(FOUND, "x")
        suspicions.clear(FOUND)


def test_object_that_changes_all_the_time_is_grave_at_last(suspicions, clock):
    """And again after as long, but not at every change."""
    grave = []
    for number in range(24):
        if suspicions.is_persistent(version(number)):
            grave.append(clock.now)
        clock.now += DRIFT_GRACE.total_seconds() / 2
    assert grave == [DRIFT_DEADLINE.total_seconds(), 2 * DRIFT_DEADLINE.total_seconds()]


def test_what_others_write_after_the_broker_gave_up_is_a_new_mistake(suspicions):
    for number in range(MAX_REPAIRS):
        assert suspicions.may_repair(version(number), "x")
    for _ in range(2):
        assert not suspicions.may_repair(version(MAX_REPAIRS), "x")
    assert suspicions.may_repair(version(MAX_REPAIRS + 1), "x")
