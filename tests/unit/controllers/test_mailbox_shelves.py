"""What a clerk knows of a mailbox's objects, and what is new of it."""

import pytest
from msgspec.structs import replace

import make
from kubelend.broker import instructions, parties
from kubelend.controllers.mailbox_shelves import Shelf
from kubelend.core.lifecycle import Phase
from kubelend.core.models import ClusterId, ReservationId
from kubelend.stores import kube_objects
from kubelend.wire import bodies, mailboxes
from kubelend.wire.broker_objects import Reservation, ReservationSpec, ReservationStatus
from kubelend.wire.objects import Metadata, Reply

RECORD = make.reservation(
    "rsv-1", make.request(requester="rome", key="k"), phase=Phase.PENDING, revision=1
)
ID = ReservationId("rsv-1")
OWN = {kube_objects.MADE_BY: kube_objects.BROKER}


def asked(version="1", uid="u", *, told=False):
    [part] = instructions.for_cluster(ClusterId("rome"), RECORD)
    said = Reply(body=mailboxes.text(parties.told(part, ""))) if told else None
    return Reservation(
        Metadata("ask", "m", uid=uid, resource_version=version, annotations={mailboxes.KEY: "k"}),
        ReservationSpec(bodies.Quantities("1", "1Gi")),
        ReservationStatus(response=said),
    )


def named(name, *, told=False, **metadata):
    found = asked(uid=f"u-{name}", told=told)
    return replace(found, metadata=replace(found.metadata, name=name, **metadata))


def leaving(found):
    return replace(found, metadata=replace(found.metadata, deletion_timestamp=make.T0))


def test_what_is_seen_is_looked_at_once():
    shelf = Shelf()
    assert shelf.see(asked())
    assert shelf.take().objects == [asked()]
    assert shelf.take() == ([], [])


def test_older_than_what_is_known_changes_nothing():
    shelf = Shelf()
    shelf.see(asked("10"))
    shelf.take()
    assert not shelf.see(asked("9"))
    assert not shelf.see(asked("10"))
    assert shelf.take().objects == []


def test_object_is_found_by_key_and_then_by_what_it_tells():
    shelf = Shelf()
    assert shelf.own(ID, RECORD) is None
    shelf.see(asked())
    assert shelf.own(ID, RECORD) == asked()
    assert not shelf.tells_of(ID)
    shelf.see(asked("2", told=True))
    assert shelf.own(ID, None) == asked("2", told=True)
    assert shelf.tells_of(ID)


def test_question_that_is_being_deleted_is_not_told_of_what_comes_now():
    shelf = Shelf()
    shelf.see(leaving(asked()))
    assert shelf.own(ID, RECORD) is None


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
    shelf = Shelf()
    for one in (asked(), *others):
        shelf.see(one)
    assert shelf.has_other(RECORD, asked()) is has_other


def test_object_of_another_reservation_is_not_taken_for_it():
    shelf = Shelf()
    shelf.see(asked())
    other = replace(RECORD, request=make.request(requester="rome", key="other"))
    assert shelf.own(ReservationId("rsv-2"), other) is None


def test_end_of_an_object_is_news_of_its_reservation():
    shelf = Shelf()
    shelf.see(asked(told=True))
    shelf.take()
    shelf.miss(asked(told=True))
    assert shelf.take() == ([], [ID])
    assert shelf.own(ID, RECORD) is None


def test_end_of_a_former_object_leaves_the_new_one():
    shelf = Shelf()
    shelf.see(asked("5", uid="new"))
    shelf.miss(asked("4", uid="old"))
    assert shelf.all() == [asked("5", uid="new")]
    shelf.keep_only("Reservation", {"new"})
    assert shelf.all() == [asked("5", uid="new")]
    shelf.keep_only("Reservation", set())
    assert shelf.all() == []


# -- lists beside the watch


def test_list_adds_to_what_the_watch_has_told():
    shelf = Shelf()
    shelf.see(asked("5"))
    shelf.fill("Reservation", [asked("4"), replace(asked("3"), metadata=Metadata("b", uid="b"))])
    assert [one.metadata.resource_version for one in shelf.all()] == ["5", ""]
    assert not shelf.awaits("Reservation")
    assert shelf.awaits("ClusterSession")


def test_what_went_while_a_list_was_on_its_way_is_not_taken_from_it():
    shelf = Shelf()
    shelf.miss(asked("5"))
    shelf.fill("Reservation", [asked("4")])
    assert shelf.all() == []


def test_list_that_the_watch_has_overtaken_counts_for_nothing():
    shelf = Shelf()
    shelf.keep_only("Reservation", set())
    shelf.fill("Reservation", [asked("4")])
    assert shelf.all() == []


def test_after_a_doubt_everything_is_looked_at():
    shelf = Shelf()
    shelf.see(asked(told=True))
    shelf.take()
    shelf.look_at_all()
    assert shelf.take() == ([asked(told=True)], [ID])
