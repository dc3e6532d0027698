"""Drift of objects: how long it is tolerated, and how often it is repaired."""

import pytest

import broker_samples as samples
from clocks import Seconds
from kubelend.controllers.reconciler import DRIFT_DEADLINE, DRIFT_GRACE, MAX_REPAIRS, DriftTracker

FOUND = samples.wish()
CHANGED = samples.with_metadata(FOUND, resource_version="8")


class Queue:
    def __init__(self):
        self.later = []

    def add_after(self, name, delay):
        self.later.append((name, delay))


@pytest.fixture
def queue():
    return Queue()


@pytest.fixture
def clock():
    return Seconds(0.0)


@pytest.fixture
def drift(queue, clock):
    return DriftTracker(queue, clock)


def version(number):
    return samples.with_metadata(FOUND, resource_version=str(number))


def test_drift_is_persistent_if_nothing_changes_for_a_while(drift, queue):
    assert not drift.is_persistent(FOUND)
    assert queue.later == [("mine", DRIFT_GRACE)]
    assert drift.is_persistent(FOUND)


def test_every_change_begins_the_wait_anew(drift):
    drift.is_persistent(FOUND)
    assert not drift.is_persistent(CHANGED)
    drift.clear(CHANGED)
    assert not drift.is_persistent(CHANGED)


def test_same_mistake_is_not_written_for_ever(drift):
    assert [drift.may_repair(FOUND, "x") for _ in range(MAX_REPAIRS + 1)] == [
        *[True] * MAX_REPAIRS,
        False,
    ]
    assert drift.may_repair(FOUND, "y")


def test_edit_of_an_object_that_was_right_is_a_new_mistake(drift):
    for _ in range(2 * MAX_REPAIRS):
        assert drift.may_repair(FOUND, "x")
        drift.clear(FOUND)


def test_object_that_changes_all_the_time_is_persistent_at_last(drift, clock):
    """And again after as long, but not at every change."""
    persistent = []
    for number in range(24):
        if drift.is_persistent(version(number)):
            persistent.append(clock.now)
        clock.now += DRIFT_GRACE.total_seconds() / 2
    assert persistent == [DRIFT_DEADLINE.total_seconds(), 2 * DRIFT_DEADLINE.total_seconds()]


def test_what_others_write_after_the_broker_gave_up_is_a_new_mistake(drift):
    for number in range(MAX_REPAIRS):
        assert drift.may_repair(version(number), "x")
    for _ in range(2):
        assert not drift.may_repair(version(MAX_REPAIRS), "x")
    assert drift.may_repair(version(MAX_REPAIRS + 1), "x")
