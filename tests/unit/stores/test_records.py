"""Records as rows: older and newer ones load, harmed ones do not."""

import json
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import make
from kubelend.core.errors import StoreFailed
from kubelend.core.lifecycle import Phase, Reason
from kubelend.stores import batch
from kubelend.stores.batch import CorruptRecord


def row(name: str, text: bytes):
    return name.encode(), batch.record_checksum(name.encode(), text), text


def test_record_with_only_what_has_no_default_loads():
    text = b"""{
        "id": "rsv-1",
        "created_at": "2026-01-01T12:00:00Z",
        "request": {"requester": "r", "resources": {"cpu": 1000, "memory": 1073741824}, "duration": "PT3600S"}
    }"""
    found = batch.decode_record(batch.RESERVATION_DECODER, row("rsv-1", text))
    assert found == make.reservation("rsv-1")
    assert (found.phase, found.reason) == (Phase.PENDING, Reason.WAITING)


def test_fields_of_a_newer_version_are_ignored():
    cluster = make.cluster("a", region="eu")
    _, _, text = batch.encode_record(cluster)
    newer = json.loads(text) | {"quarantine": {"since": 1}}
    newer["advertisement"]["colour"] = "blue"
    assert (
        batch.decode_record(batch.CLUSTER_DECODER, row("a", json.dumps(newer).encode())) == cluster
    )


def test_what_is_default_takes_no_room():
    _, _, text = batch.encode_record(make.reservation("rsv-1"))
    assert json.loads(text).keys() == {"id", "request", "created_at"}


def test_checksum_is_over_id_and_text():
    name, checksum, text = batch.encode_record(make.reservation("rsv-ä"))
    assert checksum == crc32(name.encode() + text)


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_no_flipped_bit_gets_through(position, flip):
    name, checksum, text = batch.encode_record(make.reservation("rsv-1"))
    harmed = bytearray(name.encode() + text)
    harmed[position % len(harmed)] ^= flip
    with pytest.raises(CorruptRecord):
        batch.decode_record(
            batch.RESERVATION_DECODER, (bytes(harmed[:5]), checksum, bytes(harmed[5:]))
        )


@pytest.mark.parametrize(
    "harmed",
    [
        pytest.param(row("rsv-1", b""), id="nothing"),
        pytest.param(row("rsv-1", b'{"id": "rsv-1"}'), id="half a record"),
        pytest.param(row("rsv-1", b"\xff\xfe"), id="no text"),
        pytest.param((None, 1, b"{}"), id="no id"),
        pytest.param((b"rsv-1", None, b"{}"), id="no checksum"),
        pytest.param((b"rsv-1", 1, None), id="no record"),
    ],
)
def test_harmed_row_is_reported_by_name(harmed):
    with pytest.raises(CorruptRecord, match="'rsv-1'" if harmed[0] else "None"):
        batch.decode_record(batch.RESERVATION_DECODER, harmed)


def weighing(**weights):
    return make.reservation("rsv-1", make.request(weights=weights))


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(weighing(cost=float("nan")), id="not a number"),
        pytest.param(weighing(headroom=1.0, cost=float("-inf")), id="infinite"),
        pytest.param(make.reservation("rsv-1\ud800"), id="id that is no text"),
        pytest.param(
            replace(make.reservation("rsv-1"), message="\udfff"), id="message that is no text"
        ),
    ],
)
def test_record_that_could_not_be_read_back_is_not_taken(record):
    with pytest.raises(StoreFailed, match=r"'rsv-1.*' cannot be stored"):
        batch.encode_record(record)
