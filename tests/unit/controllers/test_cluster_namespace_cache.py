"""The cache of a cluster namespace's objects, and which of them are pending."""

import pytest
from msgspec.structs import replace

import make
from kubelend.broker import authorization, streams
from kubelend.controllers.cluster_namespaces.plan import NamespaceCache
from kubelend.core.lifecycle import Phase
from kubelend.core.models import ClusterId, ReservationId
from kubelend.stores.kubernetes import objects
from kubelend.wire import bodies, cluster_namespaces
from kubelend.wire.broker_objects import Reservation, ReservationSpec, ReservationStatus
from kubelend.wire.objects import BrokerResponse, Metadata

RECORD = make.reservation(
    "rsv-1", make.request(requester="rome", key="k"), phase=Phase.PENDING, revision=1
)
ID = ReservationId("rsv-1")
OWN = {objects.MANAGED_BY: objects.MANAGED_BY_BROKER}


def asked(version="1", uid="u", *, told=False):
    [part] = streams.instructions_for(ClusterId("rome"), RECORD)
    said = (
        BrokerResponse(body=cluster_namespaces.body_text(authorization.instruction_body(part, "")))
        if told
        else None
    )
    return Reservation(
        Metadata(
            "ask",
            "m",
            uid=uid,
            resource_version=version,
            annotations={cluster_namespaces.IDEMPOTENCY_ANNOTATION: "k"},
        ),
        ReservationSpec(bodies.Quantities("1", "1Gi")),
        ReservationStatus(response=said),
    )


def named(name, *, told=False, **metadata):
    found = asked(uid=f"u-{name}", told=told)
    return replace(found, metadata=replace(found.metadata, name=name, **metadata))


def leaving(found):
    return replace(found, metadata=replace(found.metadata, deletion_timestamp=make.T0))


def test_what_is_seen_is_pending_once():
    cache = NamespaceCache()
    assert cache.handle(asked())
    assert cache.pop_pending().objects == [asked()]
    assert cache.pop_pending() == ([], [])


def test_older_than_what_is_known_changes_nothing():
    cache = NamespaceCache()
    cache.handle(asked("10"))
    cache.pop_pending()
    assert not cache.handle(asked("9"))
    assert not cache.handle(asked("10"))
    assert cache.pop_pending().objects == []


def test_object_is_found_by_key_and_then_by_its_response():
    cache = NamespaceCache()
    assert cache.requester_object(ID, RECORD) is None
    cache.handle(asked())
    assert cache.requester_object(ID, RECORD) == asked()
    assert not cache.shows(ID)
    cache.handle(asked("2", told=True))
    assert cache.requester_object(ID, None) == asked("2", told=True)
    assert cache.shows(ID)


def test_question_that_is_being_deleted_is_not_told_of_what_comes_now():
    cache = NamespaceCache()
    cache.handle(leaving(asked()))
    assert cache.requester_object(ID, RECORD) is None


@pytest.mark.parametrize(
    "others, has_other",
    [
        pytest.param([], False, id="none"),
        pytest.param([named("other")], True, id="asks the same"),
        pytest.param([named("other", told=True)], True, id="tells of it"),
        pytest.param([leaving(named("other", told=True))], False, id="goes itself"),
        pytest.param([named("rsv-1", labels=OWN, annotations={})], True, id="shows it, soon"),
        pytest.param([named("rsv-2", labels=OWN, annotations={})], False, id="shows another"),
    ],
)
def test_reservation_has_other_objects(others, has_other):
    cache = NamespaceCache()
    for one in (asked(), *others):
        cache.handle(one)
    assert cache.has_other_object(RECORD, asked()) is has_other


def test_object_of_another_reservation_is_not_taken_for_it():
    cache = NamespaceCache()
    cache.handle(asked())
    other = replace(RECORD, request=make.request(requester="rome", key="other"))
    assert cache.requester_object(ReservationId("rsv-2"), other) is None


def test_end_of_an_object_is_news_of_its_reservation():
    cache = NamespaceCache()
    cache.handle(asked(told=True))
    cache.pop_pending()
    cache.on_delete(asked(told=True))
    assert cache.pop_pending() == ([], [ID])
    assert cache.requester_object(ID, RECORD) is None


def test_end_of_a_former_object_leaves_the_new_one():
    cache = NamespaceCache()
    cache.handle(asked("5", uid="new"))
    cache.on_delete(asked("4", uid="old"))
    assert cache.all() == [asked("5", uid="new")]
    cache.on_list("Reservation", {"new"})
    assert cache.all() == [asked("5", uid="new")]
    cache.on_list("Reservation", set())
    assert cache.all() == []


# -- lists beside the watch


def test_list_adds_to_what_the_watch_has_delivered():
    cache = NamespaceCache()
    cache.handle(asked("5"))
    cache.add_list(
        "Reservation", [asked("4"), replace(asked("3"), metadata=Metadata("b", uid="b"))]
    )
    assert [one.metadata.resource_version for one in cache.all()] == ["5", ""]
    assert not cache.awaits_list("Reservation")
    assert cache.awaits_list("ClusterSession")


def test_what_went_while_a_list_was_on_its_way_is_not_taken_from_it():
    cache = NamespaceCache()
    cache.on_delete(asked("5"))
    cache.add_list("Reservation", [asked("4")])
    assert cache.all() == []


def test_list_that_the_watch_has_overtaken_counts_for_nothing():
    cache = NamespaceCache()
    cache.on_list("Reservation", set())
    cache.add_list("Reservation", [asked("4")])
    assert cache.all() == []


def test_enqueue_all_makes_everything_pending():
    cache = NamespaceCache()
    cache.handle(asked(told=True))
    cache.pop_pending()
    cache.enqueue_all()
    assert cache.pop_pending() == ([asked(told=True)], [ID])
