"""What a stream of changes comes to: only what is really otherwise is told, and all of that."""

from typing import NamedTuple

import pytest
from structlog.testing import capture_logs

from kubelend.agent.ports import PodDeleted
from kubelend.core.pod_requests import Pod
from kubelend.kube.codec import UndecodableObject
from kubelend.kube.informer import Deleted, Listed
from kubelend.sources.kubernetes import RELISTED, ProjectionCache


class Seen(NamedTuple):
    kept: Pod

    @property
    def key(self):
        return self.kept.id


def seen(id, node=""):
    return Seen(Pod(id, node))


def unreadable(uid, problem="is odd", is_deleted=False):
    return UndecodableObject("default", f"pod-{uid}", uid, problem, is_deleted)


@pytest.fixture
def mirror():
    return ProjectionCache(PodDeleted, lambda one: one.uid)


def test_it_counts_how_often_all_was_listed(mirror):
    assert mirror.list_count == 0
    assert mirror.handle_event(Listed([], [])) is RELISTED
    assert mirror.list_count == 1
    assert mirror.all() == []


def test_list_forgets_what_was_before(mirror):
    mirror.handle_event(Listed([seen("a"), seen("b")], []))
    assert mirror.handle_event(Listed([seen("b", "n"), seen("c")], [])) is RELISTED
    assert mirror.all() == [Pod("b", "n"), Pod("c")]


def test_changes_are_told_if_they_change_what_is_kept(mirror):
    mirror.handle_event(Listed([seen("a")], []))
    assert mirror.handle_event(seen("a")) is None
    assert mirror.handle_event(seen("a", "n")) == Pod("a", "n")
    assert mirror.handle_event(seen("b")) == Pod("b")
    assert mirror.handle_event(Deleted(seen("a"))) == PodDeleted("a")
    assert mirror.handle_event(Deleted(seen("a"))) is None
    assert mirror.all() == [Pod("b")]


def test_what_cannot_be_read_any_more_is_gone(mirror):
    mirror.handle_event(Listed([seen("a")], []))
    assert mirror.handle_event(unreadable("a")) == PodDeleted("a")
    assert mirror.handle_event(seen("a")) == Pod("a")


def test_what_cannot_be_read_is_said_once_for_each_reason(mirror):
    with capture_logs() as logs:
        mirror.handle_event(Listed([], [unreadable("a")]))
        mirror.handle_event(unreadable("a"))
        mirror.handle_event(Listed([], [unreadable("a")]))
        mirror.handle_event(unreadable("a", "is odder"))
        mirror.handle_event(unreadable("a", is_deleted=True))
        mirror.handle_event(unreadable("b"))
    assert [(line["name"], line["error"]) for line in logs] == [
        ("default/pod-a", "is odd"),
        ("default/pod-a", "is odder"),
        ("default/pod-b", "is odd"),
    ]


def test_what_is_gone_and_comes_back_is_said_again(mirror):
    mirror.handle_event(Listed([], [unreadable("a")]))
    mirror.handle_event(Listed([], []))
    with capture_logs() as logs:
        mirror.handle_event(Listed([], [unreadable("a")]))
    assert len(logs) == 1
