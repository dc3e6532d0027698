"""Signatures of stored records, and the digest of the set of live reservations. Pure.

Others may write a reservation's status and its labels. The signature proves that the broker wrote a record,
for this object and in this commit. The digest proves that all unfinished reservations were found, without
naming them. Both use a key in the head, which only the broker may read.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from typing import Final

from kubelend.stores.kube_objects import RecordKind
from kubelend.wire.broker_objects import StoredRecord


def new_signature_key() -> str:
    return secrets.token_hex(32)


def sign(key: str, kind: RecordKind, name: str, revision: int, text: str) -> str:
    """Covers all of it, so that a record is valid only under its own name and commit."""
    return _hmac(key, f"{kind} {name} {revision} {text}").hex()


def verify(key: str, kind: RecordKind, name: str, record: StoredRecord) -> bool:
    """Whether a broker with this key has written the record of this object."""
    expected = sign(key, kind, name, record.revision, record.data)
    return hmac.compare_digest(expected.encode(), record.checksum.encode())


class LiveSetDigest:
    """Names of the objects of unfinished reservations, with a digest of the set."""

    def __init__(self, key: str, names: Iterable[str] = ()) -> None:
        self._key = key
        self._names: set[str] = set()
        self._digest = 0
        self.apply(dict.fromkeys(names, True))

    @property
    def digest(self) -> str:
        return f"{self._digest:032x}"

    def apply(self, changes: dict[str, bool]) -> None:
        """True marks a reservation as unfinished, False as finished."""
        self._digest = self._digest_after(changes)
        self._names |= {name for name, is_on in changes.items() if is_on}
        self._names -= {name for name, is_on in changes.items() if not is_on}

    def digest_after(self, changes: dict[str, bool]) -> str:
        """The digest after these changes."""
        return f"{self._digest_after(changes):032x}"

    def _digest_after(self, changes: dict[str, bool]) -> int:
        digest = self._digest
        for name, is_on in changes.items():
            if is_on is not (name in self._names):
                digest ^= int.from_bytes(_hmac(self._key, f"unfinished {name}"))
        return digest


_DIGEST_BYTES: Final = 16


def _hmac(key: str, text: str) -> bytes:
    """Object names contain no spaces, so that no two inputs give the same text."""
    return hmac.digest(key.encode(), text.encode(errors="surrogatepass"), "sha256")[:_DIGEST_BYTES]
