"""What is remembered of the objects that a watch tells of, and of those that have gone."""

from typing import Any

import pytest
from structlog.testing import capture_logs

import broker_samples as samples
from kubelend.controllers.mirrors import Mirror
from kubelend.kube.answers import Unreadable
from kubelend.kube.watching import Deleted, Listed

A, B = samples.wish("a"), samples.wish("b")
B = samples.with_metadata(B, uid="u-b")
CHANGED = samples.with_status(A, phase="Failed")
ANEW = samples.with_metadata(A, uid="u-2")


@pytest.fixture
def looks():
    return []


@pytest.fixture
def turns():
    return []


@pytest.fixture
def mirror(looks, turns):
    mirror = Mirror(looks.append, turns.append)
    mirror.take(Listed([A], []))
    looks.clear()
    return mirror


def test_all_are_looked_at_when_they_are_listed(looks):
    mirror: Mirror[Any] = Mirror(looks.append)
    assert not mirror.is_complete
    mirror.take(Listed([A, B], []))
    assert (looks, mirror.is_complete, mirror.find("a")) == (["a", "b"], True, A)


def test_change_is_told_with_what_was_before(mirror, looks, turns):
    mirror.take(CHANGED)
    assert (looks, turns) == (["a"], [(A, CHANGED)])
    mirror.take(CHANGED)
    assert len(turns) == 1


def test_gone_is_remembered_until_it_is_buried(mirror, looks):
    mirror.take(Deleted(CHANGED))
    assert (mirror.find("a"), mirror.gone("a"), looks) == (None, [CHANGED], ["a"])
    mirror.look_at_all()
    assert looks == ["a", "a"]
    mirror.bury(CHANGED)
    assert mirror.gone("a") == []


def test_whoever_is_missing_from_a_list_has_gone(mirror):
    mirror.take(Listed([B], []))
    assert (mirror.gone("a"), mirror.find("b")) == ([A], B)


def test_another_of_the_same_name_means_that_the_first_has_gone(mirror, turns):
    mirror.take(ANEW)
    assert (mirror.find("a"), mirror.gone("a"), turns) == (ANEW, [A], [])


def test_late_word_of_an_end_does_not_end_the_next(mirror):
    mirror.take(ANEW)
    mirror.take(Deleted(A))
    assert mirror.find("a") == ANEW


def test_what_cannot_be_read_has_not_gone(mirror):
    unreadable = Unreadable("hub", "a", A.metadata.uid, "nonsense")
    mirror.take(unreadable)
    mirror.take(Listed([], [unreadable]))
    assert mirror.gone("a") == []


ODD = Unreadable("hub", "a", A.metadata.uid, "nonsense")


def test_what_cannot_be_read_is_told_once_and_looked_at(mirror, looks):
    with capture_logs() as logs:
        mirror.take(ODD)
        mirror.take(Listed([], [ODD]))
    assert (len(logs), looks, mirror.unreadable("a")) == (1, ["a"], ODD)
    mirror.look_at_all()
    assert looks == ["a", "a"]


@pytest.mark.parametrize("change", [A, Listed([], []), ODD._replace(is_deleted=True)])
def test_what_is_mended_or_gone_is_no_riddle_any_more(mirror, change):
    mirror.take(ODD)
    mirror.take(change)
    assert mirror.unreadable("a") is None


def test_end_that_cannot_be_read_is_an_end(mirror):
    mirror.take(ODD._replace(is_deleted=True))
    assert (mirror.find("a"), mirror.gone("a")) == (None, [A])
