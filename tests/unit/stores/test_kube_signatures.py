"""Seals of records, and the roll of the unfinished."""

import pytest
from msgspec.structs import replace

from kubelend.stores.kubernetes import objects
from kubelend.stores.kubernetes.objects import LiveSetDigest
from kubelend.wire.broker_objects import StoredRecord

KEY = objects.new_signature_key()
KEPT = StoredRecord(7, objects.sign(KEY, "reservation", "rsv-1", 7, "{}"), "{}")


def test_what_was_sealed_is_whole():
    assert objects.verify(KEY, "reservation", "rsv-1", KEPT)


@pytest.mark.parametrize(
    "key, kind, name, edited",
    [
        pytest.param(objects.new_signature_key(), "reservation", "rsv-1", {}, id="another key"),
        pytest.param(KEY, "cluster", "rsv-1", {}, id="another kind"),
        pytest.param(KEY, "reservation", "rsv-2", {}, id="another name"),
        pytest.param(KEY, "reservation", "rsv-1", {"revision": 8}, id="another revision"),
        pytest.param(KEY, "reservation", "rsv-1", {"data": "{} "}, id="another record"),
        pytest.param(KEY, "reservation", "rsv-1", {"checksum": "é"}, id="no signature"),
    ],
)
def test_what_was_changed_is_not_whole(key, kind, name, edited):
    assert not objects.verify(key, kind, name, replace(KEPT, **edited))


def test_roll_of_the_same_names_has_the_same_digest():
    one = LiveSetDigest(KEY, ["a", "b"])
    other = LiveSetDigest(KEY)
    for changes in ({"b": True, "c": True}, {"b": True}, {"c": False, "x": False}, {"a": True}):
        expected = other.digest_after(changes)
        other.apply(changes)
        assert other.digest == expected
    assert other.digest == one.digest


@pytest.mark.parametrize("names", [[], ["a"], ["a", "c"], ["a", "b", "c"]])
def test_roll_of_other_names_has_another_digest(names):
    assert LiveSetDigest(KEY, names).digest != LiveSetDigest(KEY, ["a", "b"]).digest


def test_digest_cannot_be_worked_out_without_the_key():
    assert (
        LiveSetDigest(KEY, ["a"]).digest != LiveSetDigest(objects.new_signature_key(), ["a"]).digest
    )
