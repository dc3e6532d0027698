"""What a clerk knows of a mailbox's objects, and what is new of it."""

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


def test_what_is_seen_is_looked_at_once():
    shelf = NamespaceCache()
    assert shelf.handle(asked())
    assert shelf.pop_pending().objects == [asked()]
    assert shelf.pop_pending() == ([], [])


def test_older_than_what_is_known_changes_nothing():
    shelf = NamespaceCache()
    shelf.handle(asked("10"))
    shelf.pop_pending()
    assert not shelf.handle(asked("9"))
    assert not shelf.handle(asked("10"))
    assert shelf.pop_pending().objects == []


def test_object_is_found_by_key_and_then_by_what_it_tells():
    shelf = NamespaceCache()
    assert shelf.requester_object(ID, RECORD) is None
    shelf.handle(asked())
    assert shelf.requester_object(ID, RECORD) == asked()
    assert not shelf.shows(ID)
    shelf.handle(asked("2", told=True))
    assert shelf.requester_object(ID, None) == asked("2", told=True)
    assert shelf.shows(ID)


def test_question_that_is_being_deleted_is_not_told_of_what_comes_now():
    shelf = NamespaceCache()
    shelf.handle(leaving(asked()))
    assert shelf.requester_object(ID, RECORD) is None


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
    shelf = NamespaceCache()
    for one in (asked(), *others):
        shelf.handle(one)
    assert shelf.has_other_object(RECORD, asked()) is has_other


def test_object_of_another_reservation_is_not_taken_for_it():
    shelf = NamespaceCache()
    shelf.handle(asked())
    other = replace(RECORD, request=make.request(requester="rome", key="other"))
    assert shelf.requester_object(ReservationId("rsv-2"), other) is None


def test_end_of_an_object_is_news_of_its_reservation():
    shelf = NamespaceCache()
    shelf.handle(asked(told=True))
    shelf.pop_pending()
    shelf.on_delete(asked(told=True))
    assert shelf.pop_pending() == ([], [ID])
    assert shelf.requester_object(ID, RECORD) is None


def test_end_of_a_former_object_leaves_the_new_one():
    shelf = NamespaceCache()
    shelf.handle(asked("5", uid="new"))
    shelf.on_delete(asked("4", uid="old"))
    assert shelf.all() == [asked("5", uid="new")]
    shelf.on_list("Reservation", {"new"})
    assert shelf.all() == [asked("5", uid="new")]
    shelf.on_list("Reservation", set())
    assert shelf.all() == []


# -- lists beside the watch


def test_list_adds_to_what_the_watch_has_told():
    shelf = NamespaceCache()
    shelf.handle(asked("5"))
    shelf.add_list(
        "Reservation", [asked("4"), replace(asked("3"), metadata=Metadata("b", uid="b"))]
    )
    assert [one.metadata.resource_version for one in shelf.all()] == ["5", ""]
    assert not shelf.awaits_list("Reservation")
    assert shelf.awaits_list("ClusterSession")


def test_what_went_while_a_list_was_on_its_way_is_not_taken_from_it():
    shelf = NamespaceCache()
    shelf.on_delete(asked("5"))
    shelf.add_list("Reservation", [asked("4")])
    assert shelf.all() == []


def test_list_that_the_watch_has_overtaken_counts_for_nothing():
    shelf = NamespaceCache()
    shelf.on_list("Reservation", set())
    shelf.add_list("Reservation", [asked("4")])
    assert shelf.all() == []


def test_after_a_doubt_everything_is_looked_at():
    shelf = NamespaceCache()
    shelf.handle(asked(told=True))
    shelf.pop_pending()
    shelf.enqueue_all()
    assert shelf.pop_pending() == ([asked(told=True)], [ID])
