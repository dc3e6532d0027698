"""Encodes records as JSON text with a checksum.

JSON, so that a store can be read with the `sqlite3` shell. Missing fields take their defaults and unknown
ones are ignored, so older and newer versions read each other's records. SQLite does not
detect a flipped bit inside a row; the checksum does.
"""

from __future__ import annotations

from math import isfinite
from typing import TypeVar
from zlib import crc32

import msgspec

from kubelend.core.errors import StoreFailed
from kubelend.core.limits import Limits
from kubelend.core.members import Member, Token
from kubelend.core.models import Cluster, Reservation

AnyRecord = Cluster | Reservation | Member | Token | Limits
RecordType = TypeVar("RecordType", Cluster, Reservation, Member, Token, Limits)

CLUSTER_DECODER = msgspec.json.Decoder(Cluster)
RESERVATION_DECODER = msgspec.json.Decoder(Reservation)
MEMBER_DECODER = msgspec.json.Decoder(Member)
TOKEN_DECODER = msgspec.json.Decoder(Token)
LIMITS_DECODER = msgspec.json.Decoder(Limits)

_encoder = msgspec.json.Encoder()


class CorruptRecord(Exception):
    """A row is not what was written. Its text is a part of a sentence: what is wrong, and where."""


def encode_record(record: AnyRecord) -> tuple[str, int, bytes]:
    """A record's ID, checksum and JSON text."""
    try:
        text = _encoder.encode(_checked(record))
        return record.id, record_checksum(record.id.encode(), text), text
    except ValueError as error:
        raise StoreFailed(f"record {record.id!r} cannot be stored: {error}") from error


def decode_record(
    decoder: msgspec.json.Decoder[RecordType], row: tuple[bytes, int, bytes]
) -> RecordType:
    """The inverse of `encode_record`, from a row with its ID as bytes."""
    name, expected, text = row
    try:
        if record_checksum(name, text) == expected:
            return decoder.decode(text)
    except (msgspec.DecodeError, TypeError) as error:
        raise CorruptRecord(f"record {_display_id(name)} cannot be decoded: {error}") from error
    raise CorruptRecord(f"record {_display_id(name)} does not match its checksum")


def record_key(id: str) -> bytes:
    """An ID for a query. One with surrogates is never stored, and so never found."""
    return id.encode(errors="surrogatepass")


def record_checksum(id: bytes, text: bytes) -> int:
    """Over both, so that a record cannot appear under another ID."""
    return crc32(text, crc32(id))


def _checked(record: AnyRecord) -> AnyRecord:
    """JSON has no NaN and infinity: they would be encoded as null, which does not decode to a number."""
    if isinstance(record, Reservation):
        weights = record.request.weights
        if weights and not all(map(isfinite, weights.values())):
            raise ValueError("a weight is not a finite number")
    return record


def _display_id(name: bytes | None) -> str:
    return repr(name and name.decode(errors="replace"))
