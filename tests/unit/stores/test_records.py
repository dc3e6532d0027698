"""Records as JSON with a checksum, and how long the archive retains them."""

import json
from datetime import UTC, datetime, timedelta
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


def test_record_of_an_older_version_loads():
    text = b"""{
        "id": "rsv-1",
        "created_at": "2026-01-01T12:00:00Z",
        "request": {"requester": "r", "resources": {"cpu": 1000, "memory": 1073741824}, "duration": "PT3600S"}
    }"""
    found = batch.decode_record(batch.RESERVATION_DECODER, row("rsv-1", text))
    assert found == make.reservation("rsv-1")
    assert (found.phase, found.reason) == (Phase.PENDING, Reason.WAITING)
    assert json.loads(batch.encode_record(found)[2]).keys() == {"id", "request", "created_at"}


def test_fields_of_a_newer_version_are_ignored():
    cluster = make.cluster("a", region="eu")
    _, _, text = batch.encode_record(cluster)
    newer = json.loads(text) | {"quarantine": {"since": 1}}
    newer["advertisement"]["colour"] = "blue"
    assert (
        batch.decode_record(batch.CLUSTER_DECODER, row("a", json.dumps(newer).encode())) == cluster
    )


def test_checksum_is_over_id_and_text():
    name, checksum, text = batch.encode_record(make.reservation("rsv-ä"))
    assert checksum == crc32(name.encode() + text)


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_every_flipped_bit_is_detected(position, flip):
    name, checksum, text = batch.encode_record(make.reservation("rsv-1"))
    corrupt = bytearray(name.encode() + text)
    corrupt[position % len(corrupt)] ^= flip
    with pytest.raises(CorruptRecord):
        batch.decode_record(
            batch.RESERVATION_DECODER, (bytes(corrupt[:5]), checksum, bytes(corrupt[5:]))
        )


@pytest.mark.parametrize(
    "corrupt",
    [
        pytest.param(row("rsv-1", b""), id="nothing"),
        pytest.param(row("rsv-1", b'{"id": "rsv-1"}'), id="half a record"),
        pytest.param(row("rsv-1", b"\xff\xfe"), id="no text"),
        pytest.param((None, 1, b"{}"), id="no id"),
        pytest.param((b"rsv-1", None, b"{}"), id="no checksum"),
        pytest.param((b"rsv-1", 1, None), id="no record"),
    ],
)
def test_corrupt_row_is_reported_by_id(corrupt):
    with pytest.raises(CorruptRecord, match="'rsv-1'" if corrupt[0] else "None"):
        batch.decode_record(batch.RESERVATION_DECODER, corrupt)


def with_weights(**weights):
    return make.reservation("rsv-1", make.request(weights=weights))


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(with_weights(cost=float("nan")), id="not a number"),
        pytest.param(with_weights(headroom=1.0, cost=float("-inf")), id="infinite"),
        pytest.param(make.reservation("rsv-1\ud800"), id="id that is no text"),
        pytest.param(
            replace(make.reservation("rsv-1"), message="\udfff"), id="message that is no text"
        ),
    ],
)
def test_record_that_could_not_be_decoded_again_is_rejected(record):
    with pytest.raises(StoreFailed, match=r"'rsv-1.*' cannot be stored"):
        batch.encode_record(record)


# -- retention

EARLY = datetime(1, 1, 2, tzinfo=UTC)


@pytest.mark.parametrize(
    "finishes, archive_for, retained_from",
    [
        pytest.param([make.T0], make.HOUR, make.T0 - make.HOUR, id="one"),
        pytest.param([make.T0 + make.HOUR, make.T0], make.HOUR, make.T0, id="the newest counts"),
        pytest.param([make.T0], timedelta(), make.T0, id="no longer than needed"),
        pytest.param([make.T0], timedelta.max, batch.MIN_TIME, id="for ever"),
        pytest.param([EARLY], timedelta(days=2), batch.MIN_TIME, id="before all time"),
    ],
)
def test_archive_is_retained_from_the_newest_finish_time_back(finishes, archive_for, retained_from):
    assert batch.compute_retention_limit(finishes, archive_for) == retained_from
