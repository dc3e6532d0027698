"""Objects that seem spoilt: how long one waits, and how often one tries."""

import pytest

import broker_samples as samples
from kubelend.controllers.suspicions import GRAVE_AFTER, MOST_TRIES, Suspicions

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
def suspicions(looks):
    return Suspicions(looks)


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
