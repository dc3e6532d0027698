"""Seals on what objects keep, and the roll of the unfinished: what only the broker can have written. Pure.

Others may write a reservation's status and its labels. A seal tells whether a record is the broker's own, of
this object and of this commit. The roll tells whether all reservations that hold or wait were found, without
naming them. Both are made with a key that is in the head, which nobody but the broker may read.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from typing import Final

from kubelend.stores.kube_objects import RecordKind
from kubelend.wire.broker_objects import Kept


def new_key() -> str:
    return secrets.token_hex(32)


def seal(key: str, kind: RecordKind, name: str, revision: int, text: str) -> str:
    """Over all of it, so that a record counts under its own name and as of its own commit alone."""
    return _digest(key, f"{kind} {name} {revision} {text}").hex()


def is_whole(key: str, kind: RecordKind, name: str, kept: Kept) -> bool:
    """Whether a broker with this key has written what the object of this name keeps."""
    expected = seal(key, kind, name, kept.revision, kept.data)
    return hmac.compare_digest(expected.encode(), kept.checksum.encode())


class Roll:
    """Names of objects whose reservations are not over, with a digest of all of them."""

    def __init__(self, key: str, names: Iterable[str] = ()) -> None:
        self._key = key
        self._names: set[str] = set()
        self._digest = 0
        self.note(dict.fromkeys(names, True))

    @property
    def digest(self) -> str:
        return f"{self._digest:032x}"

    def note(self, changes: dict[str, bool]) -> None:
        """Those of True are not over from now on, the others are."""
        self._digest = self._after(changes)
        self._names |= {name for name, is_on in changes.items() if is_on}
        self._names -= {name for name, is_on in changes.items() if not is_on}

    def digest_after(self, changes: dict[str, bool]) -> str:
        """What it would be once these are noted."""
        return f"{self._after(changes):032x}"

    def _after(self, changes: dict[str, bool]) -> int:
        digest = self._digest
        for name, is_on in changes.items():
            if is_on is not (name in self._names):
                digest ^= int.from_bytes(_digest(self._key, f"unfinished {name}"))
        return digest


_LENGTH: Final = 16


def _digest(key: str, text: str) -> bytes:
    """Names of objects have no blanks, so no two things that are sealed give the same text."""
    return hmac.digest(key.encode(), text.encode(errors="surrogatepass"), "sha256")[:_LENGTH]
