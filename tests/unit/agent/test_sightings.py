"""Which requests there are, which changes enqueue one, and which were deleted without their finalizer."""

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


def resource_request(name="w", uid="u", generation=1, version="1", **status):
    metadata = Metadata(name, uid=uid, generation=generation, resource_version=version)
    return ResourceRequest(
        metadata, ResourceRequestSpec("1", "1Gi"), ResourceRequestStatus(**status)
    )


def cache_after(*events):
    reconciled: list[str] = []
    cache = RequestCache(reconciled.append)
    for event in events:
        cache.handle_event(event)
    return cache, reconciled


def test_it_is_complete_once_all_are_listed():
    assert not cache_after(resource_request())[0].is_synced
    assert cache_after(Listed([]))[0].is_synced


def test_a_new_one_and_a_new_spec_are_reconciled_and_what_we_write_is_not():
    gone = replace(
        resource_request(),
        metadata=replace(resource_request().metadata, deletion_timestamp=make.T0),
    )
    reported = resource_request(version="2", phase="Pending")
    for events, count in [
        ([resource_request()], 1),
        ([Listed([resource_request()])], 1),
        ([resource_request(), reported], 1),
        ([resource_request(), Listed([reported])], 1),
        ([resource_request(), resource_request(generation=2)], 2),
        ([resource_request(), gone], 2),
    ]:
        assert cache_after(*events)[1] == ["default/w"] * count


def test_a_reservation_belongs_to_whose_status_names_it():
    cache, _ = cache_after(resource_request(reservation_name="r"))
    assert cache.owner("r") == "default/w"
    assert cache.owner("other") == ""
    cache.unbind("r")
    assert cache.owner("r") == ""


def test_nothing_is_known_of_the_reservations_of_those_that_are_gone():
    for is_free in (True, False):
        going = resource_request(reservation_name="r")
        cache, _ = cache_after(going)
        cache.bind("never written down", going.key)
        cache.bind("of another", "default/other")
        if is_free:
            cache.mark_released(going)
        cache.handle_event(Deleted(going))
        cache.forget_deleted(going)
        owners = [cache.owner(name) for name in ("r", "never written down", "of another")]
        assert owners == ["", "", "default/other"]


def test_one_made_anew_keeps_what_it_has():
    old, new = (
        resource_request(uid="1", reservation_name="old"),
        resource_request(uid="2", reservation_name="new"),
    )
    cache, _ = cache_after(old, Deleted(old), new)
    cache.forget_deleted(old)
    assert cache.owner("new") == "default/w"


def test_a_reservation_that_its_request_names_no_more_is_nobodys():
    cache, _ = cache_after(
        resource_request(reservation_name="old"), resource_request(reservation_name="new")
    )
    assert (cache.owner("old"), cache.owner("new")) == ("", "default/w")
    cache.handle_event(resource_request())
    assert cache.owner("new") == ""


def test_one_that_goes_unseen_is_lost_however_that_is_noticed():
    old = resource_request()
    for event in (
        Deleted(old),
        Listed([]),
        resource_request(uid="v"),
        Listed([resource_request(uid="v")]),
    ):
        cache, reconciled = cache_after(old, event)
        assert cache.deleted_unfinalized("default/w") == [old]
        assert reconciled[-1] == "default/w"
        cache.forget_deleted(old)
        assert cache.deleted_unfinalized("default/w") == []


def test_one_that_was_free_to_go_is_not_lost():
    cache, _ = cache_after(resource_request())
    cache.mark_released(resource_request())
    cache.handle_event(Deleted(resource_request()))
    assert cache.deleted_unfinalized("default/w") == []


def test_each_that_went_under_one_name_is_lost_until_it_is_buried():
    first, second = resource_request(uid="1"), resource_request(uid="2")
    cache, _ = cache_after(first, Deleted(first), second, Deleted(second))
    assert cache.deleted_unfinalized("default/w") == [first, second]
    cache.forget_deleted(first)
    assert cache.deleted_unfinalized("default/w") == [second]


def test_a_late_word_of_one_that_is_gone_does_not_hide_the_new_one():
    first, second = resource_request(uid="1"), resource_request(uid="2")
    cache, reconciled = cache_after(second, Deleted(first))
    cache.handle_event(resource_request(uid="2", version="9"))
    assert reconciled == ["default/w", "default/w"]
