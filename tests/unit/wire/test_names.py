"""Names made from IDs."""

import pytest

from kubelend.stores.kubernetes import objects
from kubelend.wire import cluster_namespaces
from kubelend.wire import objects as wire_objects


@pytest.mark.parametrize("id", ["rsv-1", "a.b-c.d", "x" * 240])
def test_id_that_can_be_a_name_is_one(id):
    assert wire_objects.object_name(id) == id


@pytest.mark.parametrize("id", ["Upper", "a b", "", "-a", "a..b", "x" * 241, "\ud800", "ß"])
def test_other_id_is_hashed(id):
    assert wire_objects.object_name(id).startswith("hashed-")
    assert len(wire_objects.object_name(id)) == 47


def test_id_that_looks_hashed_is_hashed_again_so_that_no_two_names_meet():
    assert wire_objects.object_name(wire_objects.object_name("A")) != wire_objects.object_name("A")
    assert cluster_namespaces.reservation_object_name(
        wire_objects.object_name("A")
    ) != cluster_namespaces.reservation_object_name("A")


@pytest.mark.parametrize("id", ["bonn", "Bonn", "hashed-x"])
def test_cluster_namespace_and_store_call_the_same_thing_the_same(id):
    assert cluster_namespaces.advertisement_object_name(id) == objects.record_object_name(
        "cluster", id
    )
    assert cluster_namespaces.reservation_object_name(id) == objects.record_object_name(
        "reservation", id
    )
