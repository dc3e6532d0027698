"""What a stream of changes comes to: only what is really otherwise is told, and all of that."""

from typing import NamedTuple

import pytest
from structlog.testing import capture_logs

from kubelend.agent.ports import PodDeleted
from kubelend.core.pod_requests import Pod
from kubelend.kube.codec import UndecodableObject
from kubelend.kube.informer import Deleted, Listed
from kubelend.sources.kubernetes import RELISTED, ProjectionCache


class Projected(NamedTuple):
    projected: Pod

    @property
    def key(self):
        return self.projected.id


def projected(id, node=""):
    return Projected(Pod(id, node))


def unreadable(uid, error="is odd", is_deleted=False):
    return UndecodableObject("default", f"pod-{uid}", uid, error, is_deleted)


@pytest.fixture
def cache():
    return ProjectionCache(PodDeleted, lambda one: one.uid)


def test_it_counts_how_often_all_was_listed(cache):
    assert cache.list_count == 0
    assert cache.handle_event(Listed([], [])) is RELISTED
    assert cache.list_count == 1
    assert cache.all() == []


def test_list_forgets_what_was_before(cache):
    cache.handle_event(Listed([projected("a"), projected("b")], []))
    assert cache.handle_event(Listed([projected("b", "n"), projected("c")], [])) is RELISTED
    assert cache.all() == [Pod("b", "n"), Pod("c")]


def test_changes_are_told_if_they_change_what_is_kept(cache):
    cache.handle_event(Listed([projected("a")], []))
    assert cache.handle_event(projected("a")) is None
    assert cache.handle_event(projected("a", "n")) == Pod("a", "n")
    assert cache.handle_event(projected("b")) == Pod("b")
    assert cache.handle_event(Deleted(projected("a"))) == PodDeleted("a")
    assert cache.handle_event(Deleted(projected("a"))) is None
    assert cache.all() == [Pod("b")]


def test_what_cannot_be_read_any_more_is_gone(cache):
    cache.handle_event(Listed([projected("a")], []))
    assert cache.handle_event(unreadable("a")) == PodDeleted("a")
    assert cache.handle_event(projected("a")) == Pod("a")


def test_what_cannot_be_read_is_said_once_for_each_reason(cache):
    with capture_logs() as logs:
        cache.handle_event(Listed([], [unreadable("a")]))
        cache.handle_event(unreadable("a"))
        cache.handle_event(Listed([], [unreadable("a")]))
        cache.handle_event(unreadable("a", "is odder"))
        cache.handle_event(unreadable("a", is_deleted=True))
        cache.handle_event(unreadable("b"))
    assert [(line["name"], line["error"]) for line in logs] == [
        ("default/pod-a", "is odd"),
        ("default/pod-a", "is odder"),
        ("default/pod-b", "is odd"),
    ]


def test_what_is_gone_and_comes_back_is_said_again(cache):
    cache.handle_event(Listed([], [unreadable("a")]))
    cache.handle_event(Listed([], []))
    with capture_logs() as logs:
        cache.handle_event(Listed([], [unreadable("a")]))
    assert len(logs) == 1
