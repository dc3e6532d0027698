"""What a stream of changes comes to: only what is really otherwise is told, and all of that."""

from typing import NamedTuple

import pytest
from structlog.testing import capture_logs

from kubelend.agent.ports import PodGone
from kubelend.core.pods import Pod
from kubelend.kube.answers import Unreadable
from kubelend.kube.watching import Deleted, Listed
from kubelend.sources.mirrors import RELISTED, Mirror


class Seen(NamedTuple):
    kept: Pod

    @property
    def key(self):
        return self.kept.id


def seen(id, node=""):
    return Seen(Pod(id, node))


def unreadable(uid, problem="is odd", is_deleted=False):
    return Unreadable("default", f"pod-{uid}", uid, problem, is_deleted)


@pytest.fixture
def mirror():
    return Mirror(PodGone, lambda one: one.uid)


def test_it_counts_how_often_all_was_listed(mirror):
    assert mirror.listings == 0
    assert mirror.take(Listed([], [])) is RELISTED
    assert mirror.listings == 1
    assert mirror.all() == []


def test_list_forgets_what_was_before(mirror):
    mirror.take(Listed([seen("a"), seen("b")], []))
    assert mirror.take(Listed([seen("b", "n"), seen("c")], [])) is RELISTED
    assert mirror.all() == [Pod("b", "n"), Pod("c")]


def test_changes_are_told_if_they_change_what_is_kept(mirror):
    mirror.take(Listed([seen("a")], []))
    assert mirror.take(seen("a")) is None
    assert mirror.take(seen("a", "n")) == Pod("a", "n")
    assert mirror.take(seen("b")) == Pod("b")
    assert mirror.take(Deleted(seen("a"))) == PodGone("a")
    assert mirror.take(Deleted(seen("a"))) is None
    assert mirror.all() == [Pod("b")]


def test_what_cannot_be_read_any_more_is_gone(mirror):
    mirror.take(Listed([seen("a")], []))
    assert mirror.take(unreadable("a")) == PodGone("a")
    assert mirror.take(seen("a")) == Pod("a")


def test_what_cannot_be_read_is_said_once_for_each_reason(mirror):
    with capture_logs() as logs:
        mirror.take(Listed([], [unreadable("a")]))
        mirror.take(unreadable("a"))
        mirror.take(Listed([], [unreadable("a")]))
        mirror.take(unreadable("a", "is odder"))
        mirror.take(unreadable("a", is_deleted=True))
        mirror.take(unreadable("b"))
    assert [(line["name"], line["error"]) for line in logs] == [
        ("default/pod-a", "is odd"),
        ("default/pod-a", "is odder"),
        ("default/pod-b", "is odd"),
    ]


def test_what_is_gone_and_comes_back_is_said_again(mirror):
    mirror.take(Listed([], [unreadable("a")]))
    mirror.take(Listed([], []))
    with capture_logs() as logs:
        mirror.take(Listed([], [unreadable("a")]))
    assert len(logs) == 1
