"""What is remembered of the objects that a watch tells of, and of those that have gone."""

from typing import Any

import pytest
from structlog.testing import capture_logs

import broker_samples as samples
from kubelend.kube.codec import UndecodableObject
from kubelend.kube.informer import Deleted, InformerCache, Listed

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
    mirror = InformerCache(looks.append, turns.append)
    mirror.handle(Listed([A], []))
    looks.clear()
    return mirror


def test_all_are_looked_at_when_they_are_listed(looks):
    mirror: InformerCache[Any] = InformerCache(looks.append)
    assert not mirror.has_synced
    mirror.handle(Listed([A, B], []))
    assert (looks, mirror.has_synced, mirror.find("a")) == (["a", "b"], True, A)


def test_change_is_told_with_what_was_before(mirror, looks, turns):
    mirror.handle(CHANGED)
    assert (looks, turns) == (["a"], [(A, CHANGED)])
    mirror.handle(CHANGED)
    assert len(turns) == 1


def test_gone_is_remembered_until_it_is_buried(mirror, looks):
    mirror.handle(Deleted(CHANGED))
    assert (mirror.find("a"), mirror.tombstones("a"), looks) == (None, [CHANGED], ["a"])
    mirror.enqueue_all()
    assert looks == ["a", "a"]
    mirror.forget(CHANGED)
    assert mirror.tombstones("a") == []


def test_whoever_is_missing_from_a_list_has_gone(mirror):
    mirror.handle(Listed([B], []))
    assert (mirror.tombstones("a"), mirror.find("b")) == ([A], B)


def test_another_of_the_same_name_means_that_the_first_has_gone(mirror, turns):
    mirror.handle(ANEW)
    assert (mirror.find("a"), mirror.tombstones("a"), turns) == (ANEW, [A], [])


def test_late_word_of_an_end_does_not_end_the_next(mirror):
    mirror.handle(ANEW)
    mirror.handle(Deleted(A))
    assert mirror.find("a") == ANEW


def test_what_cannot_be_read_has_not_gone(mirror):
    unreadable = UndecodableObject("hub", "a", A.metadata.uid, "nonsense")
    mirror.handle(unreadable)
    mirror.handle(Listed([], [unreadable]))
    assert mirror.tombstones("a") == []


ODD = UndecodableObject("hub", "a", A.metadata.uid, "nonsense")


def test_what_cannot_be_read_is_told_once_and_looked_at(mirror, looks):
    with capture_logs() as logs:
        mirror.handle(ODD)
        mirror.handle(Listed([], [ODD]))
    assert (len(logs), looks, mirror.undecodable("a")) == (1, ["a"], ODD)
    mirror.enqueue_all()
    assert looks == ["a", "a"]


@pytest.mark.parametrize("change", [A, Listed([], []), ODD._replace(is_deleted=True)])
def test_what_is_mended_or_gone_is_not_undecodable_any_more(mirror, change):
    mirror.handle(ODD)
    mirror.handle(change)
    assert mirror.undecodable("a") is None


def test_end_that_cannot_be_read_is_an_end(mirror):
    mirror.handle(ODD._replace(is_deleted=True))
    assert (mirror.find("a"), mirror.tombstones("a")) == (None, [A])
