"""The audit log: who did what, from where, the fields before and after, and rejected calls with
their reason.

Lines are hash-chained: each has a digest over itself and the digest of the line before it, so a
changed, removed or inserted line breaks the chain. Stores write the lines in the same transaction
as the change; `kubelend audit verify` verifies the chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from hashlib import sha256
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from kubelend.core.members import Member, Token
from kubelend.core.models import Cluster, Limits, Record, Reservation

AuditedRecord = Cluster | Reservation | Member | Token | Limits
AuditedFields = dict[str, Any]


class Actor(Record, frozen=True):
    """The caller, from its certificate, and its address."""

    name: str
    role: str
    remote: str = ""
    via: str = ""
    """The proxy that forwarded the call, if any."""


BROKER_ACTOR = Actor("broker", "broker")
"""Actor of actions without a caller, such as expiry or serving the queue."""


class AuditEntry(msgspec.Struct, frozen=True, gc=False):
    """An entry before it is chained. Cheap to create; encoded only when it is stored."""

    at: datetime
    actor: Actor
    action: str
    """The event class, or the route of a rejected call."""
    subject: str
    """`kind/name`."""
    before: AuditedRecord | None = None
    after: AuditedRecord | None = None
    code: str = ""
    """Error code of a rejected call; empty if it succeeded."""
    message: str = ""


class AuditRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The JSON text of a line."""

    number: int
    at: datetime
    actor: Actor
    action: str
    subject: str
    before: AuditedFields = {}
    after: AuditedFields = {}
    code: str = ""
    message: str = ""


class AuditLine(NamedTuple):
    """A chained entry."""

    number: int
    text: bytes
    digest: bytes

    @property
    def head(self) -> ChainHead:
        """The head of the chain after this line."""
        return ChainHead(self.number, self.digest)


class ChainHead(NamedTuple):
    """Head of a chain: number and digest of its last line."""

    number: int
    digest: bytes


TRUNCATED_ACTION = "AuditLogTruncated"
CHAIN_START = ChainHead(0, bytes(32))

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AuditRecord).decode


def chain_entries(entries: Iterable[AuditEntry], head: ChainHead) -> list[AuditLine]:
    """Chains the entries to `head`."""
    number, digest = head
    lines = []
    for entry in entries:
        number += 1
        text = _encode(_audit_record(entry, number))
        digest = sha256(digest + text).digest()
        lines.append(AuditLine(number, text, digest))
    return lines


def decode_line(line: AuditLine) -> AuditRecord:
    """Decodes a line; raises `msgspec.MsgspecError`."""
    return _decode(line.text)


def truncation_entry(last: AuditLine, now: datetime, moment: datetime) -> AuditEntry:
    """The entry that records a truncation up to `last`; without it the lines would count as missing."""
    message = f"Lines from before {moment:%Y-%m-%dT%H:%M:%SZ} were deleted after their retention"
    return AuditEntry(
        now, BROKER_ACTOR, TRUNCATED_ACTION, _truncation_subject(last.head), message=message
    )


def verify_chain(lines: Iterable[AuditLine], start: ChainHead, end: ChainHead) -> Iterator[str]:
    """Verifies the chain from `start` to `end`; yields one sentence per fault."""
    at = start
    is_attested = start == CHAIN_START
    for line in lines:
        is_attested = is_attested or _records_truncation(line, start)
        if line.number != at.number + 1:
            yield _gap_message(at.number + 1, line.number - 1)
        elif sha256(at.digest + line.text).digest() != line.digest:
            yield f"line {line.number} was modified"
        at = line.head
    if not is_attested:
        yield f"lines up to {start.number} are missing, and no line records their truncation"
    if at.number < end.number:
        yield _gap_message(at.number + 1, end.number)
    elif at != end:
        yield f"the audit log ends with line {at.number}, which is not the recorded line {end.number}"


def _records_truncation(line: AuditLine, start: ChainHead) -> bool:
    if TRUNCATED_ACTION.encode() not in line.text:
        return False
    what = decode_line(line)
    return (what.action, what.subject) == (TRUNCATED_ACTION, _truncation_subject(start))


def _truncation_subject(head: ChainHead) -> str:
    """Contains the digest, so that the beginning cannot be replaced."""
    return f"audit-log/{head.number}:{head.digest.hex()}"


def _gap_message(first: int, last: int) -> str:
    return f"line {first} is missing" if first == last else f"lines {first} to {last} are missing"


def _audit_record(entry: AuditEntry, number: int) -> AuditRecord:
    before = {} if entry.before is None else audited_fields(entry.before)
    after = {} if entry.after is None else audited_fields(entry.after)
    if before and after:
        before, after = _difference(before, after)
    return AuditRecord(
        number,
        entry.at,
        entry.actor,
        entry.action,
        entry.subject,
        before,
        after,
        entry.code,
        entry.message,
    )


def _difference(before: AuditedFields, after: AuditedFields) -> tuple[AuditedFields, AuditedFields]:
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    return (
        {name: before[name] for name in changed if name in before},
        {name: after[name] for name in changed if name in after},
    )


def audited_fields(record: AuditedRecord) -> AuditedFields:
    """The audited fields of a record: decisions, not measurements that change all the time."""
    values = ((name, get(record)) for name, get in _AUDITED_FIELDS[type(record)])
    return {name: value for name, value in values if value not in (None, "", {})}


_AUDITED_ATTRIBUTES: dict[type[AuditedRecord], str] = {
    Reservation: "phase reason requester request.resources target expires_at acknowledged_at",
    Cluster: "cordon advertisement.labels advertisement.prices advertisement.endpoint"
    " advertisement.policy",
    Member: "status key pending_key reason certificate revoked_at forget_at token",
    Token: "role name uses_left expires_at",
    Limits: "policy quota",
}


def _field_name(attribute: str) -> str:
    first, *others = attribute.rpartition(".")[2].split("_")
    return first + "".join(map(str.title, others))


_AUDITED_FIELDS = {
    kind: [(_field_name(attribute), attrgetter(attribute)) for attribute in attributes.split()]
    for kind, attributes in _AUDITED_ATTRIBUTES.items()
}
