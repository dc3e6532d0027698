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
from typing import Any, NamedTuple

import msgspec

from kubelend.core.limits import Limits
from kubelend.core.members import Member, Token
from kubelend.core.models import Cluster, Record, Reservation

Subject = Cluster | Reservation | Member | Token | Limits
Facts = dict[str, Any]


class Actor(Record, frozen=True):
    """The caller, from its certificate, and its address."""

    name: str
    role: str
    remote: str = ""
    via: str = ""
    """The proxy that forwarded the call, if any."""


THE_BROKER = Actor("broker", "broker")
"""Actor of actions without a caller, such as expiry or serving the queue."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """An entry before it is chained. Cheap to create; encoded only when it is stored."""

    at: datetime
    actor: Actor
    action: str
    """The event class, or the route of a rejected call."""
    subject: str
    """`kind/name`."""
    before: Subject | None = None
    after: Subject | None = None
    code: str = ""
    """Error code of a rejected call; empty if it succeeded."""
    message: str = ""


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """The JSON text of a line."""

    number: int
    at: datetime
    actor: Actor
    action: str
    subject: str
    before: Facts = {}
    after: Facts = {}
    code: str = ""
    message: str = ""


class Line(NamedTuple):
    """A chained entry."""

    number: int
    text: bytes
    digest: bytes

    @property
    def head(self) -> Head:
        """The head of the chain after this line."""
        return Head(self.number, self.digest)


class Head(NamedTuple):
    """Head of a chain: number and digest of its last line."""

    number: int
    digest: bytes


CUT = "AuditLogTruncated"
START = Head(0, bytes(32))

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Told).decode


def seal(entries: Iterable[Entry], head: Head) -> list[Line]:
    """Chains the entries to `head`."""
    number, digest = head
    lines = []
    for entry in entries:
        number += 1
        text = _encode(_told(entry, number))
        digest = sha256(digest + text).digest()
        lines.append(Line(number, text, digest))
    return lines


def told(line: Line) -> Told:
    """Decodes a line; raises `msgspec.MsgspecError`."""
    return _decode(line.text)


def cut(last: Line, now: datetime, moment: datetime) -> Entry:
    """The entry that records a truncation up to `last`; without it the lines would count as missing."""
    message = f"Lines from before {moment:%Y-%m-%dT%H:%M:%SZ} were deleted after their retention"
    return Entry(now, THE_BROKER, CUT, _cut_subject(last.head), message=message)


def breaks(lines: Iterable[Line], start: Head, end: Head) -> Iterator[str]:
    """Verifies the chain from `start` to `end`; yields one sentence per fault."""
    at = start
    is_attested = start == START
    for line in lines:
        is_attested = is_attested or _attests(line, start)
        if line.number != at.number + 1:
            yield _gap(at.number + 1, line.number - 1)
        elif sha256(at.digest + line.text).digest() != line.digest:
            yield f"line {line.number} was modified"
        at = line.head
    if not is_attested:
        yield f"lines up to {start.number} are missing, and no line records their truncation"
    if at.number < end.number:
        yield _gap(at.number + 1, end.number)
    elif at != end:
        yield f"the audit log ends with line {at.number}, which is not the recorded line {end.number}"


def _attests(line: Line, start: Head) -> bool:
    if CUT.encode() not in line.text:
        return False
    what = told(line)
    return (what.action, what.subject) == (CUT, _cut_subject(start))


def _cut_subject(head: Head) -> str:
    """Contains the digest, so that the beginning cannot be replaced."""
    return f"audit-log/{head.number}:{head.digest.hex()}"


def _gap(first: int, last: int) -> str:
    return f"line {first} is missing" if first == last else f"lines {first} to {last} are missing"


def _told(entry: Entry, number: int) -> Told:
    before = {} if entry.before is None else facts(entry.before)
    after = {} if entry.after is None else facts(entry.after)
    if before and after:
        before, after = _difference(before, after)
    return Told(
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


def _difference(before: Facts, after: Facts) -> tuple[Facts, Facts]:
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    return (
        {name: before[name] for name in changed if name in before},
        {name: after[name] for name in changed if name in after},
    )


def facts(record: Subject) -> Facts:
    """The audited fields of a record: decisions, not measurements that change all the time."""
    return {
        name: value for name, value in _all_facts(record).items() if value not in (None, "", {})
    }


def _all_facts(record: Subject) -> Facts:
    match record:
        case Reservation():
            return _of_reservation(record)
        case Cluster():
            return _of_cluster(record)
        case Member():
            return _of_member(record)
        case Token():
            return _of_token(record)
        case Limits():
            return {"policy": record.policy, "quota": record.quota}


def _of_reservation(record: Reservation) -> Facts:
    return {
        "phase": record.phase,
        "reason": record.reason,
        "requester": record.requester,
        "resources": record.request.resources,
        "target": record.target,
        "expiresAt": record.expires_at,
        "acknowledgedAt": record.acknowledged_at,
    }


def _of_cluster(record: Cluster) -> Facts:
    advertisement = record.advertisement
    return {
        "cordon": record.cordon,
        "labels": advertisement.labels,
        "prices": advertisement.prices,
        "endpoint": advertisement.endpoint,
        "policy": advertisement.policy,
    }


def _of_member(record: Member) -> Facts:
    return {
        "standing": record.standing,
        "key": record.key,
        "asks": record.asks,
        "reason": record.reason,
        "certificate": record.certificate,
        "revokedAt": record.revoked_at,
        "forgetAt": record.forget_at,
        "token": record.token,
    }


def _of_token(record: Token) -> Facts:
    return {
        "role": record.role,
        "name": record.name,
        "usesLeft": record.uses_left,
        "expiresAt": record.expires_at,
    }
