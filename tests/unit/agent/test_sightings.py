"""Which requests there are, what is reason enough to look at one, and which went without leave."""

from msgspec.structs import replace

import make
from kubelend.agent.ports import Deleted, Listed
from kubelend.agent.requester import RequestCache
from kubelend.wire.objects import (
    Metadata,
    ResourceRequest,
    ResourceRequestSpec,
    ResourceRequestStatus,
)


def wish(name="w", uid="u", generation=1, version="1", **status):
    metadata = Metadata(name, uid=uid, generation=generation, resource_version=version)
    return ResourceRequest(
        metadata, ResourceRequestSpec("1", "1Gi"), ResourceRequestStatus(**status)
    )


def seeing(*events):
    looks: list[str] = []
    sightings = RequestCache(looks.append)
    for event in events:
        sightings.handle_event(event)
    return sightings, looks


def test_it_is_complete_once_all_are_listed():
    assert not seeing(wish())[0].is_synced
    assert seeing(Listed([]))[0].is_synced


def test_a_new_one_and_a_new_wish_are_looked_at_and_what_we_write_is_not():
    gone = replace(wish(), metadata=replace(wish().metadata, deletion_timestamp=make.T0))
    told = wish(version="2", phase="Pending")
    for events, count in [
        ([wish()], 1),
        ([Listed([wish()])], 1),
        ([wish(), told], 1),
        ([wish(), Listed([told])], 1),
        ([wish(), wish(generation=2)], 2),
        ([wish(), gone], 2),
    ]:
        assert seeing(*events)[1] == ["default/w"] * count


def test_a_reservation_belongs_to_whose_status_names_it():
    sightings, _ = seeing(wish(reservation_name="r"))
    assert sightings.owner("r") == "default/w"
    assert sightings.owner("other") == ""
    sightings.unbind("r")
    assert sightings.owner("r") == ""


def test_nothing_is_known_of_the_reservations_of_those_that_are_gone():
    for is_free in (True, False):
        going = wish(reservation_name="r")
        sightings, _ = seeing(going)
        sightings.bind("never written down", going.key)
        sightings.bind("of another", "default/other")
        if is_free:
            sightings.mark_released(going)
        sightings.handle_event(Deleted(going))
        sightings.forget_deleted(going)
        owners = [sightings.owner(name) for name in ("r", "never written down", "of another")]
        assert owners == ["", "", "default/other"]


def test_one_made_anew_keeps_what_it_has():
    old, new = wish(uid="1", reservation_name="old"), wish(uid="2", reservation_name="new")
    sightings, _ = seeing(old, Deleted(old), new)
    sightings.forget_deleted(old)
    assert sightings.owner("new") == "default/w"


def test_a_reservation_that_its_request_names_no_more_is_nobodys():
    sightings, _ = seeing(wish(reservation_name="old"), wish(reservation_name="new"))
    assert (sightings.owner("old"), sightings.owner("new")) == ("", "default/w")
    sightings.handle_event(wish())
    assert sightings.owner("new") == ""


def test_one_that_goes_unseen_is_lost_however_that_is_noticed():
    old = wish()
    for event in (Deleted(old), Listed([]), wish(uid="v"), Listed([wish(uid="v")])):
        sightings, looks = seeing(old, event)
        assert sightings.deleted_unfinalized("default/w") == [old]
        assert looks[-1] == "default/w"
        sightings.forget_deleted(old)
        assert sightings.deleted_unfinalized("default/w") == []


def test_one_that_was_free_to_go_is_not_lost():
    sightings, _ = seeing(wish())
    sightings.mark_released(wish())
    sightings.handle_event(Deleted(wish()))
    assert sightings.deleted_unfinalized("default/w") == []


def test_each_that_went_under_one_name_is_lost_until_it_is_buried():
    first, second = wish(uid="1"), wish(uid="2")
    sightings, _ = seeing(first, Deleted(first), second, Deleted(second))
    assert sightings.deleted_unfinalized("default/w") == [first, second]
    sightings.forget_deleted(first)
    assert sightings.deleted_unfinalized("default/w") == [second]


def test_a_late_word_of_one_that_is_gone_does_not_hide_the_new_one():
    first, second = wish(uid="1"), wish(uid="2")
    sightings, looks = seeing(second, Deleted(first))
    sightings.handle_event(wish(uid="2", version="9"))
    assert looks == ["default/w", "default/w"]
