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

Kept = Cluster | Reservation | Member | Token | Limits
Some = TypeVar("Some", Cluster, Reservation, Member, Token, Limits)

CLUSTERS = msgspec.json.Decoder(Cluster)
RESERVATIONS = msgspec.json.Decoder(Reservation)
MEMBERS = msgspec.json.Decoder(Member)
TOKENS = msgspec.json.Decoder(Token)
LIMITS = msgspec.json.Decoder(Limits)

_encoder = msgspec.json.Encoder()


class Damaged(Exception):
    """A row is not what was written. Its text is a part of a sentence: what is wrong, and where."""


def encode(record: Kept) -> tuple[str, int, bytes]:
    """A record's ID, checksum and JSON text."""
    try:
        text = _encoder.encode(_readable(record))
        return record.id, checksum(record.id.encode(), text), text
    except ValueError as error:
        raise StoreFailed(f"record {record.id!r} cannot be stored: {error}") from error


def decode(decoder: msgspec.json.Decoder[Some], row: tuple[bytes, int, bytes]) -> Some:
    """The inverse of `encode_record`, from a row with its ID as bytes."""
    name, expected, text = row
    try:
        if checksum(name, text) == expected:
            return decoder.decode(text)
    except (msgspec.DecodeError, TypeError) as error:
        raise Damaged(f"record {_shown(name)} cannot be decoded: {error}") from error
    raise Damaged(f"record {_shown(name)} does not match its checksum")


def key(id: str) -> bytes:
    """An ID for a query. One with surrogates is never stored, and so never found."""
    return id.encode(errors="surrogatepass")


def checksum(id: bytes, text: bytes) -> int:
    """Over both, so that a record cannot appear under another ID."""
    return crc32(text, crc32(id))


def _readable(record: Kept) -> Kept:
    """JSON has no NaN and infinity: they would be encoded as null, which does not decode to a number."""
    if isinstance(record, Reservation):
        weights = record.request.weights
        if weights and not all(map(isfinite, weights.values())):
            raise ValueError("a weight is not a finite number")
    return record


def _shown(name: bytes | None) -> str:
    return repr(name and name.decode(errors="replace"))
