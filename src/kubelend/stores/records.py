"""Records as JSON text, each with a checksum: what a database keeps of them, and takes only if unharmed.

JSON, so that a person with the `sqlite3` shell can read a store. Fields that a record lacks take their
defaults and unknown ones are ignored, so older and newer versions read each other's records. SQLite
does not notice a flipped bit inside a row; the checksum does.
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
    """A row is not what was written. Carries a sentence part: what and where."""


def encode(record: Kept) -> tuple[str, int, bytes]:
    """A record's ID, checksum and JSON text."""
    try:
        text = _encoder.encode(_readable(record))
        return record.id, checksum(record.id.encode(), text), text
    except ValueError as error:
        raise StoreFailed(f"the record of {record.id!r} cannot be kept: {error}") from error


def decode(decoder: msgspec.json.Decoder[Some], row: tuple[bytes, int, bytes]) -> Some:
    """The inverse of `encode`, from a row with its ID as bytes."""
    name, expected, text = row
    try:
        if checksum(name, text) == expected:
            return decoder.decode(text)
    except (msgspec.DecodeError, TypeError) as error:
        raise Damaged(f"the record of {_shown(name)} cannot be read: {error}") from error
    raise Damaged(f"the record of {_shown(name)} does not have its checksum")


def key(id: str) -> bytes:
    """An ID to look for. One that is no text is never kept, and so never found."""
    return id.encode(errors="surrogatepass")


def checksum(id: bytes, text: bytes) -> int:
    """Over both, so that a record cannot turn up under another's ID."""
    return crc32(text, crc32(id))


def _readable(record: Kept) -> Kept:
    """JSON writes NaN and infinity as null, which no decoder takes for a number again."""
    if isinstance(record, Reservation):
        weights = record.request.weights
        if weights and not all(map(isfinite, weights.values())):
            raise ValueError("a weight is not a finite number")
    return record


def _shown(name: bytes | None) -> str:
    return repr(name and name.decode(errors="replace"))
